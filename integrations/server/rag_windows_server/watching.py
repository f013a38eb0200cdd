"""Notices that files change: by the system's messages, and every minute."""

from __future__ import annotations

import glob
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

_log = logging.getLogger("rag_windows.server")

_SWEEP_S = 60.0
"""What the system does not tell of, as on a network's file system, is found after so long."""

_WITHOUT_MESSAGES_S = 2.0
_TICK_MS, _GATHERED_MS, _STEP_MS = 500, 400, 50


def changing(paths: Sequence[str], stop: threading.Event) -> Iterator[None]:
    """Yield at once, after each change behind some paths, and every minute, until the event is set.

    Args:
        paths: files, folders (with everything below) and patterns; none of them has to exist.
        stop: ends the iteration within half a second.
    """
    from watchfiles import watch

    while not stop.is_set():
        watched, due = _watched(paths), 0.0
        try:
            for changes in watch(
                *watched,
                watch_filter=None,
                debounce=_GATHERED_MS,
                step=_STEP_MS,
                stop_event=stop,
                rust_timeout=_TICK_MS,
                yield_on_timeout=True,
                raise_interrupt=False,
            ):
                found = {path for _, path in changes}
                itself = not found.isdisjoint(watched)
                # At the first tick the system watches already: what came before is not missed.
                if itself or any(map(_wanted, found)) or time.monotonic() >= due:
                    due = time.monotonic() + _SWEEP_S
                    yield
                # What is replaced as a whole is another file or folder to the system.
                if itself or _watched(paths) != watched:
                    break
        except FileNotFoundError:  # one of them went meanwhile
            stop.wait(_TICK_MS / 1000)
        except (OSError, RuntimeError) as error:  # the system has no watch left
            _log.warning(
                "The system does not tell of changed documents (%s), so they are looked for every "
                "%g seconds.",
                type(error).__name__,
                _WITHOUT_MESSAGES_S,
            )
            while not stop.wait(_WITHOUT_MESSAGES_S):
                yield


def _watched(paths: Sequence[str]) -> list[str]:
    """What the system watches, folders with everything below; for a pattern where it begins."""
    tops = [path if os.path.exists(path) else _base(path) for path in paths]
    return [one for one in tops if os.path.exists(one)]


def _base(path: str) -> str:
    """The folder that a pattern begins in; a path that is none itself."""
    parts = Path(path).parts
    magic = (at for at, part in enumerate(parts) if glob.has_magic(part))
    return str(Path(*parts[: next(magic, len(parts))]))


def _wanted(path: str) -> bool:
    """Whether it may be a document, or a folder of some, which may be gone already."""
    from rag_windows_retrievers import SUFFIXES

    return PurePath(path).suffix.lower() in SUFFIXES or not os.path.isfile(path)
