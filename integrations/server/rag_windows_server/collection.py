"""The server's own documents while it runs: they come, change and go, with their windows."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections import abc
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_windows import Passage, PassageCache, RagWindowsError, WindowedLM
from rag_windows.integration import one_line
from rag_windows_server.watching import changing

if TYPE_CHECKING:
    from rag_windows_retrievers import Changes, Document, Index

_log = logging.getLogger("rag_windows.server")

_POLL_S = 0.5
"""How often other processes' changes are looked for, which reads two numbers."""

_RETRY_S = 30.0
"""Behind a failure: while windows are removed, what is being encoded is not stored."""

_NAMED = 5
"""Documents that a line of the log names."""


@dataclass(frozen=True, slots=True)
class ReadDocuments:
    """What a request reads of the documents.

    Attributes:
        version: of the index, when its passages were found.
        documents: that the passages belong to; None for all documents.
    """

    version: int
    documents: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """What a removal has done.

    Attributes:
        documents, passages: that are gone from the index; a document of which passages are left
            does not count.
        windows: that were removed from the caches, of all tenants.
        found: whether there was anything, or an earlier removal had not reached the shared store.
    """

    documents: int
    passages: int
    windows: int
    found: bool


def index_of(retriever: object) -> Index | None:
    """The index that a retriever finds passages in: itself, or the one behind a reranker."""
    from rag_windows_retrievers import Index

    while retriever is not None and not isinstance(retriever, Index):
        retriever = getattr(retriever, "retriever", None)
    return retriever


def followed(index: Index, paths: Iterable[str]) -> list[str]:
    """The paths; where there are none, those that the index followed before and that are here."""
    return [*paths] or [one for one in index.roots() if os.path.exists(one)]


def _watchable(paths: Iterable[str]) -> tuple[str, ...]:
    """Those of the paths that can be watched; the log says which ones can't."""
    given = [*paths]
    if distant := [one for one in given if "://" in one]:
        _log.info("Changes behind URLs are taken up at the next start only: %s.", _names(distant))
    return tuple(os.path.abspath(os.path.expanduser(one)) for one in given if "://" not in one)


class Follower:
    """Makes an index follow files while they change, in a thread of its own.

    Args:
        index: that follows.
        paths: see `rag_windows_retrievers.load_documents`; URLs are not watched.
        changed: called behind each change of the index.
    """

    def __init__(
        self, index: Index, paths: Iterable[str], changed: Callable[[], object] = lambda: None
    ) -> None:
        self._index, self._changed = index, changed
        self._paths = _watchable(paths)
        self._stop = threading.Event()
        self._reported: set[tuple[str, str]] = set()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; what could not be read before is not reported again."""
        if self._paths:
            self._reported = {(one.label, one.reason) for one in self._index.skipped()}
            self._thread = threading.Thread(
                target=self._run, name="rag-windows-follow", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """End within a second, or with the change that is being taken up."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Follower:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        last = ""
        for _ in changing(self._paths, self._stop):
            try:
                changes = self._index.follow(self._paths, missing=True)
                last = ""
            except Exception as error:  # noqa: BLE001 - whatever a file does, the others are followed
                if (text := one_line(str(error))) != last:
                    _log.warning("The documents can't be followed now: %s", text)
                last = text
                continue
            self._tell(changes)
            if changes:
                self._changed()

    def _tell(self, changes: Changes) -> None:
        kinds = ("added", "replaced", "removed")
        done = [(kind, found) for kind in kinds if (found := getattr(changes, kind))]
        if done:
            parts = [f"{len(found)} {kind} ({_names(found)})" for kind, found in done]
            _log.info("Documents that changed: %s.", ", ".join(parts))
        bad = {(one.label, one.reason) for one in changes.skipped if one.problem}
        for label, reason in sorted(bad - self._reported):
            _log.warning(
                "%s can't be read, and is not retrieved: %s.",
                one_line(label)[:200],
                one_line(reason)[:500].rstrip("."),
            )
        self._reported = bad


def _names(found: Sequence[str]) -> str:
    more = len(found) - _NAMED
    named = [one_line(one)[:100] for one in found[:_NAMED]]
    return ", ".join([*named, f"{more} more"] if more > 0 else named)


