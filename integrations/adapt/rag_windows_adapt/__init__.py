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
from rag_windows_adapt.training import Progress, Trainer, TrainingPlan, train

__all__ = [
    "Asked",
    "Lesson",
    "Marked",
    "MarkedLessons",
    "OwnLessons",
    "TrainingPlan",
    "Progress",
    "Teacher",
    "Trainer",
    "train",
]
