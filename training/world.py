"""The invented world: its words, kinds of entities, what is said of them, and the two splits.

Every entity has a name of two words. A tenth of all combinations of two words is held out: no
training text contains them, an evaluation is made of nothing else. So is a quarter of the pairs
(statement form, question form) of each relation: training asks no question in that form about a
fact that was stated in that form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

Split = Literal["train", "held-out"]
T = TypeVar("T")
NOT_STATED = "not stated"


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


def pick(rng: np.random.Generator, several: Sequence[T]) -> T:
    """One of them, each as likely."""
    return several[int(rng.integers(len(several)))]


@dataclass(frozen=True, slots=True)
class NamesOf:
    """Values that are names of entities of a kind: two words."""

    kind: str


@dataclass(frozen=True, slots=True)
class Relation:
    """Its values, and how it is put into words: `{n}` stands for the entity, `{v}` for the value.

    `bridge` is how a question names the value through the entity.
    """

    values: Sequence[str] | NamesOf
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    bridge: str | None

    def draw_value(self, rng: np.random.Generator, split: Split) -> str:
        """A value; where values are names, one of the split."""
        if isinstance(self.values, NamesOf):
            return " ".join(draw_name(rng, kind_named(self.values.kind), split))
        return pick(rng, self.values)

    def draw_pair(self, rng: np.random.Generator, split: Split) -> tuple[int, int]:
        """(statement form, question form), indices, of the split."""
        while True:
            pair = int(rng.integers(len(self.statements))), int(rng.integers(len(self.questions)))
            if is_held_out(*pair) == (split == "held-out"):
                return pair

    def draw_question(self, rng: np.random.Generator, statement: int, split: Split) -> int:
        """A question form for a fact stated in a form, the pair being of the split."""
        forms = range(len(self.questions))
        fits = [q for q in forms if is_held_out(statement, q) == (split == "held-out")]
        return pick(rng, fits)


def is_held_out(statement: int, question: int) -> bool:
    """Whether this pair of form indices belongs to the held-out quarter."""
    return (statement + question) % 4 == 3


def are_held_out(first: int, second: int) -> bool:
    """Whether the combination of two words (indices) belongs to the held-out tenth."""
    return (3 * first + 7 * second) % 10 == 0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of entity: the two word lists of its names, and its relations.

    `noun` is what later mentions may call it ("the company"), None for people.
    """

    name: str
    noun: str | None
    firsts: Sequence[str]
    seconds: Sequence[str]
    relations: Mapping[str, Relation]


def _relation(
    values: Sequence[str] | NamesOf, statements: str, questions: str, bridge: str | None = None
) -> Relation:
    return Relation(values, tuple(statements.split(" | ")), tuple(questions.split(" | ")), bridge)


