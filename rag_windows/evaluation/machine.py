"""What figures were measured on, in words."""

from __future__ import annotations

import platform
from pathlib import Path

import torch
import transformers

from rag_windows import __version__


def machine() -> str:
    """The processor's name and how many of it there are, and the accelerator's if there is one."""
    names = [platform.processor() or platform.machine()]
    described = Path("/proc/cpuinfo")
    if described.exists():
        lines = described.read_text(encoding="utf-8", errors="replace").splitlines()
        named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        names = named or names
    words = f"{len(names)} cores of {names[0]}" if names[0] else "an unknown processor"
    if torch.cuda.is_available():
        words += f", {torch.cuda.get_device_name()}"
    return words


def surroundings() -> dict[str, str]:
    """Versions and machine: what may change figures without anybody having asked for it."""
    return {
        "rag-windows": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "machine": machine(),
    }
