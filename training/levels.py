"""The order of training: what a batch may be made of, how often, and when a level is passed.

The reader: more passages first, then harder names, pronouns and follow-ups. The learner goes on
from the reader: in-context classification, and links between passages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from training.recipes import Demonstrations, Recipe


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
