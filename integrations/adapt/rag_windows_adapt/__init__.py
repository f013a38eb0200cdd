"""Teaches a local model to read windows side by side, from its own answers, without labels."""

from __future__ import annotations

from rag_windows_adapt.lessons import Asked, Lesson, Lessons, OwnQuestions
from rag_windows_adapt.training import Plan, Progress, Trainer, train

__all__ = ["Asked", "Lesson", "Lessons", "OwnQuestions", "Plan", "Progress", "Trainer", "train"]
