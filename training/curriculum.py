"""The order of training: more passages first, then harder names, pronouns and follow-ups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from training.samples import Recipe


def _wide(entities: int, questions: int, facts: int = 4) -> Recipe:
    return Recipe(
        entities,
        facts=facts,
        questions=questions,
        kin=0.25,
        missing=0.1,
        unstated=0.1,
        pronouns=0.25,
        surnames=0.1,
        follow=0.25,
    )


LEVELS: tuple[Recipe, ...] = (
    Recipe(1, questions=8),
    # One fact each: nothing but the name tells the passages apart.
    Recipe(4, facts=1, questions=12, mixed=0.0),
    Recipe(2, questions=12),
    Recipe(4, questions=16),
    Recipe(8, facts=5, questions=24),
    Recipe(16, questions=32),
    _wide(2, 12),
    _wide(4, 16, facts=5),
    _wide(8, 24),
    _wide(16, 32),
    Recipe(32, questions=48),
)
SHARES = (0.02, 0.02, 0.02, 0.04, 0.1, 0.2, 0.05, 0.12, 0.18, 0.15, 0.1)
"""How often each level is drawn once the last one is reached."""
PASS, PASS_WIDE, MIN_STEPS, MEMORY = 0.90, 0.85, 30, 0.95


@dataclass
class Curriculum:
    """Which level is reached and how well each is read; plain data, so that it can be saved."""

    level: int = 0
    steps_here: int = 0
    accuracy: dict[int, float] = field(default_factory=dict)

    def draw(self, rng: np.random.Generator) -> int:
        """The level of the next batch.

        On the way up two thirds are of the level reached and the others mostly of weak ones; at the
        top `SHARES` decides.
        """
        if self.level == len(LEVELS) - 1:
            return int(rng.choice(len(LEVELS), p=SHARES))
        if self.level == 0 or rng.random() < 0.67:
            return self.level
        errors = np.array([1.03 - self.accuracy.get(k, 0.5) for k in range(self.level)])
        return int(rng.choice(self.level, p=errors / errors.sum()))

    def note(self, level: int, accuracy: float) -> None:
        """Records the share of right answers in one batch; goes on to the next level when due."""
        before = self.accuracy.get(level, accuracy)
        self.accuracy[level] = before * MEMORY + accuracy * (1 - MEMORY)
        self.steps_here += 1
        wanted = PASS if LEVELS[self.level].follow == 0 else PASS_WIDE
        passed = self.accuracy.get(self.level, 0.0) > wanted and self.steps_here > MIN_STEPS
        if passed and self.level < len(LEVELS) - 1:
            self.level += 1
            self.steps_here = 0

    def state(self) -> dict[str, Any]:
        """The fields as JSON-able data."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Curriculum:
        """The curriculum that `state` was taken from."""
        accuracy = {int(k): float(v) for k, v in state["accuracy"].items()}
        return cls(int(state["level"]), int(state["steps_here"]), accuracy)
