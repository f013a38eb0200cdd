"""Notices that files change: by the system's messages for folders, by looking for single files."""

from __future__ import annotations

import glob
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

_log = logging.getLogger("rag_windows.server")

_TICK_S = 0.5
_SWEEP_S = 60.0
"""What the system does not tell of, as on a network's file system, is found after so long."""

_WITHOUT_MESSAGES_S = 2.0
_GATHERED_MS, _STEP_MS = 400, 50

State = dict[str, tuple[int, ...]]


def changing(paths: Sequence[str], stop: threading.Event) -> Iterator[None]:
    """Yield at once, after each change behind some paths, and every minute, until the event is set.

    Args:
        paths: files, folders (with everything below) and patterns; none of them has to exist.
        stop: ends the iteration within half a second.
    """
    seen, looked = _looked_at(paths), time.monotonic()
    while not stop.is_set():
        tops, first = _folders(paths), True
        for noticed in _ticks([*tops], stop):
            now, before = _looked_at(paths), seen
            # Behind the first message the system watches: what came before it is not missed.
            if noticed or first or now != before or time.monotonic() - looked >= _SWEEP_S:
                seen, looked, first = now, time.monotonic(), False
                yield
            if _folders(paths) != tops:
                break


def _ticks(folders: Sequence[str], stop: threading.Event) -> Iterator[bool]:
    """Every half second, or when something changed below the folders: whether it did."""
    from watchfiles import watch

    if folders:
        try:
            for changes in watch(
                *folders,
                watch_filter=None,
                debounce=_GATHERED_MS,
                step=_STEP_MS,
                stop_event=stop,
                rust_timeout=int(1000 * _TICK_S),
                yield_on_timeout=True,
                raise_interrupt=False,
            ):
                yield any(_wanted(path) for _, path in changes)
        except FileNotFoundError:  # one of them went meanwhile
            yield True
        except (OSError, RuntimeError) as error:  # the system has no watch left
            _log.warning(
                "The system does not tell of changed documents (%s), so they are looked for every "
                "%g seconds.",
                type(error).__name__,
                _WITHOUT_MESSAGES_S,
            )
            while not stop.wait(_WITHOUT_MESSAGES_S):
                yield True
        return
    while not stop.wait(_TICK_S):
        yield False


def _wanted(path: str) -> bool:
    """Whether it may be a document, or a folder of some, which may be gone already."""
    from rag_windows_retrievers import SUFFIXES

    return PurePath(path).suffix.lower() in SUFFIXES or not os.path.isfile(path)


def _folders(paths: Sequence[str]) -> State:
    """Folders that the system watches with everything below, and which ones they are now."""
    found: State = {}
    for path in paths:
        top = _base(path) if _deep(path) else path
        if os.path.isdir(top) and (_deep(path) or not _pattern(path)):
            status = os.stat(top)
            found[top] = (status.st_dev, status.st_ino)
    return found


def _looked_at(paths: Sequence[str]) -> State:
    """When single files were written, and those behind a pattern of one folder."""
    found: State = {}
    for path in paths:
        if os.path.isdir(path) or _deep(path):
            continue
        for one in glob.glob(path) if _pattern(path) else [path]:
            try:
                status = os.stat(one)
            except OSError:
                continue
            found[one] = (status.st_mtime_ns, status.st_size, status.st_ino)
    return found


def _pattern(path: str) -> bool:
    return glob.has_magic(path) and not os.path.exists(path)


def _deep(path: str) -> bool:
    """Whether it is a pattern of more than one folder."""
    return _pattern(path) and ("**" in path or glob.has_magic(os.path.dirname(path)))


def _base(path: str) -> str:
    """The folder that a pattern begins in."""
    parts: list[str] = []
    for part in Path(path).parts:
        if glob.has_magic(part):
            break
        parts.append(part)
    return str(Path(*parts)) if parts else "."
