"""How far a run has come along its levels, and what it draws next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from training.levels import CURRICULA, Level

MIN_STEPS, MAX_STEPS, MEMORY = 30, 250, 0.95


@dataclass
class Curriculum:
    """Which level is reached and how well each is read; plain data, so that it can be saved."""

    name: str = "reader"
    level: int = 0
    steps_here: int = 0
    accuracy: dict[int, float] = field(default_factory=dict)

    @property
    def levels(self) -> tuple[Level, ...]:
        """All levels of this curriculum."""
        return CURRICULA[self.name]

    def draw(self, rng: np.random.Generator) -> int:
        """The level of the next batch.

        On the way up two thirds are of the level reached and the others mostly of weak ones; at the
        top `share` decides.
        """
        levels = self.levels
        if self.level == len(levels) - 1:
            return int(rng.choice(len(levels), p=[level.share for level in levels]))
        if self.level == 0 or rng.random() < 0.67:
            return self.level
        errors = np.array([1.03 - self.accuracy.get(k, 0.5) for k in range(self.level)])
        return int(rng.choice(self.level, p=errors / errors.sum()))

    def note(self, level: int, accuracy: float) -> None:
        """Records the share of right answers in one batch; goes on to the next level when due."""
        before = self.accuracy.get(level, accuracy)
        self.accuracy[level] = before * MEMORY + accuracy * (1 - MEMORY)
        self.steps_here += 1
        read = self.accuracy.get(self.level, 0.0) > self.levels[self.level].passed
        due = (read and self.steps_here > MIN_STEPS) or self.steps_here >= MAX_STEPS
        if due and self.level < len(self.levels) - 1:
            self.level += 1
            self.steps_here = 0

    def state(self) -> dict[str, Any]:
        """The fields as JSON-able data."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Curriculum:
        """The curriculum that `state` was taken from."""
        accuracy = {int(k): float(v) for k, v in state["accuracy"].items()}
        return cls(str(state["name"]), int(state["level"]), int(state["steps_here"]), accuracy)
