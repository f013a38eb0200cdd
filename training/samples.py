"""Contexts with conversations, as text: entities, their passages, questions and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from training.phrasing import FORMS, NOT_STATED, ask, draw_pair, draw_question, state
from training.vocabulary import SYSTEM_PROMPTS
from training.world import KINDS, Entity, Kind, Split, draw_entities, draw_name


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a sequence is made of. Chances are per sequence, entity, sentence or turn as named.

    `kin`: an entity shares a word of its name with another. `missing`: an entity lacks a relation.
    `unstated`: a question has the answer "not stated". `pronouns`: a sentence after the first says
    he, she or it. `surnames`: a person is called by the surname alone in a later sentence.
    `follow`: a question continues with a pronoun about the entity of the turn before. `mixed`: the
    passages are of several kinds. `jitter`: random gaps in the positions between the parts.
    `fewer`: the number of facts is drawn from 1 to `facts` for the whole sequence.
    """

    entities: int
    facts: int = 4
    questions: int = 12
    kin: float = 0.0
    missing: float = 0.0
    unstated: float = 0.0
    pronouns: float = 0.0
    surnames: float = 0.0
    follow: float = 0.0
    mixed: float = 0.2
    jitter: float = 0.3
    fewer: float = 0.2
    system: float = 0.1


@dataclass(frozen=True, slots=True)
class Turn:
    """One question with its answer, the passage that states it (None: none does) and the task.

    `name` is the full name in the question, where it stands in the passages too.
    """

    question: str
    answer: str
    passage: int | None
    task: str
    blind: float
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A context with its conversation: (title, text) of each passage, then the turns."""

    passages: tuple[tuple[str, str], ...]
    turns: tuple[Turn, ...]
    system: str | None = None


def passage_text(
    rng: np.random.Generator, entity: Entity, forms: dict[str, int], recipe: Recipe
) -> str:
    """The sentences of one passage, in random order, by the statement forms given per relation."""
    relations = list(forms)
    rng.shuffle(relations)
    sentences = []
    for n, relation in enumerate(relations):
        form, name = forms[relation], None
        by_pronoun = "of {n}" not in FORMS[entity.kind.name, relation].statements[form]
        if n and by_pronoun and rng.random() < recipe.pronouns:
            name = entity.pronoun
        elif n and entity.kind.name == "person" and rng.random() < recipe.surnames:
            name = entity.second
        sentences.append(state(entity, relation, form, name))
    return " ".join(sentences)


def _kinds(rng: np.random.Generator, recipe: Recipe) -> list[Kind]:
    if recipe.entities > 1 and rng.random() < recipe.mixed:
        return [KINDS[int(k)] for k in rng.integers(len(KINDS), size=recipe.entities)]
    # Persons have the most relations and the longest lists of names: they come up more often.
    kind = KINDS[int(rng.choice(4, p=[0.4, 0.2, 0.2, 0.2]))]
    return [kind] * recipe.entities


def draw_context(
    rng: np.random.Generator, recipe: Recipe, split: Split
) -> tuple[list[Entity], list[dict[str, int]]]:
    """Draws the entities of a context and, for each, the statement form of its relations."""
    kinds = _kinds(rng, recipe)
    count = recipe.facts
    if rng.random() < recipe.fewer:
        count = int(rng.integers(1, recipe.facts + 1))
    entities: list[Entity] = []
    for kind in dict.fromkeys(k.name for k in kinds):
        chosen = next(k for k in KINDS if k.name == kind)
        names = list(chosen.relations)
        relations = [names[i] for i in rng.permutation(len(names))[:count]]
        entities += draw_entities(
            rng,
            chosen,
            sum(k.name == kind for k in kinds),
            relations,
            split=split,
            kin=recipe.kin,
            missing=recipe.missing,
        )
    entities = [entities[i] for i in rng.permutation(len(entities))]
    forms = [{r: draw_pair(rng, e.kind, r, split)[0] for r in e.facts} for e in entities]
    return entities, forms


def _blind(entities: Sequence[Entity], entity: Entity, relation: str) -> float:
    """Chance of a reader that knows kind and relation, but not whom the question is about."""
    values = [e.facts[relation] for e in entities if e.kind is entity.kind and relation in e.facts]
    return values.count(entity.facts[relation]) / len(values)


def _unstated(
    rng: np.random.Generator,
    entities: Sequence[Entity],
    forms: Sequence[dict[str, int]],
    split: Split,
) -> Turn | None:
    """A question without an answer: an absent relation of an entity, or an absent entity."""
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


def draw_turns(
    rng: np.random.Generator,
    recipe: Recipe,
    entities: Sequence[Entity],
    forms: Sequence[dict[str, int]],
    split: Split,
) -> tuple[Turn, ...]:
    """Draws the questions, with replacement: asking each fact once would teach elimination."""
    facts = [(e, r) for e, entity in enumerate(entities) for r in entity.facts]
    turns: list[Turn] = []
    while len(turns) < recipe.questions:
        if rng.random() < recipe.unstated:
            turn = _unstated(rng, entities, forms, split)
            if turn is not None:
                turns.append(turn)
            continue
        before = turns[-1].passage if turns else None
        follow = before is not None and rng.random() < recipe.follow
        e, relation = facts[int(rng.integers(len(facts)))]
        if follow and before is not None:
            own = list(entities[before].facts)
            e, relation = before, own[int(rng.integers(len(own)))]
        entity = entities[e]
        form = draw_question(rng, entity.kind, relation, forms[e][relation], split)
        pronoun = "of {n}" not in FORMS[entity.kind.name, relation].questions[form]
        name = entity.pronoun if follow and pronoun else None
        turns.append(
            Turn(
                ask(entity, relation, form, name),
                entity.facts[relation],
                e,
                "follow-up" if name else "single",
                _blind(entities, entity, relation),
                None if name else entity.name,
            )
        )
    return tuple(turns)


def draw_sample(rng: np.random.Generator, recipe: Recipe, split: Split = "train") -> Sample:
    """Draws one context with its conversation."""
    entities, forms = draw_context(rng, recipe, split)
    passages = tuple(
        (entity.name, passage_text(rng, entity, form, recipe))
        for entity, form in zip(entities, forms, strict=True)
    )
    system = None
    if rng.random() < recipe.system:
        system = SYSTEM_PROMPTS[int(rng.integers(len(SYSTEM_PROMPTS)))]
    return Sample(passages, draw_turns(rng, recipe, entities, forms, split), system)
