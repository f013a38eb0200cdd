"""Bytes at the peak of a run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch

_EVERY_S = 0.002


def peak_bytes(work: Callable[[], object]) -> int:
    """Bytes that a run needed at its peak beside those in use before it.

    On an accelerator what PyTorch allocated there; else this process's resident memory, looked at
    every 2 milliseconds.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    before = peak = _resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(_EVERY_S):
            peak = max(peak, _resident())

    watcher = threading.Thread(target=watch, name="rag-windows-memory", daemon=True)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(peak, _resident()) - before


def _resident() -> int:
    """Resident bytes; only Linux tells them while a process runs."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
