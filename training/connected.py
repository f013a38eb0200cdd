"""Sequences whose passages need one another: what windows that do not see each other lose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from training.samples import (
    LINKS,
    Hint,
    Recipe,
    Sample,
    Turn,
    draw_forms,
    draw_kind,
    target_of,
)
from training.world import KINDS, NOUNS, Entity, Relation, Split, pick

Task = Literal["split documents", "aliases", "joined", "joined by name", "corrections"]

ALIASES = (
    "{n} is also known as {a}.",
    "Many people know {n} as {a}.",
    "Another name for {n} is {a}.",
)
CONTRARY = "Contrary to the earlier report, "

Said = tuple[str, tuple[Hint, ...]]
"""A sentence, and whom it is about."""
Passage = tuple[str | None, list[Said]]
"""Title and sentences of a passage."""


@dataclass(frozen=True, slots=True)
class Connected:
    """What a sequence is made of whose passages need one another, and of how many.

    `task` is one of these:

    - "split documents": a document about one entity is cut into two or four passages that follow
      each other. The first one has the title and the name; the others say he, she, it or only
      "the company".
    - "aliases": one passage says what an entity is called for short; a later one uses only that.
      Two entities are called the same, as in contracts: the passage before it tells whom a passage
      is about.
    - "joined": every other passage names the founder, author, employer ... of its entity; the one
      behind it says only "the founder". A question through that link is answered at once.
    - "joined by name": likewise, but the later passage has the founder's name, and the passages are
      in any order in which the link comes first.
    - "corrections": a later passage about the same entity states other values. Some say that they
      are "contrary to the earlier report"; else only the order says which value holds.

    `plain` is the chance that a question needs one passage only (it keeps that skill), `jitter`
    that of random gaps in the positions.
    """

    task: Task
    passages: int
    facts: int = 4
    questions: int = 16
    kin: float = 0.1
    plain: float = 0.0
    jitter: float = 0.3


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Passages with the document of each, and what may be asked: what needs others, and what not.

    A fact is an entity, a relation and the form of its statement.
    """

    passages: list[tuple[str | None, str]] = field(default_factory=list)
    hints: list[tuple[Hint, ...]] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    needy: list[tuple[Entity, str, int]] = field(default_factory=list)
    plain: list[tuple[Entity, str, int]] = field(default_factory=list)

    def add(self, title: str | None, said: Sequence[Said], document: int) -> None:
        """Add a passage of these sentences."""
        starts, text = [], ""
        for sentence, _ in said:
            starts.append(len(text) + (text != ""))
            text = f"{text} {sentence}" if text else sentence
        self.passages.append((title, text))
        self.hints.append(
            tuple(
                replace(hint, start=start + hint.start, end=start + hint.end)
                for start, (_, hints) in zip(starts, said, strict=True)
                for hint in hints
            )
        )
        self.documents.append(document)


def _say(
    entity: Entity, relation: str, form: int, name: str | None = None, link: str | None = None
) -> Said:
    """A statement of a fact, with hints where it has said whom it is about, and for the value."""
    return _hinted(entity.state(relation, form, name), entity, relation, name, link)


def _hinted(
    sentence: str, entity: Entity, relation: str, name: str | None = None, link: str | None = None
) -> Said:
    value = sentence.rindex(entity.facts[relation])
    named = name or entity.name
    end = sentence.lower().index(named.lower()) + len(named)
    spans = (end - len(named.split(" ")[-1]), end), (value, len(sentence))
    return sentence, tuple(Hint(*span, entity.name, link) for span in spans)


def draw_connected(rng: np.random.Generator, recipe: Connected, split: Split = "train") -> Sample:
    """Draws one context with its questions."""
    if recipe.task in ("joined", "joined by name"):
        return _joined(rng, recipe, split)
    drawn = _DRAW[recipe.task](rng, recipe, split)
    turns = []
    for _ in range(recipe.questions):
        plain = not drawn.needy or (drawn.plain and rng.random() < recipe.plain)
        entity, relation, form = pick(rng, drawn.plain if plain else drawn.needy)
        asked = entity.kind.relations[relation].draw_question(rng, form, split)
        question, answer = entity.ask(relation, asked), entity.facts[relation]
        stated = [
            one.facts[name]
            for one, name, _ in (*drawn.needy, *drawn.plain)
            if one.kind is entity.kind and name == relation
        ]
        blind = stated.count(answer) / len(stated)
        task = "single" if plain else recipe.task
        turns.append(Turn(question, answer, None, task, blind, entity.name))
    return Sample(
        tuple(drawn.passages),
        tuple(turns),
        documents=tuple(drawn.documents),
        hints=tuple(drawn.hints),
    )


