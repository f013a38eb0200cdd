"""Sequences whose passages need one another: what windows that do not see each other lose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from training.samples import (
    LINKS,
    Context,
    Recipe,
    Sample,
    Turn,
    draw_forms,
    draw_hop,
    draw_kind,
    draw_linked,
    draw_stated,
)
from training.world import (
    ANIMALS,
    COLOURS,
    KINDS,
    Entity,
    Relation,
    Split,
    are_held_out,
    pick,
)

Task = Literal["split documents", "aliases", "joined", "corrections"]

ALIASES = (
    "{n} is also known as {a}.",
    "Many people know {n} as {a}.",
    "Another name for {n} is {a}.",
)
CONTRARY = "Contrary to the earlier report, "


@dataclass(frozen=True, slots=True)
class Connected:
    """What a sequence is made of whose passages need one another, and of how many.

    `task` is one of these:

    - "split documents": a document about one entity is cut into two or four passages that follow
      each other. The first one has the title and the name; the others say he, she, it or "the
      company" alone.
    - "aliases": one passage says by which other name an entity goes; a later one uses that alone.
    - "joined": half of the passages name the others' entities as their founder, author, employer
      ..., and come after them. A question through such a link is answered at once.
    - "corrections": a later passage about the same entity states other values. Some say that they
      are "contrary to the earlier report"; else the order alone tells which value holds.

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
    documents: list[int] = field(default_factory=list)
    needy: list[tuple[Entity, str, int]] = field(default_factory=list)
    plain: list[tuple[Entity, str, int]] = field(default_factory=list)


def draw_connected(rng: np.random.Generator, recipe: Connected, split: Split = "train") -> Sample:
    """Draws one context with its questions."""
    if recipe.task == "joined":
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
    return Sample(tuple(drawn.passages), tuple(turns), documents=tuple(drawn.documents))


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
            sentences = []
            for place, relation in enumerate(part.tolist()):
                asked, name = entity.kind.relations[relation], None
                form = asked.draw_pair(rng, split)[0]
                if chunk or (place and rng.random() < 0.3):
                    form, name = _later_form(rng, entity, asked, split)
                sentences.append(entity.state(relation, form, name))
                (drawn.needy if chunk else drawn.plain).append((entity, relation, form))
            drawn.passages.append((None if chunk else entity.name, " ".join(sentences)))
            drawn.documents.append(number)
    return drawn


