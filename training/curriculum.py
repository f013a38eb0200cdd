"""The order of training: more passages first, then harder names, pronouns, follow-ups and links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from training.recipes import Demonstrations, Recipe


@dataclass(frozen=True, slots=True)
class Level:
    """A recipe, how often it is drawn once the last level is reached, and when it is passed.

    It is passed when a running mean of the share of right answers exceeds `passed`, or after
    `MAX_STEPS` steps as the highest level.
    """

    recipe: Recipe | Demonstrations
    share: float
    passed: float = 0.9


def _wide(
    entities: int, questions: int, facts: int = 4, linked: bool = False, hops: float = 0.0
) -> Recipe:
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
        framed=0.25,
        linked=linked,
        hops=hops,
    )


LEVELS: tuple[Level, ...] = (
    Level(Recipe(1, questions=8), 0.02),
    # One fact each: nothing but the name tells the passages apart.
    Level(Recipe(4, facts=1, questions=12, mixed=0.0), 0.02),
    Level(Recipe(2, questions=12), 0.02),
    Level(Recipe(4, questions=16), 0.04),
    Level(Recipe(8, facts=5, questions=24), 0.14),
    Level(_wide(2, 12), 0.06, 0.85),
    Level(_wide(4, 16, facts=5), 0.12, 0.85),
    Level(_wide(8, 24), 0.24, 0.85),
    # Keywords alone first: between other words a new reader finds none of them.
    Level(Demonstrations(2, labels=(4, 8), keywords=(1, 2), words=(1, 1), questions=24), 0.03, 0.8),
    Level(Demonstrations(4, labels=(3, 6), keywords=(1, 3), words=(1, 2), questions=24), 0.04, 0.8),
    Level(Demonstrations(8, questions=24), 0.05, 0.8),
    Level(_wide(2, 12, linked=True, hops=0.6), 0.04, 0.8),
    Level(_wide(4, 16, linked=True, hops=0.6), 0.06, 0.8),
    Level(_wide(8, 24, linked=True, hops=0.6), 0.12, 0.8),
)
MIN_STEPS, MAX_STEPS, MEMORY = 30, 250, 0.95


@dataclass
class Curriculum:
    """Which level is reached and how well each is read; plain data, so that it can be saved."""

    level: int = 0
    steps_here: int = 0
    accuracy: dict[int, float] = field(default_factory=dict)

    def draw(self, rng: np.random.Generator) -> int:
        """The level of the next batch.

        On the way up two thirds are of the level reached and the others mostly of weak ones; at the
        top `share` decides.
        """
        if self.level == len(LEVELS) - 1:
            return int(rng.choice(len(LEVELS), p=[level.share for level in LEVELS]))
        if self.level == 0 or rng.random() < 0.67:
            return self.level
        errors = np.array([1.03 - self.accuracy.get(k, 0.5) for k in range(self.level)])
        return int(rng.choice(self.level, p=errors / errors.sum()))

    def note(self, level: int, accuracy: float) -> None:
        """Records the share of right answers in one batch; goes on to the next level when due."""
        before = self.accuracy.get(level, accuracy)
        self.accuracy[level] = before * MEMORY + accuracy * (1 - MEMORY)
        self.steps_here += 1
        read = self.accuracy.get(self.level, 0.0) > LEVELS[self.level].passed
        due = (read and self.steps_here > MIN_STEPS) or self.steps_here >= MAX_STEPS
        if due and self.level < len(LEVELS) - 1:
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