def _entities(
    rng: np.random.Generator, recipe: Connected, split: Split, count: int
) -> list[Entity]:
    """Entities that state the same relations: of one kind or, in a fifth of the draws, several."""
    # Persons have the most relations and the longest lists of names: more often.
    shares = [0.32, 0.17, 0.17, 0.17, 0.17]
    kinds = [int(rng.choice(len(KINDS), p=shares))] * count
    if rng.random() < 0.2:
        kinds = rng.integers(len(KINDS), size=count).tolist()
    drawn: list[Entity] = []
    like = Recipe(count, kin=recipe.kin, missing=0.05)
    for kind in dict.fromkeys(kinds):
        drawn += draw_kind(rng, like, split, KINDS[kind], kinds.count(kind), recipe.facts)
    return [drawn[i] for i in rng.permutation(count)]


def _later_form(
    rng: np.random.Generator, entity: Entity, relation: Relation, split: Split
) -> tuple[int, str]:
    """A statement form that does without the name, and what it says instead."""
    form = relation.draw_pair(rng, split)[0]
    for other in (form, *rng.permutation(len(relation.statements)).tolist()):
        if (name := entity.later_name(rng, relation.statements[other])) is not None:
            return other, name
    raise ValueError(f"no form of {relation.statements[0]!r} does without a name")


def _shuffled(rng: np.random.Generator, entity: Entity) -> list[str]:
    """The relations of an entity in random order."""
    relations = list(entity.facts)
    return [relations[i] for i in rng.permutation(len(relations))]