def _aliases(rng: np.random.Generator, recipe: Connected, split: Split) -> _Drawn:
    entities = _entities(rng, recipe, split, (recipe.passages + 1) // 2)
    drawn, taken, pairs = _Drawn(), set[tuple[int, int]](), []
    for entity in entities:
        while True:
            two = int(rng.integers(len(COLOURS))), int(rng.integers(len(ANIMALS)))
            if two not in taken and are_held_out(*two) == (split == "held-out"):
                break
        taken.add(two)
        alias = f"{COLOURS[two[0]].title()} {ANIMALS[two[1]].title()}"
        relations = _shuffled(rng, entity)
        own, rest = relations[: len(relations) > 2], relations[len(relations) > 2 :]
        texts: list[list[str]] = [[pick(rng, ALIASES).format(n=entity.name, a=f"the {alias}")], []]
        for relation in (*own, *rest):
            form = entity.kind.relations[relation].draw_pair(rng, split)[0]
            name = None if relation in own else f"the {alias}"
            texts[relation not in own].append(entity.state(relation, form, name))
            (drawn.plain if relation in own else drawn.needy).append((entity, relation, form))
        texts[0] = [texts[0][i] for i in rng.permutation(len(texts[0]))]
        pairs.append([(entity.name, " ".join(texts[0])), (alias, " ".join(texts[1]))])
    return _in_pairs(rng, recipe, drawn, pairs, entities[-1])


def _corrections(rng: np.random.Generator, recipe: Connected, split: Split) -> _Drawn:
    entities = _entities(rng, recipe, split, (recipe.passages + 1) // 2)
    drawn, pairs = _Drawn(), []
    for entity in entities:
        relations = _shuffled(rng, entity)
        changed = relations[: (len(relations) + 1) // 2]
        values = {r: entity.kind.relations[r].draw_value(rng, split) for r in changed}
        before = replace(entity, facts={**entity.facts, **values})
        forms = draw_forms(rng, entity, split)
        relations = [relations[i] for i in rng.permutation(len(relations))]
        first = " ".join(before.state(r, forms[r]) for r in relations)
        drawn.plain.extend((entity, r, forms[r]) for r in relations if r not in changed)
        later = []
        for relation in changed:
            form = entity.kind.relations[relation].draw_pair(rng, split)[0]
            later.append(entity.state(relation, form))
            drawn.needy.append((entity, relation, form))
        second = " ".join(later)
        if rng.random() < 0.5:
            starts_with_name = second.startswith(entity.name)
            second = CONTRARY + (second if starts_with_name else second[0].lower() + second[1:])
        pairs.append([(entity.name, first), (entity.name, second)])
    return _in_pairs(rng, recipe, drawn, pairs, entities[-1])


def _in_pairs(
    rng: np.random.Generator,
    recipe: Connected,
    drawn: _Drawn,
    pairs: Sequence[Sequence[tuple[str | None, str]]],
    last: Entity,
) -> _Drawn:
    """Passages in random order, but the first of a pair before the second.

    For an odd number of passages the last entity's two are one, which needs no other.
    """
    if recipe.passages % 2:
        drawn.plain.extend(fact for fact in drawn.needy if fact[0] is last)
        drawn.needy[:] = [fact for fact in drawn.needy if fact[0] is not last]
    order = [(int(i), 0) for i in rng.permutation(len(pairs))]
    for number in rng.permutation(len(pairs)).tolist():
        if number == len(pairs) - 1 and recipe.passages % 2:
            continue
        behind = order.index((number, 0)) + 1
        order.insert(int(rng.integers(behind, len(order) + 1)), (number, 1))
    for number, which in order:
        title, text = pairs[number][which]
        if which == 0 and (number, 1) not in order:
            text = f"{text} {pairs[number][1][1]}"
        drawn.passages.append((title, text))
        drawn.documents.append(len(drawn.documents))
    return drawn


def _joined(rng: np.random.Generator, recipe: Connected, split: Split) -> Sample:
    plain = Recipe(recipe.passages, recipe.facts, linked=True, kin=recipe.kin, fewer=0.0)
    drawn = draw_linked(rng, plain, split)
    reached = (recipe.passages + 1) // 2
    order = [drawn[i] for i in rng.permutation(reached)]
    for number in (reached + rng.permutation(len(drawn) - reached)).tolist():
        named = {v for r, v in drawn[number].facts.items() if (drawn[number].kind, r) in LINKS}
        behind = 1 + max((i for i, one in enumerate(order) if one.name in named), default=-1)
        order.insert(int(rng.integers(behind, len(order) + 1)), drawn[number])
    forms = [draw_forms(rng, one, split) for one in order]
    names = {one.name for one in order}
    if not any(
        (one.kind, r) in LINKS and v in names for one in order for r, v in one.facts.items()
    ):
        return _joined(rng, recipe, split)
    context, turns = Context(order, forms), list[Turn]()
    while len(turns) < recipe.questions:
        if rng.random() < recipe.plain:
            number = int(rng.integers(len(order)))
            relation = pick(rng, list(order[number].facts))
            turns.append(draw_stated(rng, context, number, relation, split, False))
            continue
        turn = draw_hop(rng, context, split)
        if turn is not None and turn.task == "two-hop":  # else the link leads out of the passages
            answer = turn.answer.removeprefix(f"{turn.steps} ")
            turns.append(replace(turn, answer=answer, steps=None, task="joined"))
    return Sample(context.passages(rng, plain), tuple(turns))


_DRAW: Mapping[str, Callable[[np.random.Generator, Connected, Split], _Drawn]] = {
    "split documents": _split_documents,
    "aliases": _aliases,
    "corrections": _corrections,
}
