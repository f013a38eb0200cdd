"""What figures are measured on, and one writer at a time for the folder that keeps them."""

from __future__ import annotations

import platform
from pathlib import Path

import torch
import transformers
from filelock import FileLock, Timeout

from rag_windows import __version__
from rag_windows.errors import DataError, InputError


def machine() -> str:
    """Processor with its number of cores, and the accelerator if there is one."""
    described, names = Path("/proc/cpuinfo"), [platform.processor() or platform.machine()]
    if described.exists():
        lines = described.read_text(encoding="utf-8", errors="replace").splitlines()
        named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        names = named or names
    words = f"{len(names)} cores of {names[0]}" if names[0] else "an unknown processor"
    return words + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "")


def surroundings() -> dict[str, str]:
    """Versions and machine: what may change figures without anybody having asked for it."""
    return {
        "rag-windows": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "machine": machine(),
    }


def lock_folder(path: Path) -> FileLock:
    """Take the lock of a folder, which is made if it is missing; never waits."""
    lock = FileLock(path / ".lock")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InputError(
            f"Another process is writing {path}. Wait for it, or name another folder with --out."
        ) from error
    except OSError as error:
        raise DataError(f"{path} can't be made or locked: {error.strerror}.") from error
    return lock
