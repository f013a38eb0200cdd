"""How the world is put into words: statements and questions of every relation, and their splits.

`{n}` stands for the entity, `{v}` for the value. A quarter of the pairs (statement form, question
form) of each relation is held out: training asks no question in that form about a fact that was
stated in that form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from training.world import KINDS, Entity, Kind, Split

NOT_STATED = "not stated"


@dataclass(frozen=True, slots=True)
class Forms:
    """The statement and question forms of one relation."""

    statements: tuple[str, ...]
    questions: tuple[str, ...]


def _forms(statements: str, questions: str) -> Forms:
    return Forms(tuple(statements.split(" | ")), tuple(questions.split(" | ")))


FORMS: Mapping[tuple[str, str], Forms] = {
    ("person", "birthplace"): _forms(
        "{n} was born in {v}. | The birthplace of {n} is {v}. | {n} comes from {v}.",
        "Where was {n} born? | What is the birthplace of {n}? | In which town was {n} born?"
        " | Where does {n} come from?",
    ),
    ("person", "home"): _forms(
        "{n} lives in {v}. | The home of {n} is in {v}. | {n} has a house in {v}.",
        "Where does {n} live? | In which town does {n} live? | Where is the home of {n}?"
        " | Where does {n} have a house?",
    ),
    ("person", "job"): _forms(
        "{n} works as a {v}. | The job of {n} is {v}. | {n} earns a living as a {v}.",
        "What does {n} work as? | What is the job of {n}? | Which job does {n} have?"
        " | How does {n} earn a living?",
    ),
    ("person", "instrument"): _forms(
        "{n} plays the {v}. | The instrument of {n} is the {v}. | {n} makes music on the {v}.",
        "What does {n} play? | Which instrument does {n} play? | What is the instrument of {n}?"
        " | On what does {n} make music?",
    ),
    ("person", "subject"): _forms(
        "{n} studied {v}. | The subject of {n} was {v}. | {n} has a degree in {v}.",
        "What did {n} study? | Which subject did {n} study? | What was the subject of {n}?"
        " | In what does {n} have a degree?",
    ),
    ("person", "colour"): _forms(
        "{n} loves the colour {v}. | The favourite colour of {n} is {v}. | {n} likes to wear {v}.",
        "Which colour does {n} love? | What is the favourite colour of {n}?"
        " | What does {n} like to wear? | Which colour does {n} like to wear?",
    ),
    ("person", "birth year"): _forms(
        "{n} was born in {v}. | The birth year of {n} is {v}. | {n} came into the world in {v}.",
        "When was {n} born? | What is the birth year of {n}? | In which year was {n} born?"
        " | When did {n} come into the world?",
    ),
    ("person", "pet"): _forms(
        "{n} keeps a {v}. | The pet of {n} is a {v}. | {n} looks after a {v}.",
        "Which animal does {n} keep? | What is the pet of {n}? | What pet does {n} keep?"
        " | Which animal does {n} look after?",
    ),
    ("person", "birthday"): _forms(
        "{n} has a birthday on {v}. | The birthday of {n} is on {v}."
        " | {n} celebrates every year on {v}.",
        "On which day is the birthday of {n}? | When is the birthday of {n}?"
        " | When does {n} have a birthday? | When does {n} celebrate?",
    ),
    ("person", "employer"): _forms(
        "{n} works for {v}. | The employer of {n} is {v}. | {n} draws a salary from {v}.",
        "For whom does {n} work? | What is the employer of {n}?"
        " | From whom does {n} draw a salary? | Who is the employer of {n}?",
    ),
    ("organisation", "founded"): _forms(
        "{n} was founded in {v}. | The founding year of {n} is {v}. | {n} opened in {v}.",
        "When was {n} founded? | In which year was {n} founded? | When did {n} open?"
        " | What is the founding year of {n}?",
    ),
    ("organisation", "seat"): _forms(
        "{n} is based in {v}. | The seat of {n} is in {v}. | {n} has an office in {v}.",
        "Where is {n} based? | In which town is {n} based? | Where is the seat of {n}?"
        " | Where does {n} have an office?",
    ),
    ("organisation", "product"): _forms(
        "{n} makes {v}. | The main product of {n} is {v}. | {n} is known for {v}.",
        "What does {n} make? | What is the main product of {n}? | What is {n} known for?"
        " | Which product does {n} make?",
    ),
    ("organisation", "emblem"): _forms(
        "The emblem of {n} is a {v}. | {n} has a {v} as its emblem. | {n} shows a {v} on its sign.",
        "What is the emblem of {n}? | Which animal is the emblem of {n}?"
        " | Which animal does {n} show on its sign? | What does {n} show on its sign?",
    ),
    ("organisation", "walls"): _forms(
        "The walls of {n} are {v}. | {n} has {v} walls. | {n} is painted {v}.",
        "Which colour are the walls of {n}? | What is the colour of {n}?"
        " | Which colour is {n} painted? | What colour are the walls of {n}?",
    ),
    ("organisation", "opening"): _forms(
        "{n} opened its doors on {v}. | The opening day of {n} was {v}."
        " | {n} received its first guests on {v}.",
        "When did {n} open its doors? | On which day did {n} open its doors?"
        " | What was the opening day of {n}? | When did {n} receive its first guests?",
    ),
    ("organisation", "founder"): _forms(
        "{n} was founded by {v}. | The founder of {n} is {v}. | {n} goes back to {v}.",
        "Who founded {n}? | Who is the founder of {n}? | By whom was {n} founded?"
        " | To whom does {n} go back?",
    ),
    ("place", "river"): _forms(
        "{n} lies on the river {v}. | The river of {n} is the {v}. | {n} stands by the river {v}.",
        "On which river does {n} lie? | What is the river of {n}?"
        " | By which river does {n} stand? | Which river is in {n}?",
    ),
    ("place", "region"): _forms(
        "{n} belongs to the region {v}. | The region of {n} is {v}. | {n} is a town in {v}.",
        "To which region does {n} belong? | In which region is {n}? | What is the region of {n}?"
        " | Which region is {n} in?",
    ),
    ("place", "product"): _forms(
        "{n} is known for {v}. | {n} is famous for its {v}. | The pride of {n} is its {v}.",
        "What is {n} known for? | What is {n} famous for? | What is the pride of {n}?"
        " | Which product is {n} known for?",
    ),
    ("place", "founded"): _forms(
        "{n} was founded in {v}. | The founding year of {n} is {v}. | {n} became a town in {v}.",
        "When was {n} founded? | In which year was {n} founded? | When did {n} become a town?"
        " | What is the founding year of {n}?",
    ),
    ("place", "emblem"): _forms(
        "The emblem of {n} is a {v}. | {n} has a {v} as its emblem. | {n} shows a {v} on its flag.",
        "What is the emblem of {n}? | Which animal is the emblem of {n}?"
        " | Which animal does {n} show on its flag? | What does {n} show on its flag?",
    ),
    ("place", "mayor"): _forms(
        "{n} is led by {v}. | The mayor of {n} is {v}. | {n} has {v} as its mayor.",
        "Who leads {n}? | Who is the mayor of {n}? | By whom is {n} led?"
        " | Whom does {n} have as its mayor?",
    ),
    ("work", "written"): _forms(
        "{n} was written in {v}. | {n} came out in {v}. | {n} was first printed in {v}.",
        "When was {n} written? | In which year did {n} come out? | When was {n} first printed?"
        " | In which year was {n} written?",
    ),
    ("work", "setting"): _forms(
        "{n} is set in {v}. | The story of {n} begins in {v}. | {n} takes place in {v}.",
        "Where is {n} set? | Where does the story of {n} begin? | Where does {n} take place?"
        " | In which town is {n} set?",
    ),
    ("work", "topic"): _forms(
        "{n} is about {v}. | The theme of {n} is {v}. | {n} deals with {v}.",
        "What is {n} about? | What is the theme of {n}? | What does {n} deal with?"
        " | Which theme does {n} have?",
    ),
    ("work", "genre"): _forms(
        "{n} is a {v}. | The genre of {n} is {v}. | {n} was meant as a {v}.",
        "What is the genre of {n}? | What kind of work is {n}? | What was {n} meant as?"
        " | Which genre does {n} have?",
    ),
    ("work", "cover"): _forms(
        "The cover of {n} is {v}. | {n} has a {v} cover. | {n} is bound in {v}.",
        "What is the colour of the cover of {n}? | Which colour is the cover of {n}?"
        " | In which colour is {n} bound? | What colour is the cover of {n}?",
    ),
    ("work", "author"): _forms(
        "{n} was written by {v}. | The author of {n} is {v}. | {n} comes from the pen of {v}.",
        "Who wrote {n}? | Who is the author of {n}? | By whom was {n} written?"
        " | From whose pen does {n} come?",
    ),
    ("event", "town"): _forms(
        "{n} is held in {v}. | The town of {n} is {v}. | {n} draws its visitors to {v}.",
        "Where is {n} held? | What is the town of {n}? | In which town is {n} held?"
        " | Where does {n} draw its visitors?",
    ),
    ("event", "first year"): _forms(
        "{n} was first held in {v}. | The first year of {n} was {v}. | {n} began in {v}.",
        "When was {n} first held? | In which year was {n} first held?"
        " | What was the first year of {n}? | When did {n} begin?",
    ),
    ("event", "date"): _forms(
        "{n} starts on {v}. | The day of {n} is {v}. | {n} opens its gates on {v}.",
        "On which day does {n} start? | What is the day of {n}? | When does {n} start?"
        " | When does {n} open its gates?",
    ),
    ("event", "prize"): _forms(
        "{n} awards a {v}. | The prize of {n} is a {v}. | {n} honours the best with a {v}.",
        "What does {n} award? | What is the prize of {n}? | Which prize does {n} award?"
        " | With what does {n} honour the best?",
    ),
    ("event", "winner"): _forms(
        "{n} was won by {v}. | The winner of {n} was {v}. | {n} crowned {v}.",
        "Who won {n}? | Who was the winner of {n}? | By whom was {n} won? | Whom did {n} crown?",
    ),
}

BRIDGES: Mapping[tuple[str, str], str] = {
    ("organisation", "founder"): "the founder of {n}",
    ("place", "mayor"): "the mayor of {n}",
    ("work", "author"): "the author of {n}",
    ("event", "winner"): "the winner of {n}",
    ("person", "employer"): "the employer of {n}",
}
"""How a question names an entity through a fact about another one."""


def is_held_out(statement: int, question: int) -> bool:
    """Whether this pair of form indices belongs to the held-out quarter."""
    return (statement + question) % 4 == 3


def draw_pair(rng: np.random.Generator, kind: Kind, relation: str, split: Split) -> tuple[int, int]:
    """Draws (statement form, question form), indices, of the split."""
    forms = FORMS[kind.name, relation]
    while True:
        pair = int(rng.integers(len(forms.statements))), int(rng.integers(len(forms.questions)))
        if is_held_out(*pair) == (split == "held-out"):
            return pair


def draw_question(
    rng: np.random.Generator, kind: Kind, relation: str, statement: int, split: Split
) -> int:
    """Draws a question form for a fact stated in form `statement`, the pair being of the split."""
    fits = [
        q
        for q in range(len(FORMS[kind.name, relation].questions))
        if is_held_out(statement, q) == (split == "held-out")
    ]
    return fits[int(rng.integers(len(fits)))]


def state(entity: Entity, relation: str, form: int, name: str | None = None) -> str:
    """The sentence that states one fact; `name` replaces the full name (a pronoun, a surname)."""
    text = FORMS[entity.kind.name, relation].statements[form]
    text = text.format(n=name or entity.name, v=entity.facts[relation])
    return text[0].upper() + text[1:]


def ask(entity: Entity, relation: str, form: int, name: str | None = None) -> str:
    """The question for one relation of one entity; `name` replaces the full name."""
    return FORMS[entity.kind.name, relation].questions[form].format(n=name or entity.name)


def all_forms() -> list[str]:
    """Every statement and question form, with its placeholders."""
    own = [text for forms in FORMS.values() for text in forms.statements + forms.questions]
    return own + list(BRIDGES.values()) + [kind.noun for kind in KINDS if kind.noun]


def later_name(rng: np.random.Generator, entity: Entity, form: str) -> str | None:
    """What a later mention says instead of the name in this form; None: only the name fits.

    She, he or it; "the company" and its like half of the time, and where the form has "of {n}".
    """
    noun = entity.kind.noun
    if "of {n}" in form:
        return noun
    return noun if noun and rng.random() < 0.5 else entity.pronoun
