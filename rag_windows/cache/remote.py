"""Calls into a store that machines share: its file system, threads nobody waits for, pauses."""

from __future__ import annotations

import contextlib
import logging
import posixpath
import queue
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from rag_windows.errors import InputError, MissingExtraError, install, require
from rag_windows.threads import Lock, in_children

logger = logging.getLogger(__name__)

AT_ONCE, _MOST_THREADS = 16, 256  # calls of one request; of all requests, hanging ones included
_FOLDERS = 10  # times that a folder is made anew for a file, as others remove it meanwhile
_STRIKES = 3  # failed requests in a row before a pause
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0

_WHOLE_OR_NOTHING = {"abfs", "abfss", "adl", "az", "gcs", "gs", "memory", "oci", "oss", "s3", "s3a"}
"""Protocols that only show complete objects; elsewhere an object is named when it is complete."""

T = TypeVar("T")


class Pauses:
    """When not to ask the store: pauses that double while it fails, and end when it answers."""

    def __init__(self) -> None:
        self._strikes = 0
        self._pause_s = self._until = 0.0
        self._lock = Lock()

    def may(self) -> bool:
        """Whether to ask now; after a pause one caller tries, and the others wait for its outcome.

        Who gets True then calls `well` or `failed`, unless there is no outcome.
        """
        with self._lock:
            now = time.monotonic()
            if self._pause_s and now < self._until:
                return False
            self._until = now + self._pause_s
            return True

    def well(self) -> None:
        """The store answered."""
        with self._lock:
            self._strikes, self._pause_s = 0, 0.0

    def failed(self) -> bool:
        """It failed or was too late; returns whether a pause begins now."""
        with self._lock:
            self._strikes += 1
            if self._strikes < _STRIKES:
                return False
            self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
            self._until = time.monotonic() + self._pause_s
            return True


