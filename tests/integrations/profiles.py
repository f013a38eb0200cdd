"""Profiles of the small model, as it is loaded from a folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rag_windows import WindowedLM
from rag_windows.calibration import ModelFingerprint, Profile
from tests.rag_windows import small
from tests.rag_windows.calibration.profiles import GUARD, profile

PROFILED = profile().method
"""What they bring; not the default."""

__all__ = ["GUARD", "PROFILED", "saved", "stamped"]


def saved(folder: Path) -> Path:
    """A folder with the small model and its tokenizer."""
    small.model().save_pretrained(folder)
    small.tokenizer().save_pretrained(folder)
    return folder


def stamped(folder: Path, guard: Any = None) -> Profile:
    """One that was made for the model in a folder, with a guard's threshold or without."""
    model = WindowedLM.from_pretrained(folder).model
    return dataclasses.replace(profile(), model=ModelFingerprint.of(model), guard=guard)