def _split_documents(rng: np.random.Generator, recipe: Connected, split: Split) -> _Drawn:
    drawn = _Drawn()
    chunks = min(recipe.passages, 4 if recipe.passages % 4 == 0 and rng.random() < 0.3 else 2)
    counts = [chunks] * (recipe.passages // chunks)
    counts[0] += recipe.passages % chunks
    for number, entity in enumerate(_entities(rng, recipe, split, len(counts))):
        relations = _shuffled(rng, entity)
        # A document without so many facts has some of them again, in other words.
        relations += [pick(rng, relations) for _ in range(counts[number] - len(relations))]
        for chunk, part in enumerate(np.array_split(np.array(relations), counts[number])):
            said = []
            for place, relation in enumerate(part.tolist()):
                asked, name = entity.kind.relations[relation], None
                form = asked.draw_pair(rng, split)[0]
                if chunk or (place and rng.random() < 0.3):
                    form, name = _later_form(rng, entity, asked, split)
                said.append(_say(entity, relation, form, name))
                (drawn.needy if chunk else drawn.plain).append((entity, relation, form))
            drawn.add(None if chunk else entity.name, said, number)
    return drawn


def _aliases(rng: np.random.Generator, recipe: Connected, split: Split) -> _Drawn:
    entities = _entities(rng, recipe, split, (recipe.passages + 1) // 2)
    drawn, pairs = _Drawn(), list[list[Passage]]()
    words = rng.permutation(len(NOUNS))
    for number, entity in enumerate(entities):
        alias = NOUNS[words[number // 2]]
        relations = _shuffled(rng, entity)
        own, rest = relations[: len(relations) > 2], relations[len(relations) > 2 :]
        known = pick(rng, ALIASES).format(n=entity.name, a=f"the {alias}")
        texts: list[list[Said]] = [[(known, ())], []]
        for relation in (*own, *rest):
            form = entity.kind.relations[relation].draw_pair(rng, split)[0]
            name = None if relation in own else f"the {alias}"
            texts[relation not in own].append(_say(entity, relation, form, name))
            (drawn.plain if relation in own else drawn.needy).append((entity, relation, form))
        texts[0] = [texts[0][i] for i in rng.permutation(len(texts[0]))]
        pairs.append([(entity.name, texts[0]), (alias, texts[1])])
    _last_as_one(recipe, drawn, pairs, entities[-1])
    return _in_turns(rng, drawn, [_row(pairs)])


def _corrections(rng: np.random.Generator, recipe: Connected, split: Split) -> _Drawn:
    entities = _entities(rng, recipe, split, (recipe.passages + 1) // 2)
    drawn, pairs = _Drawn(), list[list[Passage]]()
    for entity in entities:
        relations = _shuffled(rng, entity)
        changed = relations[: (len(relations) + 1) // 2]
        values = {r: entity.kind.relations[r].draw_value(rng, split) for r in changed}
        before = replace(entity, facts={**entity.facts, **values})
        forms = draw_forms(rng, entity, split)
        relations = [relations[i] for i in rng.permutation(len(relations))]
        first = [_say(before, r, forms[r]) for r in relations]
        drawn.plain.extend((entity, r, forms[r]) for r in relations if r not in changed)
        later = []
        for relation in changed:
            form = entity.kind.relations[relation].draw_pair(rng, split)[0]
            later.append(_say(entity, relation, form))
            drawn.needy.append((entity, relation, form))
        if rng.random() < 0.5:
            text, _ = later[0]
            text = CONTRARY + (text if text.startswith(entity.name) else text[0].lower() + text[1:])
            later[0] = _hinted(text, entity, changed[0])
        pairs.append([(entity.name, first), (entity.name, later)])
    _last_as_one(recipe, drawn, pairs, entities[-1])
    return _in_turns(rng, drawn, pairs)


def _last_as_one(
    recipe: Connected, drawn: _Drawn, pairs: Sequence[list[Passage]], last: Entity
) -> None:
    """Makes one passage, which needs no other, of the last two where their number is odd."""
    if recipe.passages % 2:
        drawn.plain.extend(fact for fact in drawn.needy if fact[0] is last)
        drawn.needy[:] = [fact for fact in drawn.needy if fact[0] is not last]
        (title, first), (_, second) = pairs[-1]
        pairs[-1][:] = [(title, [*first, *second])]


def _row(lines: Sequence[Sequence[Passage]]) -> list[Passage]:
    return [passage for line in lines for passage in line]


def _in_turns(rng: np.random.Generator, drawn: _Drawn, rows: Sequence[Sequence[Passage]]) -> _Drawn:
    """Adds passages in random order, but those of a row as they stand."""
    turns = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    left = [iter(row) for row in rows]
    for number in rng.permutation(turns).tolist():
        title, said = next(left[number])
        drawn.add(title, said, len(drawn.documents))
    return drawn


def _linked(
    rng: np.random.Generator, recipe: Connected, split: Split
) -> tuple[str, list[tuple[Entity, Entity]]]:
    """A relation, and pairs of an entity and the one that it names by this relation."""
    kind, relation = pick(rng, LINKS)
    like, count = Recipe(recipe.passages, kin=recipe.kin), (recipe.passages + 1) // 2
    sources = draw_kind(rng, like, split, kind, count, recipe.facts, always=relation)
    named = draw_kind(rng, like, split, target_of(kind, relation), count, recipe.facts)
    pairs = zip(sources, named, strict=True)
    return relation, [
        (replace(one, facts={**one.facts, relation: other.name}), other) for one, other in pairs
    ]


def _joined(rng: np.random.Generator, recipe: Connected, split: Split) -> Sample:
    """Either task: with the name of whom the later passage is about, or without."""
    relation, pairs = _linked(rng, recipe, split)
    forms = {entity.name: draw_forms(rng, entity, split) for pair in pairs for entity in pair}
    by_name, drawn, lines = recipe.task == "joined by name", _Drawn(), []
    for source, target in pairs:
        first, second = (
            [
                _say(entity, name, forms[entity.name][name], said, link)
                for name in _shuffled(rng, entity)
            ]
            for entity, said, link in (
                (source, None, None),
                (target, None if by_name else _role(source, relation), source.name),
            )
        )
        lines.append([(source.name, first), (target.name if by_name else None, second)])
    needy = pairs
    if recipe.passages % 2:
        (title, first), (_, second) = lines[-1]
        needy, lines[-1] = pairs[:-1] or pairs, [(title, [*first, *second])]
    lines = lines if by_name else [_row([lines[i] for i in rng.permutation(len(lines))])]
    _in_turns(rng, drawn, lines)
    turns = list[Turn]()
    while len(turns) < recipe.questions:
        plain = rng.random() < recipe.plain
        source, target = pick(rng, pairs if plain else needy)
        asked = source if plain else target
        wanted = pick(rng, list(asked.facts))
        form = asked.kind.relations[wanted].draw_question(rng, forms[asked.name][wanted], split)
        bridge = str(source.kind.relations[relation].bridge).format(n=source.name)
        question = asked.ask(wanted, form, None if plain else bridge)
        stated = [pair[not plain].facts.get(wanted) for pair in pairs]
        answer = asked.facts[wanted]
        blind = stated.count(answer) / (len(stated) - stated.count(None))
        task = "single" if plain else recipe.task
        turns.append(Turn(question, answer, None, task, blind, source.name))
    return Sample(tuple(drawn.passages), tuple(turns), hints=tuple(drawn.hints))


def _role(entity: Entity, relation: str) -> str:
    """What the one that it names by this relation is called: "the founder"."""
    return str(entity.kind.relations[relation].bridge).removesuffix(" of {n}")


_DRAW: Mapping[str, Callable[[np.random.Generator, Connected, Split], _Drawn]] = {
    "split documents": _split_documents,
    "aliases": _aliases,
    "corrections": _corrections,
}
