"""Small windows, and stand-ins for the system's calls that fail or kill where a test says."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rag_windows.cache.disk import DiskTier
from rag_windows.cache.entry import Entry
from rag_windows.cache.files import Files
from rag_windows.kv import Window

FULL = os.environ.get("RAG_WINDOWS_FAULTS") == "full"
"""Whether every case is run; else a sample that fits into the time all tests have."""

LAYERS = 2


def key_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def entry_of(number: int, tokens: int = 5, dtype: torch.dtype = torch.bfloat16) -> Entry:
    """An entry that depends on its number only."""
    noise = torch.Generator().manual_seed(number)

    def layer(width: int) -> torch.Tensor:
        return torch.randn(2, tokens, width, generator=noise).to(dtype)

    window = Window(
        ids=tuple(range(number, number + tokens)),
        start=3,
        keys=tuple(layer(4) for _ in range(LAYERS)),
        values=tuple(layer(6) for _ in range(LAYERS)),
    )
    return Entry(window, 0.25, ("document", f"passage-{number}"), 1_000_000.0)


def same_window(found: Window, wanted: Window) -> bool:
    """Whether two windows are the same to the bit; files hold no token ids, only their number."""
    pairs = zip((*found.keys, *found.values), (*wanted.keys, *wanted.values), strict=True)
    return (len(found.ids), found.start) == (len(wanted.ids), wanted.start) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs
    )


def right(found: Entry, number: int, tokens: int = 5) -> bool:
    return same_window(found.window, entry_of(number, tokens).window)


def entry_path(folder: Path, number: int) -> Path:
    return folder / "entries" / f"{key_of(number)}.safetensors"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "entries").iterdir())


def folder_bytes(folder: Path) -> int:
    """Bytes of all files but the locks."""
    found = 0
    for part in ("entries", "quarantine"):
        for path in (folder / part).iterdir():
            try:
                found += path.lstat().st_size
            except FileNotFoundError:
                continue  # removed meanwhile
    return found


class QuickFiles(Files):
    """Doesn't wait for the medium: only a power cut could tell."""

    def flush(self, descriptor: int) -> None:
        pass


class CountingFiles(QuickFiles):
    """Calls `on_call(number, name)` before each call; it may raise."""

    def __init__(self, on_call: Callable[[int, str], None] = lambda number, name: None) -> None:
        self.calls: list[str] = []
        self.on_call = on_call

    def told(self, name: str) -> None:
        self.calls.append(name)
        self.on_call(len(self.calls), name)

    def close(self, descriptor: int) -> None:
        # As on Linux: a descriptor is gone even if closing it reports an error.
        os.close(descriptor)
        self.told("close")


def _telling(name: str) -> Callable[..., Any]:
    plain = getattr(QuickFiles, name)

    def call(self: CountingFiles, *args: Any) -> Any:
        self.told(name)
        return plain(self, *args)

    return call


for _name in [name for name in vars(Files) if name[0] != "_" and name != "close"]:
    setattr(CountingFiles, _name, _telling(_name))


class HalfFiles(CountingFiles):
    """Writes at most half of what it is given, so that a call can end a file in its middle."""

    def write(self, descriptor: int, data: memoryview) -> int:
        self.told("write")
        return os.write(descriptor, data[: max(1, len(data) // 2)])


def tier(folder: Path, limit: int = 1 << 20, files: Files | None = None, **more: Any) -> DiskTier:
    return DiskTier(folder, limit, files=files or QuickFiles(), **more)


def in_child(work: Callable[[], object]) -> int:
    """Start `work` in a forked process; returns its id.

    It ends with 0 unless something is raised or `False` returned.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = int(work() is False)
    except BaseException:  # noqa: BLE001 - the child must not run on as a second pytest
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def end_of(child: int, within_s: float = 120.0) -> int:
    """Wait for a child; its exit code, or minus the signal that killed it."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise TimeoutError(f"the child did not end within {within_s} s")