class Collection:
    """An index that changes while questions are answered from it.

    Windows of what is replaced or removed, by this process or another one, go from the caches of
    all tenants: from memory, accelerators, the disk and a shared store.

    Args:
        index: with the documents.
        retriever: what finds passages in it, such as the index itself.
        models: of each tenant one.
    """

    def __init__(self, index: Index, retriever: Any, models: Sequence[WindowedLM]) -> None:
        self.index = index
        self._retriever = retriever
        from rag_windows_retrievers.stale import StaleWindows

        # Tenants may share a salt, and so their part of the cache.
        self._caches: list[PassageCache] = list(
            {one.cache.salt_key: one.cache for one in models if one.cache is not None}.values()
        )
        self._lock = threading.RLock()
        self._note = self._noted_in()
        self._stale = StaleWindows(
            index, *self._caches, version=self._begun(), on_removed=self._forget
        )
        self._wake, self._stop = threading.Event(), threading.Event()
        self._poller: threading.Thread | None = None
        self._follower: Follower | None = None

    # Start and end.

    def start(self, follow: Iterable[str] = ()) -> None:
        """Notice from now on what changes, in the index and behind the paths.

        Args:
            follow: files, folders and patterns that the index follows.
        """
        self._poller = threading.Thread(target=self._poll, name="rag-windows-index", daemon=True)
        self._poller.start()
        self._follower = Follower(self.index, follow, self._wake.set)
        self._follower.start()

    def close(self) -> None:
        """End all of it."""
        self._stop.set()
        self._wake.set()
        if self._follower is not None:
            self._follower.close()
        if self._poller is not None:
            self._poller.join()

    # Reading.

    @property
    def passages(self) -> Sequence[Passage]:
        """All passages."""
        return self.index.passages

    def retrieve(self, query: str, k: int) -> Sequence[Passage]:
        """The `k` best ones."""
        found: Sequence[Passage] = self._retriever.retrieve(query, k)
        return found

    def read(self, query: str, k: int) -> tuple[Sequence[Passage], ReadDocuments]:
        """The `k` best ones for a request, which calls `ended` when it has ended."""
        with self.index.snapshot():
            version, found = self.index.version, self.retrieve(query, k)
        return found, ReadDocuments(version, frozenset(map(document_of, found)))

    def stale(self, reading: ReadDocuments) -> list[str]:
        """Documents of a reading that were replaced or removed since."""
        if self.index.version == reading.version:
            return []
        _, found = self.index.stale_since(reading.version)
        if found is None:
            return sorted(reading.documents or ())
        return [one for one in found if reading.documents is None or one in reading.documents]

    def notes(self, reading: ReadDocuments | None) -> list[str]:
        """What an answer says of documents that were changed or removed while it was written."""
        if reading is None:
            return []
        with suppress(RagWindowsError):  # an answer does not fail for it
            return [
                f"The document {one_line(one)[:200]!r} was "
                f"{'changed' if self.index.documents(one) else 'removed'} while this answer was "
                "written; it was answered from the text before."
                for one in self.stale(reading)
            ]
        return []

    def ended(self, reading: ReadDocuments | None) -> None:
        """End a reading: windows that it stored of documents that have changed are removed."""
        if reading is None:
            return
        try:
            stale = self.stale(reading)
        except RagWindowsError:  # the index is broken, and the log says so already
            stale = sorted(reading.documents or ())
        if stale:
            self._stale.add(stale)
            self._wake.set()

    # Changing.

    def sync(self) -> int:
        """Remove windows of all that was replaced or removed since the last call.

        Returns:
            The number of windows removed.

        Raises:
            CacheError: the shared store can't be asked. What is here is gone; it is tried again.
            RetrievalError: the index can't be read.
        """
        with self._lock:
            if not self._stale.waits():
                return 0
            windows = self._stale.drop()
            self._write_down(self._stale.version)
        return windows

    def add(self, documents: Sequence[Document], source: str | None = None) -> tuple[Changes, int]:
        """Add documents, see `rag_windows_retrievers.Index.add`; the windows removed for them.

        Raises:
            RagWindowsError: see `rag_windows_retrievers.Index.add` and `sync`.
        """
        with self._lock:
            changes = self.index.add(documents, source=source)
            windows = self.sync()
        self._tell_of("Documents that were sent", changes)
        return changes, windows

    def remove(self, name: str) -> Removed:
        """Remove a document, or all of a file, for good; see `rag_windows_retrievers.Index.remove`.

        When this returns, no new question finds it, and its windows are gone.

        Raises:
            RagWindowsError: the index can't be written, or see `sync`.
        """
        with self._lock:
            waits = self._stale.waits(name)
            documents, passages = self._holds(name)
            if documents:
                self._tell_of("Documents that were deleted", self.index.remove(name))
            windows = self.sync()
            if waits or not documents:
                windows += sum(cache.invalidate([name]) for cache in self._caches)
        return Removed(documents, passages, windows, found=waits or documents > 0)

    def remove_named(self, name: str) -> Removed:
        """Remove a document, all of a file, or passages by their own id; see `remove`.

        The neighbours of a passage may have been encoded in sight of it, so their windows go, too.
        """
        with self._lock:
            if (removed := self.remove(name)).found:
                return removed
            before = self.index.counts()
            if self.index.named([name]):
                self.index.remove_passages([name])
            after = self.index.counts()
            windows = removed.windows + self.sync()
        documents, passages = (
            before.documents - after.documents,
            before.passages - after.passages,
        )
        return Removed(documents, passages, windows, found=passages > 0)

    def _holds(self, name: str) -> tuple[int, int]:
        """How many documents and passages `remove` would take out."""
        with self.index.snapshot():
            found = self.index.documents(name)
            ours = {one.id for one in found}
            found += [one for one in self.index.documents(source=name) if one.id not in ours]
        return len(found), sum(one.passages for one in found)

    # Work behind the questions.

    def _tell_of(self, what: str, changes: Changes) -> None:
        touched = (*changes.added, *changes.replaced, *changes.removed)
        if touched:
            _log.info("%s: %d (%s).", what, len(touched), _names(touched))

    def _forget(self, documents: abc.Collection[str] | None) -> None:
        if documents is None:
            _log.info("Too much has changed in the index: all cached windows are removed.")

    def _poll(self) -> None:
        last, wait_s = "", _POLL_S
        while not self._stop.is_set():
            try:
                windows = self.sync()
                last, wait_s = "", _POLL_S
                if windows:
                    _log.info("Windows of changed documents that were removed: %d.", windows)
            except (RagWindowsError, OSError) as error:
                if (text := one_line(str(error))) != last:
                    _log.warning("Windows of changed documents could not be removed: %s", text)
                last, wait_s = text, _RETRY_S
            self._wake.wait(wait_s)
            self._wake.clear()

    # How far the caches have followed, from one run of the server to the next.

    def _begun(self) -> int:
        """The version up to which the caches have followed."""
        if self._note is None:
            return self.index.version
        try:
            return int(json.loads(self._note.read_text(encoding="utf-8"))["version"])
        except (OSError, ValueError, KeyError, TypeError):
            # This cache may have been filled from the index by others, of which nobody knows.
            now, stale = self.index.stale_since(0)
            return now if stale is None else 0

    def _noted_in(self) -> Path | None:
        """The file that holds it, in the index; None for caches that end with the process."""
        lasting = [
            text
            for one in self._caches
            for text in (str(one.path or ""), "" if one.shared is None else one.shared.url)
            if text
        ]
        if not lasting:
            return None
        name = hashlib.sha256("\n".join(sorted(lasting)).encode()).hexdigest()[:16]
        return self.index.folder / f"followed-{name}.json"

    def _write_down(self, version: int) -> None:
        if self._note is None:
            return
        part = self._note.with_suffix(f".{os.getpid()}")
        # Without it, windows that are gone already are looked for again.
        with suppress(OSError):
            part.write_text(json.dumps({"version": version}), encoding="utf-8")
            os.replace(part, self._note)


def document_of(passage: Passage) -> str:
    """The document that a passage of an index belongs to."""
    return passage.document or passage.id or ""