class Remote:
    """The file system, the threads that call it, and its recent failures."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        require("A shared store", "fsspec", extra="shared")
        self._url, self._options = url, dict(options)
        self.lock, self.threads = Lock(), 0
        self.after_fork()
        self.root = self._open()[1].rstrip("/")
        protocols = self.system.protocol
        self.protocol = protocols if isinstance(protocols, str) else protocols[0]
        self.name = f"{self.protocol}://{self.root}"
        self.reads, self.writes = Pauses(), Pauses()
        self.unwritten = 0
        self._warned: set[Pauses] = set()
        in_children(self)
        if getattr(self.system, "async_impl", False):
            # Clients of clouds take a second to connect, which no request should wait for.
            connect = partial(self._connect, self.system)
            threading.Thread(target=connect, name="rag-windows-connect", daemon=True).start()

    def _connect(self, system: Any) -> None:
        with contextlib.suppress(Exception):  # requests will report it
            system.exists(f"{self.root}/entries")

    def after_fork(self) -> None:
        """A child has none of the threads; the parent's connections are not its own."""
        self.threads, self._system = 0, None

    @property
    def system(self) -> Any:
        """The file system, made anew in a child."""
        if self._system is None:
            self._system = self._open()[0]
        return self._system

    @system.setter
    def system(self, system: Any) -> None:
        self._system = system

    def read_failed(self, error: str) -> None:
        """Reading failed or was too late; after several of these, a pause begins."""
        if self.reads.failed():
            self._report(
                f"The shared store {self.name} can't be read for now. Answers stay right but take "
                f"longer: {error}",
                self.reads,
            )

    def write_failed(self, error: str) -> None:
        """The same for writing."""
        if self.writes.failed():
            self._report(
                f"The shared store {self.name} can't be written for now. Answers stay right, but "
                f"other machines encode again what this one did: {error}",
                self.writes,
            )

    def _report(self, text: str, pauses: Pauses) -> None:
        """Log a warning the first time."""
        level = logging.INFO if pauses in self._warned else logging.WARNING
        self._warned.add(pauses)
        logger.log(level, "%s", text)

    def _open(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        try:
            system, root = url_to_fs(self._url, **self._options)
        except ImportError as error:
            named = re.search(r"[Ii]nstall ['\"`]?([\w-]+)", str(error))  # as fsspec says it
            package = "another package" if named is None else named[1]
            raise MissingExtraError(
                f"The shared store needs {package}, which is not installed; run: "
                f"{install('shared')} {'' if named is None else package}".rstrip()
            ) from error
        except (ValueError, TypeError) as error:
            raise InputError(
                f"shared={self._url!r:.80} is not a store that can be used: {error}. Give a "
                "folder or a URL of fsspec, such as 's3://bucket/prefix'."
            ) from error
        return system, root

    def write(self, path: str, data: bytes) -> None:
        """Write an object, whole or not at all."""
        if self.protocol in _WHOLE_OR_NOTHING:
            self.system.pipe_file(path, data)
            return
        writing = f"{path}.{secrets.token_hex(8)}.tmp"
        try:
            self._begin_file(writing, data)
            self.system.mv(writing, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self.system.rm_file(writing)
            raise

    def _begin_file(self, path: str, data: bytes) -> None:
        """Write a file into a folder that others may remove at any time while it is empty."""
        for left in reversed(range(_FOLDERS)):
            try:
                self.system.makedirs(posixpath.dirname(path), exist_ok=True)
                self.system.pipe_file(path, data)
                return
            except (FileExistsError, FileNotFoundError):
                if not left:
                    raise

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects, those that are gone already included."""
        try:
            self.system.rm(list(paths))
        except FileNotFoundError:
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self.system.rm_file(path)
        if self.protocol not in _WHOLE_OR_NOTHING:
            for folder in {posixpath.dirname(path) for path in paths}:
                with contextlib.suppress(Exception):  # something is in it
                    self.system.rmdir(folder)

    def everything(self, folder: str) -> list[str]:
        """Paths of all files in a folder and in those below it."""
        self.system.invalidate_cache()
        return [str(path) for path in self.system.find(folder)]

    def names(self, folder: str) -> list[str]:
        """Last parts of the paths in a folder, which need not be there."""
        try:
            self.system.invalidate_cache(folder)
            found = self.system.ls(folder, detail=False)
        except FileNotFoundError:
            return []
        return sorted({posixpath.basename(str(path).rstrip("/")) for path in found})

    def files(self, folder: str) -> dict[str, Mapping[str, Any]]:
        """What lies in a folder, which need not be there: by path, size and times."""
        try:
            self.system.invalidate_cache(folder)
            found = self.system.ls(folder, detail=True)
        except FileNotFoundError:
            return {}
        return {str(one["name"]): one for one in found if one["type"] == "file"}


class Rest(Generic[T]):
    """The rest of a call: parts that threads do in parallel, and then the end."""

    def __init__(
        self, parts: Sequence[Callable[[], None]], end: Callable[[Exception | None], T]
    ) -> None:
        self.parts, self._end = parts, end
        self._left, self._lock = len(parts), threading.Lock()
        self._error: Exception | None = None

    def do(self, part: Callable[[], None]) -> bool:
        """Do a part; returns whether it was the last one."""
        try:
            part()
        except Exception as error:  # noqa: BLE001 - each store's library has errors of its own
            self._error = error
        with self._lock:
            self._left -= 1
            return not self._left

    def end(self) -> T:
        """The result, when all parts are done."""
        return self._end(self._error)


class StoreCalls(Generic[T]):
    """One function called on many things by threads of its own, which nobody must wait for.

    A call into a store may hang for minutes; then its thread is abandoned, and ends with the call.
    """

    def __init__(
        self,
        remote: Remote,
        call: Callable[[str], T | Rest[T]],
        things: Sequence[str],
        within_s: float,
    ) -> None:
        self._remote, self._call = remote, call
        self._jobs: deque[Callable[[], None]] = deque()
        self._landed: queue.SimpleQueue[tuple[str, T]] = queue.SimpleQueue()
        self._threads, self._closed = 0, False
        self.outstanding, self._within_s = len(things), within_s
        self.deadline = time.monotonic() + within_s
        if not self._add([partial(self._begin, thing) for thing in things]):
            self.deadline = time.monotonic()

    def _add(self, jobs: Sequence[Callable[[], None]]) -> int:
        """Queue these before what waits; returns how many threads are at work."""
        with self._remote.lock:
            if self._closed:
                return 0
            self._jobs.extendleft(reversed(jobs))
            most = min(AT_ONCE - self._threads, _MOST_THREADS - self._remote.threads)
            for _ in range(min(most, len(jobs))):
                one = threading.Thread(target=self._run, name="rag-windows-shared", daemon=True)
                try:
                    one.start()
                except RuntimeError:  # the system gives no more
                    break
                self._threads += 1
                self._remote.threads += 1
            return self._threads

    def _run(self) -> None:
        while True:
            with self._remote.lock:
                if not self._jobs:
                    self._threads -= 1
                    self._remote.threads -= 1
                    return
                job = self._jobs.popleft()
            job()

    def _begin(self, thing: str) -> None:
        made = self._call(thing)
        if isinstance(made, Rest):
            self._add([partial(self._go_on, thing, made, part) for part in made.parts])
        else:
            self._landed.put((thing, made))

    def _go_on(self, thing: str, rest: Rest[T], part: Callable[[], None]) -> None:
        if rest.do(part):
            self._landed.put((thing, rest.end()))

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.deadline

    def landed(self) -> Iterator[tuple[str, T]]:
        """What has come since the last time."""
        while self.outstanding:
            try:
                one = self._landed.get_nowait()
            except queue.Empty:
                return
            self.outstanding -= 1
            yield one

    def all(self) -> Iterator[tuple[str, T]]:
        """All results, until none comes for as long as the deadline was away at first."""
        with contextlib.suppress(queue.Empty):
            while self.outstanding:
                yield self._landed.get(timeout=self._within_s if self._threads else 0)
                self.outstanding -= 1
        self.close()

    def close(self) -> None:
        """Begin no further call."""
        with self._remote.lock:
            self._closed = True
            self._jobs.clear()


def in_words(error: BaseException) -> str:
    """An error of a store's library in one line; it may have no text of its own."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
