"""The order of training: what a batch may be made of, how often, and when a level is passed.

The reader: more passages first, then harder names, pronouns and follow-ups. The learner goes on
from the reader: in-context classification, and links between passages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from training.samples import Demonstrations, Recipe


@dataclass(frozen=True, slots=True)
class Level:
    """A recipe, how often it is drawn once the last level is reached, and when it is passed.

    It is passed when a running mean of the share of right answers exceeds `passed`, or after
    `Curriculum.max_steps` steps as the highest level.
    """

    recipe: Recipe | Demonstrations
    share: float
    passed: float = 0.9


def _wide(entities: int, questions: int, facts: int = 4) -> Recipe:
    return Recipe(
        entities,
        facts=facts,
        questions=questions,
        kin=0.25,
        missing=0.1,
        unstated=0.14,
        pronouns=0.25,
        surnames=0.1,
        follow=0.25,
        framed=0.25,
    )


def _linked(entities: int, questions: int) -> Recipe:
    return replace(_wide(entities, questions), linked=True, hops=0.6)


READER: tuple[Level, ...] = (
    Level(Recipe(1, questions=8), 0.02),
    # One fact each: nothing but the name tells the passages apart.
    Level(Recipe(4, facts=1, questions=12, mixed=0.0), 0.03),
    Level(Recipe(2, questions=12), 0.03),
    Level(Recipe(4, questions=16), 0.05),
    Level(Recipe(8, facts=5, questions=24), 0.22),
    Level(_wide(2, 12), 0.08, 0.85),
    Level(_wide(4, 16, facts=5), 0.17, 0.85),
    Level(_wide(8, 24), 0.40, 0.85),
)
LEARNER: tuple[Level, ...] = (
    Level(_wide(4, 16, facts=5), 0.06, 0.85),
    Level(_wide(8, 24), 0.12, 0.85),
    Level(Recipe(8, facts=5, questions=24), 0.06),
    # Keywords alone first: between other words a new reader finds none of them.
    Level(Demonstrations(2, labels=(4, 8), keywords=(1, 2), words=(1, 1), questions=24), 0.04),
    Level(Demonstrations(4, labels=(3, 6), keywords=(1, 3), words=(1, 2), questions=24), 0.06),
    Level(Demonstrations(8, labels=(2, 4), questions=24), 0.12),
    Level(Demonstrations(8, labels=(2, 16), keywords=(1, 3), questions=24), 0.20),
    Level(_linked(2, 12), 0.06),
    Level(_linked(4, 12), 0.10),
    Level(_linked(8, 16), 0.18),
)
CURRICULA: Mapping[str, tuple[Level, ...]] = {"reader": READER, "learner": LEARNER}


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
