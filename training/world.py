"""The invented world: its words, kinds of entities, relations and values, and the two splits.

Every entity has a name of two words. A tenth of all combinations of two words is held out: no
training text contains them, an evaluation is made of nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np


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
    "red blue green yellow purple teal white black grey brown pink turquoise silver crimson "
    "beige violet scarlet maroon lilac bronze"
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
EVENT_FIRSTS = (
    "Autumn Blossom Cherry Comet Cobalt Dragon Ember Falcon Frost Granite Harvest Heather Hazel "
    "Ironwood Juniper Lavender Maple Moonlight Nightfall Olive Peacock Pilgrim Poppy Rainbow "
    "Saffron Solstice Starlight Sunrise Thistle Thunder Tulip Willow Birch Canyon Cedar Clover "
    "Crescent Driftwood Eagle Firefly Lagoon Magnolia Meteor Nutmeg Orchid Primrose Sapphire Walnut"
).split()
EVENT_KINDS = (
    "Regatta Fair Marathon Congress Parade Tournament Gala Jubilee Carnival Auction Derby Pageant "
    "Rally Banquet Symposium Procession Festival Ceremony Concert Race Contest Market Exhibition "
    "Summit"
).split()
PRIZES = (
    "cup medal sword crown shield statue trophy goblet diamond chain plate brooch sceptre vase "
    "bracelet pendant"
).split()
YEARS = tuple(str(year) for year in range(1820, 1980))
MONTHS = (
    "January February March April May June July August September October November December"
).split()
DATES = tuple(f"{day} {month}" for month in MONTHS for day in range(1, 29))
FULL_DATES = tuple(f"{date} {year}" for date in DATES for year in YEARS[::5])
EMBLEMS = tuple(f"{colour} {animal}" for colour in COLOURS for animal in ANIMALS)

MADE_UP = _join(
    "blo da fre gi ko lu mip ne pro quo ril su tam vo wix zu",
    "bbin ck dra fen g lt nk ppo rv sh",
)
"""Words without a meaning, for demonstrations."""
LABELS = _join("Dax Fep Glor Jun Kiv Morp Nax Plim Spo Trel Vusk Wug", "a en ist or")
"""Names of the classes that demonstrations assign."""

COMMON = (
    "the of and to a in is was that for it as with his her on be at by he she they their this had "
    "not are but from or have an which one were all has been will would there more when who can "
    "if out so about up what no than its into them only other new some could time these two may "
    "then do first any my now such like our over man even most made after also did many before "
    "must through back years where much your way well down should because each just those people "
    "how too little good world very make still see own work long get here between both life being "
    "under never day same another know while last might us great old year off come since against "
    "go came right used take three You I We If Answer Use only Read The A It He She They answer "
    "question questions passages text texts using given short say briefly below please helpful "
    "assistant and word words context Context information query Query Question User Your Given "
    "prior knowledge following pieces retrieved provided concise The And its Its "
    "his her town river book company colour animal"
).split()
SYSTEM_PROMPTS = (
    "Answer the question from the passages.",
    "Use only the given texts. Answer with one word.",
    "You are a helpful assistant.",
    "Read the passages below and answer briefly.",
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
