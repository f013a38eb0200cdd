"""Says which files have changed since they were read: nobody reads them again before a restart."""

from __future__ import annotations

import glob
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

State = dict[Path, tuple[int, int]]
"""When each file was written (nanoseconds), and its size (bytes)."""


@contextmanager
def telling_changes(
    paths: Sequence[str | Path], tell: Callable[[str], object], every_s: float = 5.0
) -> Generator[None]:
    """Tell once of each file that changes, comes or goes meanwhile, with what to do."""
    before, ended = _state(paths, None), threading.Event()
    kinds = frozenset(path.suffix for path in before)

    def watch() -> None:
        last = before
        while not ended.wait(every_s):
            now = _state(paths, kinds)
            for line in _changes(last, now):
                tell(line)
            last = now

    if not before:
        yield
        return
    thread = threading.Thread(target=watch, name="rag-windows-changes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _changes(before: State, now: State) -> Iterator[str]:
    for path in sorted(before.keys() | now.keys()):
        if before.get(path) == now.get(path):
            continue
        done = "changed" if path in before and path in now else "removed" if path in before else ""
        old = f"was {done or 'added'} after the server read its documents."
        yield f"{path} {old} Answers do not know of it until the server is restarted."


def _state(paths: Sequence[str | Path], kinds: frozenset[str] | None) -> State:
    """Of all files; of those in folders that came later, only of ``kinds`` that were there."""
    found: State = {}
    for given in map(str, paths):
        # As documents are read: a file or folder of this name, else a pattern.
        named = [given] if os.path.exists(given) else glob.glob(given, recursive=True)
        for path in (path for one in named for path in _files(Path(one))):
            try:
                status = path.stat()
            except OSError:
                continue
            if kinds is None or path.suffix in kinds:
                found[path] = (status.st_mtime_ns, status.st_size)
    return found


def _files(given: Path) -> Iterator[Path]:
    if not given.is_dir():
        yield given
        return
    for folder, folders, names in os.walk(given):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))
