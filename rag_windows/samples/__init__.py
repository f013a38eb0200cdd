"""Where the shipped samples lie."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def samples_path() -> Path:
    """Folder of the shipped samples."""
    return Path(str(resources.files("rag_windows") / "samples"))
