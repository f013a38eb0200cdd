"""The questions of a conversation and their answers."""

from __future__ import annotations

import numpy as np

from training.contexts import Context
from training.phrasing import (
    BRIDGES,
    FORMS,
    NOT_STATED,
    ask,
    bridge,
    draw_pair,
    draw_question,
    later_name,
)
from training.recipes import Recipe, Turn
from training.world import Entity, NamesOf, Split, draw_name, kind_named


def draw_turns(
    rng: np.random.Generator, recipe: Recipe, context: Context, split: Split
) -> tuple[Turn, ...]:
    """Draws the questions, with replacement: asking each fact once would teach elimination."""
    facts = [(e, r) for e, entity in enumerate(context.entities) for r in entity.facts]
    turns: list[Turn] = []
    while len(turns) < recipe.questions:
        turn: Turn | None
        if rng.random() < recipe.unstated:
            turn = _unstated(rng, context, split)
        elif rng.random() < recipe.hops:
            turn = _hop(rng, context, split)
        else:
            before = turns[-1].passage if turns else None
            if before is not None and rng.random() < recipe.follow:
                own = list(context.entities[before].facts)
                turn = _stated(rng, context, before, own[int(rng.integers(len(own)))], split, True)
            else:
                e, relation = facts[int(rng.integers(len(facts)))]
                turn = _stated(rng, context, e, relation, split, False)
        if turn is not None:
            turns.append(turn)
    return tuple(turns)


def _blind(context: Context, entity: Entity, relation: str) -> float:
    """Chance of a reader that knows kind and relation, but not whom the question is about."""
    same = [e for e in context.entities if e.kind is entity.kind and relation in e.facts]
    values = [e.facts[relation] for e in same]
    return values.count(entity.facts[relation]) / len(values)


def _stated(
    rng: np.random.Generator, context: Context, e: int, relation: str, split: Split, follow: bool
) -> Turn:
    """A question that passage `e` answers; `follow`: by a pronoun where the form allows one."""
    entity = context.entities[e]
    form = draw_question(rng, entity.kind, relation, context.forms[e][relation], split)
    text = FORMS[entity.kind.name, relation].questions[form]
    name = later_name(rng, entity, text) if follow else None
    return Turn(
        ask(entity, relation, form, name),
        entity.facts[relation],
        e,
        "follow-up" if name else "single",
        _blind(context, entity, relation),
        None if name else entity.name,
    )


def _unstated(rng: np.random.Generator, context: Context, split: Split) -> Turn | None:
    """A question without an answer: an absent relation of an entity, or an absent entity."""
    entities = context.entities
    e = int(rng.integers(len(entities)))
    entity = entities[e]
    stated = {r for other in entities if other.kind is entity.kind for r in other.facts}
    if rng.random() < 0.5:
        absent = [r for r in entity.kind.relations if r not in entity.facts]
        tempting = [r for r in absent if r in stated]
        pool = tempting if tempting and rng.random() < 0.7 else absent
        if not pool:
            return None
        relation, passage = pool[int(rng.integers(len(pool)))], e
    else:
        first, second = draw_name(rng, entity.kind, split)
        if any({first, second} & {o.first, o.second} for o in entities if o.kind is entity.kind):
            return None
        relation = list(entity.facts)[int(rng.integers(len(entity.facts)))]
        entity, passage = Entity(entity.kind, first, second, {}), -1
    form = draw_pair(rng, entity.kind, relation, split)[1]
    where = passage if passage >= 0 else None
    return Turn(ask(entity, relation, form), NOT_STATED, where, "not stated", 0.0)


def _hop(rng: np.random.Generator, context: Context, split: Split) -> Turn | None:
    """A question about the founder, author, employer ... of an entity, in two steps.

    The answer names that entity, asks the second question and answers it: "Alra Ashden. Where was
    Alra Ashden born? Arava". So the second step is one that single questions teach; with the value
    right behind the name, training never found it.
    """
    links = [
        (e, r)
        for e, entity in enumerate(context.entities)
        for r in entity.facts
        if (entity.kind.name, r) in BRIDGES
    ]
    if not links:
        return None
    e, relation = links[int(rng.integers(len(links)))]
    source = context.entities[e]
    name = source.facts[relation]
    values = source.kind.relations[relation]
    target = kind_named(values.kind if isinstance(values, NamesOf) else source.kind.name)
    reached = [i for i, entity in enumerate(context.entities) if entity.name == name]
    described = bridge(source, relation)
    if not reached:
        wanted = list(target.relations)[int(rng.integers(len(target.relations)))]
        form = draw_pair(rng, target, wanted, split)[1]
        first, second = name.split(" ")
        stranger = Entity(target, first, second, {})
        question = ask(stranger, wanted, form, described)
        steps = f"{name}. {ask(stranger, wanted, form)}"
        answer = f"{steps} {NOT_STATED}"
        return Turn(question, answer, None, "open hop", 0.0, source.name, name, steps)
    entity = context.entities[reached[0]]
    wanted = list(entity.facts)[int(rng.integers(len(entity.facts)))]
    statement = context.forms[reached[0]][wanted]
    form = draw_question(rng, entity.kind, wanted, statement, split)
    steps = f"{name}. {ask(entity, wanted, form)}"
    return Turn(
        ask(entity, wanted, form, described),
        f"{steps} {entity.facts[wanted]}",
        None,
        "two-hop",
        _blind(context, entity, wanted),
        source.name,
        name,
        steps,
    )