_PERSON = {
    "birthplace": _relation(
        TOWNS,
        "{n} was born in {v}. | The birthplace of {n} is {v}. | {n} comes from {v}.",
        "Where was {n} born? | What is the birthplace of {n}?"
        " | In which town was {n} born? | Where does {n} come from?",
    ),
    "home": _relation(
        TOWNS,
        "{n} lives in {v}. | The home of {n} is in {v}. | {n} has a house in {v}.",
        "Where does {n} live? | In which town does {n} live? | Where is the home of {n}?"
        " | Where does {n} have a house?",
    ),
    "job": _relation(
        JOBS,
        "{n} works as a {v}. | The job of {n} is {v}. | {n} earns a living as a {v}.",
        "What does {n} work as? | What is the job of {n}? | Which job does {n} have?"
        " | How does {n} earn a living?",
    ),
    "instrument": _relation(
        INSTRUMENTS,
        "{n} plays the {v}. | The instrument of {n} is the {v}. | {n} makes music on the {v}.",
        "What does {n} play? | Which instrument does {n} play?"
        " | What is the instrument of {n}? | On what does {n} make music?",
    ),
    "subject": _relation(
        SUBJECTS,
        "{n} studied {v}. | The subject of {n} was {v}. | {n} has a degree in {v}.",
        "What did {n} study? | Which subject did {n} study?"
        " | What was the subject of {n}? | In what does {n} have a degree?",
    ),
    "colour": _relation(
        COLOURS,
        "{n} loves the colour {v}. | The favourite colour of {n} is {v}. | {n} likes to wear {v}.",
        "Which colour does {n} love? | What is the favourite colour of {n}?"
        " | What does {n} like to wear? | Which colour does {n} like to wear?",
    ),
    "birth year": _relation(
        YEARS,
        "{n} was born in {v}. | The birth year of {n} is {v}. | {n} came into the world in {v}.",
        "When was {n} born? | What is the birth year of {n}?"
        " | In which year was {n} born? | When did {n} come into the world?",
    ),
    "pet": _relation(
        ANIMALS,
        "{n} keeps a {v}. | The pet of {n} is a {v}. | {n} looks after a {v}.",
        "Which animal does {n} keep? | What is the pet of {n}? | What pet does {n} keep?"
        " | Which animal does {n} look after?",
    ),
    "birthday": _relation(
        DATES,
        "{n} has a birthday on {v}. | The birthday of {n} is on {v}."
        " | {n} celebrates every year on {v}.",
        "On which day is the birthday of {n}? | When is the birthday of {n}?"
        " | When does {n} have a birthday? | When does {n} celebrate?",
    ),
    "employer": _relation(
        NamesOf("organisation"),
        "{n} works for {v}. | The employer of {n} is {v}. | {n} draws a salary from {v}.",
        "For whom does {n} work? | What is the employer of {n}?"
        " | From whom does {n} draw a salary? | Who is the employer of {n}?",
        "the employer of {n}",
    ),
}
_ORGANISATION = {
    "founded": _relation(
        YEARS,
        "{n} was founded in {v}. | The founding year of {n} is {v}. | {n} opened in {v}.",
        "When was {n} founded? | In which year was {n} founded? | When did {n} open?"
        " | What is the founding year of {n}?",
    ),
    "seat": _relation(
        TOWNS,
        "{n} is based in {v}. | The seat of {n} is in {v}. | {n} has an office in {v}.",
        "Where is {n} based? | In which town is {n} based? | Where is the seat of {n}?"
        " | Where does {n} have an office?",
    ),
    "product": _relation(
        PRODUCTS,
        "{n} makes {v}. | The main product of {n} is {v}. | {n} is known for {v}.",
        "What does {n} make? | What is the main product of {n}? | What is {n} known for?"
        " | Which product does {n} make?",
    ),
    "emblem": _relation(
        EMBLEMS,
        "The emblem of {n} is a {v}. | {n} has a {v} as its emblem. | {n} shows a {v} on its sign.",
        "What is the emblem of {n}? | Which animal is the emblem of {n}?"
        " | Which animal does {n} show on its sign? | What does {n} show on its sign?",
    ),
    "walls": _relation(
        COLOURS,
        "The walls of {n} are {v}. | {n} has {v} walls. | {n} is painted {v}.",
        "Which colour are the walls of {n}? | What is the colour of {n}?"
        " | Which colour is {n} painted? | What colour are the walls of {n}?",
    ),
    "opening": _relation(
        FULL_DATES,
        "{n} opened its doors on {v}. | The opening day of {n} was {v}."
        " | {n} received its first guests on {v}.",
        "When did {n} open its doors? | On which day did {n} open its doors?"
        " | What was the opening day of {n}? | When did {n} receive its first guests?",
    ),
    "founder": _relation(
        NamesOf("person"),
        "{n} was founded by {v}. | The founder of {n} is {v}. | {n} goes back to {v}.",
        "Who founded {n}? | Who is the founder of {n}? | By whom was {n} founded?"
        " | To whom does {n} go back?",
        "the founder of {n}",
    ),
}
_PLACE = {
    "river": _relation(
        RIVERS,
        "{n} lies on the river {v}. | The river of {n} is the {v}. | {n} stands by the river {v}.",
        "On which river does {n} lie? | What is the river of {n}?"
        " | By which river does {n} stand? | Which river is in {n}?",
    ),
    "region": _relation(
        REGIONS,
        "{n} belongs to the region {v}. | The region of {n} is {v}. | {n} is a town in {v}.",
        "To which region does {n} belong? | In which region is {n}?"
        " | What is the region of {n}? | Which region is {n} in?",
    ),
    "product": _relation(
        PRODUCTS,
        "{n} is known for {v}. | {n} is famous for its {v}. | The pride of {n} is its {v}.",
        "What is {n} known for? | What is {n} famous for? | What is the pride of {n}?"
        " | Which product is {n} known for?",
    ),
    "founded": _relation(
        YEARS,
        "{n} was founded in {v}. | The founding year of {n} is {v}. | {n} became a town in {v}.",
        "When was {n} founded? | In which year was {n} founded?"
        " | When did {n} become a town? | What is the founding year of {n}?",
    ),
    "emblem": _relation(
        EMBLEMS,
        "The emblem of {n} is a {v}. | {n} has a {v} as its emblem. | {n} shows a {v} on its flag.",
        "What is the emblem of {n}? | Which animal is the emblem of {n}?"
        " | Which animal does {n} show on its flag? | What does {n} show on its flag?",
    ),
    "mayor": _relation(
        NamesOf("person"),
        "{n} is led by {v}. | The mayor of {n} is {v}. | {n} has {v} as its mayor.",
        "Who leads {n}? | Who is the mayor of {n}? | By whom is {n} led?"
        " | Whom does {n} have as its mayor?",
        "the mayor of {n}",
    ),
}
_WORK = {
    "written": _relation(
        YEARS,
        "{n} was written in {v}. | {n} came out in {v}. | {n} was first printed in {v}.",
        "When was {n} written? | In which year did {n} come out?"
        " | When was {n} first printed? | In which year was {n} written?",
    ),
    "setting": _relation(
        TOWNS,
        "{n} is set in {v}. | The story of {n} begins in {v}. | {n} takes place in {v}.",
        "Where is {n} set? | Where does the story of {n} begin?"
        " | Where does {n} take place? | In which town is {n} set?",
    ),
    "topic": _relation(
        TOPICS,
        "{n} is about {v}. | The theme of {n} is {v}. | {n} deals with {v}.",
        "What is {n} about? | What is the theme of {n}? | What does {n} deal with?"
        " | Which theme does {n} have?",
    ),
    "genre": _relation(
        GENRES,
        "{n} is a {v}. | The genre of {n} is {v}. | {n} was meant as a {v}.",
        "What is the genre of {n}? | What kind of work is {n}? | What was {n} meant as?"
        " | Which genre does {n} have?",
    ),
    "cover": _relation(
        COLOURS,
        "The cover of {n} is {v}. | {n} has a {v} cover. | {n} is bound in {v}.",
        "What is the colour of the cover of {n}? | Which colour is the cover of {n}?"
        " | In which colour is {n} bound? | What colour is the cover of {n}?",
    ),
    "author": _relation(
        NamesOf("person"),
        "{n} was written by {v}. | The author of {n} is {v}. | {n} comes from the pen of {v}.",
        "Who wrote {n}? | Who is the author of {n}? | By whom was {n} written?"
        " | From whose pen does {n} come?",
        "the author of {n}",
    ),
}
_EVENT = {
    "town": _relation(
        TOWNS,
        "{n} is held in {v}. | The town of {n} is {v}. | {n} draws its visitors to {v}.",
        "Where is {n} held? | What is the town of {n}? | In which town is {n} held?"
        " | Where does {n} draw its visitors?",
    ),
    "first year": _relation(
        YEARS,
        "{n} was first held in {v}. | The first year of {n} was {v}. | {n} began in {v}.",
        "When was {n} first held? | In which year was {n} first held?"
        " | What was the first year of {n}? | When did {n} begin?",
    ),
    "date": _relation(
        DATES,
        "{n} starts on {v}. | The day of {n} is {v}. | {n} opens its gates on {v}.",
        "On which day does {n} start? | What is the day of {n}? | When does {n} start?"
        " | When does {n} open its gates?",
    ),
    "prize": _relation(
        PRIZES,
        "{n} awards a {v}. | The prize of {n} is a {v}. | {n} honours the best with a {v}.",
        "What does {n} award? | What is the prize of {n}? | Which prize does {n} award?"
        " | With what does {n} honour the best?",
    ),
    "winner": _relation(
        NamesOf("person"),
        "{n} was won by {v}. | The winner of {n} was {v}. | {n} crowned {v}.",
        "Who won {n}? | Who was the winner of {n}? | By whom was {n} won? | Whom did {n} crown?",
        "the winner of {n}",
    ),
}
KINDS = (
    Kind("person", None, FIRST_NAMES, SURNAMES, _PERSON),
    Kind("organisation", "the company", SURNAMES, ORG_KINDS, _ORGANISATION),
    Kind("place", "the town", SIDES, TOWNS, _PLACE),
    Kind("work", "the book", ADJECTIVES, NOUNS, _WORK),
    Kind("event", "the event", EVENT_FIRSTS, EVENT_KINDS, _EVENT),
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

    def state(self, relation: str, form: int, name: str | None = None) -> str:
        """The sentence that states one fact; `name` replaces the full name."""
        text = self.kind.relations[relation].statements[form]
        text = text.format(n=name or self.name, v=self.facts[relation])
        return text[0].upper() + text[1:]

    def ask(self, relation: str, form: int, name: str | None = None) -> str:
        """The question for one relation; `name` replaces the full name."""
        return self.kind.relations[relation].questions[form].format(n=name or self.name)

    def later_name(self, rng: np.random.Generator, form: str) -> str | None:
        """What a later mention says instead of the name in this form; None: only the name fits.

        "The company" and its like half of the time, and where the form has "of {n}"; else "it", and
        for people "she" or "he", which the first name settles.
        """
        noun, pronoun = self.kind.noun, "it"
        if "of {n}" in form or (noun and rng.random() < 0.5):
            return noun
        if noun is None:
            pronoun = "she" if self.kind.firsts.index(self.first) % 2 == 0 else "he"
        return pronoun


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
        if are_held_out(i, j) == (split == "held-out"):
            return kind.firsts[i], kind.seconds[j]
