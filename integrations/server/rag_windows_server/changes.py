"""Reports documents that have changed since the server read them at its start."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress

from rag_windows.errors import DocumentError

State = dict[str, tuple[int, int]]
"""When each file was written (nanoseconds), and its size (bytes), by its path."""


@contextmanager
def telling_changes(
    paths: Sequence[str], tell: Callable[[str], object], every_s: float = 5.0
) -> Generator[None]:
    """Report once each document that changes, is added or removed meanwhile, with advice.

    Files behind URLs are not looked at.
    """
    local, ended = [path for path in paths if "://" not in path], threading.Event()

    def watch() -> None:
        last = before
        while not ended.wait(every_s):
            now = _state(local)
            for line in _changes(last, now):
                tell(line)
            last = now

    if not local:
        yield
        return
    before = _state(local)
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
        done = "added" if path not in before else "removed" if path not in now else "changed"
        yield (
            f"{path} was {done} after the server read its documents. Answers do not know of it "
            "until the server is restarted."
        )


def _state(paths: Sequence[str]) -> State:
    from rag_windows_retrievers.documents import DocumentFile, found_files

    found: State = {}
    for path in paths:
        with suppress(DocumentError):  # a file of this name was removed
            for one in found_files(path):
                if isinstance(one, DocumentFile):
                    with suppress(OSError):
                        status = os.stat(one.path)
                        found[one.path] = (status.st_mtime_ns, status.st_size)
    return found
