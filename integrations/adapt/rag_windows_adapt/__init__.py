"""Teaches a local model to read windows side by side, from its own answers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    "Progress",
    "Teacher",
    "Trainer",
    "TrainingPlan",
    "train",
]


def __getattr__(name: str) -> Any:
    # On first use: every command of rag-windows imports this package, and none may wait for torch.
    if name in __all__:
        for module in ("lessons", "training"):
            home = import_module(f"{__name__}.{module}")
            if hasattr(home, name):
                return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
