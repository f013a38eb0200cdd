"""Teaches a local model to read windows side by side, from its own answers."""

from __future__ import annotations

from rag_windows_adapt.lessons import (
    Asked,
    Lesson,
    Marked,
    MarkedLessons,
    OwnLessons,
    Teacher,
)
from rag_windows_adapt.training import Plan, Progress, Trainer, train

__all__ = [
    "Asked",
    "Lesson",
    "Marked",
    "MarkedLessons",
    "OwnLessons",
    "Plan",
    "Progress",
    "Teacher",
    "Trainer",
    "train",
]
