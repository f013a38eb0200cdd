"""Bytes at the peak of a run."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes(work: Callable[[], object], device: str = "cpu") -> int | None:
    """Bytes that a run needed at its peak beside those in use before it.

    On an accelerator what PyTorch allocated there; else this process's resident memory. What the
    process freed before and kept for itself would hide a part of the run, so on the CPU this is for
    a process that did nothing larger before.

    Returns:
        None where the kernel does not tell it; only Linux does.
    """
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - allocated
    gc.collect()
    _trim()
    try:
        _RESET.write_text("5", encoding="ascii")  # the largest resident size becomes today's
        before = _kilobytes("VmRSS")
        work()
        return (_kilobytes("VmHWM") - before) * 1024
    except OSError:
        return None


def _kilobytes(name: str) -> int:
    lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _trim() -> None:
    """Give freed memory back, so that it can't be used again unseen; glibc alone can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
