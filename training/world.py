"""The invented world: kinds of entities, their relations and values, and the two splits.

Every entity has a name of two words. A tenth of all combinations of two words is held out: no
training text contains them, the evaluation and the sample corpus are made of nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from training.words import (
    ADJECTIVES,
    ANIMALS,
    COLOURS,
    DATES,
    EMBLEMS,
    EVENT_FIRSTS,
    EVENT_KINDS,
    FIRST_NAMES,
    FULL_DATES,
    GENRES,
    INSTRUMENTS,
    JOBS,
    NOUNS,
    ORG_KINDS,
    PRIZES,
    PRODUCTS,
    REGIONS,
    RIVERS,
    SIDES,
    SUBJECTS,
    SURNAMES,
    TOPICS,
    TOWNS,
    YEARS,
)

Split = Literal["train", "held-out"]


@dataclass(frozen=True, slots=True)
class NamesOf:
    """Values that are names of entities of a kind: two words."""

    kind: str


Values = Sequence[str] | NamesOf


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of entity: the two word lists of its names, and the values of each relation.

    `noun` is what later mentions may call it ("the company"), None for people.
    """

    name: str
    noun: str | None
    firsts: Sequence[str]
    seconds: Sequence[str]
    relations: Mapping[str, Values]

    def is_held_out(self, first: int, second: int) -> bool:
        """Whether the combination of these two words (indices) belongs to the held-out tenth."""
        return (3 * first + 7 * second) % 10 == 0


KINDS: tuple[Kind, ...] = (
    Kind(
        "person",
        None,
        FIRST_NAMES,
        SURNAMES,
        {
            "birthplace": TOWNS,
            "home": TOWNS,
            "job": JOBS,
            "instrument": INSTRUMENTS,
            "subject": SUBJECTS,
            "colour": COLOURS,
            "birth year": YEARS,
            "pet": ANIMALS,
            "birthday": DATES,
            "employer": NamesOf("organisation"),
        },
    ),
    Kind(
        "organisation",
        "the company",
        SURNAMES,
        ORG_KINDS,
        {
            "founded": YEARS,
            "seat": TOWNS,
            "product": PRODUCTS,
            "emblem": EMBLEMS,
            "walls": COLOURS,
            "opening": FULL_DATES,
            "founder": NamesOf("person"),
        },
    ),
    Kind(
        "place",
        "the town",
        SIDES,
        TOWNS,
        {
            "river": RIVERS,
            "region": REGIONS,
            "product": PRODUCTS,
            "founded": YEARS,
            "emblem": EMBLEMS,
            "mayor": NamesOf("person"),
        },
    ),
    Kind(
        "work",
        "the book",
        ADJECTIVES,
        NOUNS,
        {
            "written": YEARS,
            "setting": TOWNS,
            "topic": TOPICS,
            "genre": GENRES,
            "cover": COLOURS,
            "author": NamesOf("person"),
        },
    ),
    Kind(
        "event",
        "the event",
        EVENT_FIRSTS,
        EVENT_KINDS,
        {
            "town": TOWNS,
            "first year": YEARS,
            "date": DATES,
            "prize": PRIZES,
            "winner": NamesOf("person"),
        },
    ),
)


def kind_named(name: str) -> Kind:
    """The kind of this name."""
    return next(kind for kind in KINDS if kind.name == name)


@dataclass(frozen=True, slots=True)
class Entity:
    """One invented thing: its kind, the two words of its name, and relation -> value."""

    kind: Kind
    first: str
    second: str
    facts: Mapping[str, str]

    @property
    def name(self) -> str:
        """The full name, two words."""
        return f"{self.first} {self.second}"

    @property
    def pronoun(self) -> str:
        """`she` or `he` for people (settled by the first name), `it` for everything else."""
        if self.kind.name != "person":
            return "it"
        return "she" if self.kind.firsts.index(self.first) % 2 == 0 else "he"


def draw_name(
    rng: np.random.Generator, kind: Kind, split: Split, like: Entity | None = None
) -> tuple[str, str]:
    """Draws a name of the split; with `like`, one that shares a word with that entity's name."""
    while True:
        i, j = int(rng.integers(len(kind.firsts))), int(rng.integers(len(kind.seconds)))
        if like is not None:
            if rng.random() < 0.5:
                i = list(kind.firsts).index(like.first)
            else:
                j = list(kind.seconds).index(like.second)
        if kind.is_held_out(i, j) == (split == "held-out"):
            return kind.firsts[i], kind.seconds[j]


def draw_value(rng: np.random.Generator, values: Values, split: Split) -> str:
    """Draws a value; where values are names, one of the split."""
    if isinstance(values, NamesOf):
        return " ".join(draw_name(rng, kind_named(values.kind), split))
    return values[int(rng.integers(len(values)))]


def draw_entities(
    rng: np.random.Generator,
    kind: Kind,
    count: int,
    relations: Sequence[str],
    *,
    split: Split = "train",
    kin: float = 0.0,
    missing: float = 0.0,
) -> list[Entity]:
    """Draws `count` entities with different names that state the same relations.

    `kin` is the chance that a name shares one word with an earlier one, `missing` the chance that
    an entity lacks a relation (each keeps at least one).
    """
    entities: list[Entity] = []
    names: set[tuple[str, str]] = set()
    words: set[str] = set()
    while len(entities) < count:
        related = bool(entities) and rng.random() < kin
        like = entities[int(rng.integers(len(entities)))] if related else None
        name = draw_name(rng, kind, split, like)
        clash = bool(words & set(name)) and not related
        # Short word lists run out of names without a common word: then any new name will do.
        if name in names or (clash and rng.random() < 0.9):
            continue
        names.add(name)
        words.update(name)
        kept = [r for r in relations if rng.random() >= missing]
        kept = kept or [relations[int(rng.integers(len(relations)))]]
        facts = {r: draw_value(rng, kind.relations[r], split) for r in kept}
        entities.append(Entity(kind, name[0], name[1], facts))
    return entities
