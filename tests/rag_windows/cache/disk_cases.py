"""Small windows, a system whose calls fail or kill where a test says, and child processes."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import hashlib
import logging
import os
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rag_windows.cache import catalog, codec, disk, entry_file
from rag_windows.interchange import Window

FULL = os.environ.get("RAG_WINDOWS_FAULTS") == "full"
"""Whether every case is run; else a sample that fits into the time all tests have."""

STATEMENTS = {"connect", "execute", "executemany", "executescript"}


def key_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def entry(
    ids: Sequence[int], start: int, tensors: Sequence[torch.Tensor], *facts: Any
) -> codec.Entry:
    """An entry of each layer's keys, then of each layer's values."""
    half = len(tensors) // 2
    window = Window((*ids,), start, keys=(*tensors[:half],), values=(*tensors[half:],))
    return codec.Entry(window, *facts)


def kv_entry_of(number: int, tokens: int = 5, dtype: torch.dtype = torch.bfloat16) -> codec.Entry:
    """An entry of keys and values that depends on its number only."""
    noise = torch.Generator().manual_seed(number)
    layers = [torch.randn(2, tokens, width, generator=noise).to(dtype) for width in (4, 4, 6, 6)]
    ids, labels = range(number, number + tokens), ("document", f"passage-{number}")
    return entry(ids, 3, layers, 0.25, labels, 1_000_000.0)


def entry_of(number: int, tokens: int = 5, dtype: torch.dtype = torch.bfloat16) -> codec.Entry:
    """The same, of which odd ones hold states, as those of the model's own cache do."""
    made = kv_entry_of(number, tokens, dtype)
    if number % 2 == 0:
        return made
    (keys, first), (values, second) = made.window.keys, made.window.values
    states = (first.float().flatten(1), second, second.new_empty(0))
    window = Window(made.window.ids, 3, (keys,), (values,), states, (1, 1, 0, 0, 2))
    return dataclasses.replace(made, window=window)


def same_window(found: Window, wanted: Window) -> bool:
    """Whether two windows are the same to the bit; files hold no token ids, only their number."""
    pairs = zip(found.tensors, wanted.tensors, strict=True)
    facts = ((len(one.ids), one.start, one.layers) for one in (found, wanted))
    return len({*facts}) == 1 and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def right(found: codec.Entry, number: int, tokens: int = 5) -> bool:
    """Whether it is that of this number, in either form."""
    made = entry_of(number, tokens), kv_entry_of(number, tokens)
    return any(same_window(found.window, one.window) for one in made)


def tier(folder: Path, limit: int = 1 << 20, **more: Any) -> disk.DiskTier:
    return disk.DiskTier(folder, limit, **more)


def filled(folder: Path, numbers: range, limit: int = 1 << 20) -> disk.DiskTier:
    """A tier with these entries, as far as there is room."""
    made = tier(folder, limit)
    for number in numbers:
        made.put(key_of(number), entry_of(number))
    return made


def held(user: disk.DiskTier, numbers: range) -> list[int]:
    """Which entries are found; all that are found are right."""
    found = user.get_many([key_of(number) for number in numbers])
    there = [number for number in numbers if key_of(number) in found]
    assert all(right(found[key_of(number)], number) for number in there)
    return there


def entry_path(folder: Path, number: int) -> Path:
    return folder / "entries" / f"{key_of(number)}.safetensors"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "entries").iterdir())


def folder_bytes(folder: Path) -> int:
    """Bytes of all entries, those being written included."""
    found = 0
    for path in (folder / "entries").iterdir():
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            found += path.lstat().st_size
    return found


def warned(caplog: Any) -> int:
    return len([record for record in caplog.records if record.levelno >= logging.WARNING])


_CALLS = {
    *("open", "close", "stat", "fstat", "listdir", "mkdir", "makedirs", "chmod"),
    *("write", "preadv", "fsync", "rename", "unlink"),
}


class System:
    """What the disk tier calls: the operating system's functions, and SQLite's statements.

    Nothing waits for the medium: only a power cut could tell.

    Args:
        on_call: called with the number and name of each call before it is made; it may raise. A
            new file is opened by "open_new", and statements are "connect", "execute" and so on.
        at_most: bytes that one write takes.
    """

    def __init__(
        self,
        on_call: Callable[[int, str], None] = lambda number, name: None,
        at_most: int | None = None,
    ) -> None:
        self.calls: list[str] = []
        self.on_call = on_call
        self.at_most = at_most

    def told(self, name: str) -> None:
        self.calls.append(name)
        self.on_call(len(self.calls), name)


def killing(at: int, at_most: int | None = None) -> System:
    """This process dies at one call."""

    def on_call(number: int, name: str) -> None:
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return System(on_call, at_most)


class _Telling(ModuleType):
    """A module whose functions tell a system before they do their work."""

    def __init__(self, plain: ModuleType, system: System) -> None:
        super().__init__(plain.__name__)
        self._plain, self._system = plain, system

    def __getattr__(self, name: str) -> Any:
        plain, system = getattr(self._plain, name), self._system
        if self._plain is sqlite3 and name == "connect":

            def connect(*args: Any, **options: Any) -> Any:
                system.told("connect")
                made = plain(*args, factory=TellingConnection, **options)
                made.told = system.told
                return made

            return connect
        if name not in _CALLS:
            return plain

        def call(*args: Any, **options: Any) -> Any:
            if name == "close":
                # As on Linux: a descriptor is gone even if closing it reports an error.
                plain(*args)
                system.told(name)
                return None
            system.told("open_new" if name == "open" and args[1] & os.O_EXCL else name)
            if name == "fsync":
                return None
            if name == "write" and system.at_most is not None:
                return plain(args[0], args[1][: system.at_most])
            return plain(*args, **options)

        return call


class TellingConnection(sqlite3.Connection):
    told: Callable[[str], None] = staticmethod(lambda name: None)

    def execute(self, *args: Any) -> Any:
        self.told("execute")
        return super().execute(*args)

    def executemany(self, *args: Any) -> Any:
        self.told("executemany")
        return super().executemany(*args)

    def executescript(self, *args: Any) -> Any:
        self.told("executescript")
        return super().executescript(*args)


@contextlib.contextmanager
def on(system: System) -> Iterator[System]:
    """Let the disk tier, and all that it is made of, call this system."""
    places = [(module, "os", os) for module in (disk, entry_file, catalog)]
    places += [(catalog, "sqlite3", sqlite3)]
    before = [getattr(module, name) for module, name, _ in places]
    try:
        for module, name, plain in places:
            setattr(module, name, _Telling(plain, system))
        yield system
    finally:
        for (module, name, _), value in zip(places, before, strict=True):
            setattr(module, name, value)


def in_child(work: Callable[[], object]) -> int:
    """Start `work` in a forked process; returns its id.

    It ends with 0 unless something is raised or `False` returned.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        faulthandler.register(signal.SIGUSR1, file=2)
        code = int(work() is False)
    except BaseException:  # noqa: BLE001 - the child must not run on as a second pytest
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def end_of(child: int, within_s: float = 120.0) -> int:
    """Wait for a child; its exit code, or minus the signal that killed it.

    One that hangs writes where it stands to standard error first.
    """
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, signal.SIGUSR1)
    time.sleep(1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise TimeoutError(f"the child did not end within {within_s} s")
