"""The invented world: words, kinds of entities, their relations and values, and the two splits.

Every entity has a name of two words. A tenth of all combinations of two words is held out: no
training text contains them, the evaluation and the sample corpus are made of nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Split = Literal["train", "held-out"]


def _join(starts: str, ends: str) -> tuple[str, ...]:
    return tuple(a + b for a in starts.split() for b in ends.split())


FIRST_NAMES = _join(
    "Al Bel Cor Da El Fen Gal Ha Il Jo Ka Lo Mi Na Or Pe Ra Sa Te Va",
    "dan ra lin mira nor ris ven wyn",
)
SURNAMES = _join(
    "Ash Bram Cald Dor Ever Fal Gren Hol Ing Kest Lor Mar Nor Oak Pell Quill Ros Stan Thorn Ul "
    "Var Wend Yar Zel",
    "ane berg by den field gate ley mont ridge son wick worth",
)
TOWNS = _join(
    "Ar Bir Cas Dun Es Fir Gor Hel Is Kar Lin Mol Nes Ost Pol Rov Sul Tir Vel Wes",
    "ava ente holm ia mouth ola stad um",
)
RIVERS = _join("Ad Bro Ce Du Fe Gli Ka Lu", "na ver ssa reth lm")
REGIONS = _join("Aqua Boro Cala Dela Fara Goro Lusi Mora", "land mark nia vale")
SIDES = (
    "North South East West Upper Lower Port Old New Great Little Fort Lake Mount Castle Bridge"
).split()
ORG_KINDS = (
    "Foundry Brewery Press Bank Theatre Museum Institute Library Orchestra Shipyard Bakery Mill "
    "Society Observatory Pottery Nursery Academy Clinic Hotel Circus Garage Dairy Tannery Choir"
).split()
ADJECTIVES = (
    "Silent Golden Broken Hidden Burning Frozen Distant Crooked Bitter Gentle Hollow Velvet Wild "
    "Ancient Pale Lonely Restless Scarlet Secret Sunken Twisted Weary Winter Wooden Patient Iron "
    "Crystal Endless Faithful Forgotten Humble Midnight Northern Quiet Rusty Salted Shining Stolen "
    "Stubborn Wandering"
).split()
NOUNS = (
    "Harbour Garden Lantern Mirror Orchard Compass Bridge Clock Feather Letter Meadow Needle "
    "Ocean Palace Ribbon Shadow Tower Violin Window Anchor Basket Candle Desert Engine Forest "
    "Glacier Hammer Island Journey Kingdom Ladder Mountain Nest Oath Pearl Quarry Ring Staircase "
    "Thread Umbrella Valley Whistle Yard Bell Cradle Door Echo Fountain Gate Horizon"
).split()

JOBS = (
    "baker carpenter teacher painter doctor lawyer pilot sailor farmer tailor barber gardener "
    "librarian mechanic plumber sculptor translator watchmaker blacksmith banker chemist dentist "
    "fisherman glazier judge miner nurse potter surgeon weaver"
).split()
INSTRUMENTS = (
    "flute cello violin trumpet piano harp guitar clarinet drum oboe trombone banjo lute organ "
    "zither mandolin bassoon accordion horn viola"
).split()
SUBJECTS = (
    "botany law medicine history physics chemistry music geology astronomy logic grammar "
    "philosophy economics zoology geometry statistics theology anatomy rhetoric optics"
).split()
COLOURS = (
    "red blue green yellow purple orange white black grey brown pink turquoise silver crimson "
    "beige violet scarlet indigo ivory amber"
).split()
ANIMALS = (
    "dog cat parrot goat horse rabbit falcon tortoise donkey fox lion bear wolf stork heron "
    "swan raven badger beaver lizard"
).split()
PRODUCTS = (
    "cheese glass paper silk wine honey bells ropes boots clocks soap salt lace knives candles "
    "barrels carpets hats kites lenses maps mustard needles pipes rugs sails tiles toys vinegar "
    "wool"
).split()
TOPICS = (
    "love war friendship revenge greed hope exile freedom jealousy courage memory grief justice "
    "loneliness betrayal pride poverty childhood faith ambition"
).split()
GENRES = (
    "novel comedy tragedy ballad fable romance thriller play poem satire saga drama sonnet "
    "chronicle parody"
).split()
YEARS = tuple(str(year) for year in range(1820, 1980))


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of entity: the two word lists of its names, and the values of each relation."""

    name: str
    firsts: Sequence[str]
    seconds: Sequence[str]
    relations: Mapping[str, Sequence[str]]

    def is_held_out(self, first: int, second: int) -> bool:
        """Whether the combination of these two words (indices) belongs to the held-out tenth."""
        return (3 * first + 7 * second) % 10 == 0


KINDS: tuple[Kind, ...] = (
    Kind(
        "person",
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
        },
    ),
    Kind(
        "organisation",
        SURNAMES,
        ORG_KINDS,
        {
            "founded": YEARS,
            "seat": TOWNS,
            "product": PRODUCTS,
            "emblem": ANIMALS,
            "walls": COLOURS,
        },
    ),
    Kind(
        "place",
        SIDES,
        TOWNS,
        {
            "river": RIVERS,
            "region": REGIONS,
            "product": PRODUCTS,
            "founded": YEARS,
            "emblem": ANIMALS,
        },
    ),
    Kind(
        "work",
        ADJECTIVES,
        NOUNS,
        {
            "written": YEARS,
            "setting": TOWNS,
            "topic": TOPICS,
            "genre": GENRES,
            "cover": COLOURS,
        },
    ),
)


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
        facts = {r: str(rng.choice(np.array(kind.relations[r]))) for r in kept}
        entities.append(Entity(kind, name[0], name[1], facts))
    return entities
