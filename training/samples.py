"""Training sequences as text, drawn from a recipe, and the held-out tasks of evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from training.world import (
    COMMON,
    KINDS,
    LABELS,
    MADE_UP,
    NOT_STATED,
    SYSTEM_PROMPTS,
    Entity,
    Kind,
    NamesOf,
    Split,
    are_held_out,
    draw_name,
    kind_named,
    pick,
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a sequence is made of. Chances are per sequence, entity, sentence or turn as named.

    `kin`: an entity shares a word of its name with another. `missing`: an entity lacks a relation.
    `unstated`: a question has the answer "not stated". `pronouns`: a sentence after the first says
    he, she, it or "the company". `surnames`: a person is called by only the surname in a later
    sentence. `follow`: a question continues with a pronoun about the entity of the turn before.
    `linked`: half of the passages name the others' entities as their founder, author, employer ...
    `hops`: a question goes through such a link. `mixed`: the passages are of several kinds.
    `jitter`: random gaps in the positions between the parts. `fewer`: the number of facts is drawn
    from 1 to `facts` for the whole sequence. `framed`: instructions stand around the passages and
    questions. `system`: a system message comes first.
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
    linked: bool = False
    hops: float = 0.0
    mixed: float = 0.2
    jitter: float = 0.3
    fewer: float = 0.2
    framed: float = 0.0
    system: float = 0.1


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """A sequence for in-context classification: lines "words: label" over several passages.

    Each label (`labels` of them) has `keywords` words of its own; a line is `words` words, one of
    them a keyword of its label, the others fillers.
    """

    passages: int
    lines: int = 8
    labels: tuple[int, int] = (2, 4)
    keywords: tuple[int, int] = (1, 4)
    words: tuple[int, int] = (2, 3)
    questions: int = 12
    jitter: float = 0.3


@dataclass(frozen=True, slots=True)
class Turn:
    """One question with its answer, the passage that states it (None: none does) and the task.

    `blind` is the chance of being right for a reader that knows the kind of entity and the relation
    but not the entity. `name` is the full name in the question, where it stands in the passages
    too. `bridge` is the entity that a two-hop answer names first, `steps` all that it says before
    the value.
    """

    question: str
    answer: str
    passage: int | None
    task: str
    blind: float
    name: str | None = None
    bridge: str | None = None
    steps: str | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A context with its conversation: (title, text) of each passage, then the turns.

    `before` is text of the user's first message in front of the passages.
    """

    passages: tuple[tuple[str | None, str], ...]
    turns: tuple[Turn, ...]
    system: str | None = None
    before: str = ""


@dataclass(frozen=True, slots=True)
class Context:
    """The entities of the passages and, for each, the statement form of its relations."""

    entities: Sequence[Entity]
    forms: Sequence[dict[str, int]]

    def passages(
        self, rng: np.random.Generator, recipe: Recipe
    ) -> tuple[tuple[str | None, str], ...]:
        """(title, text) of each passage: its sentences in random order."""
        texts = []
        for entity, forms in zip(self.entities, self.forms, strict=True):
            relations = list(forms)
            rng.shuffle(relations)
            sentences = []
            for n, relation in enumerate(relations):
                form, name = forms[relation], None
                if n and rng.random() < recipe.pronouns:
                    name = entity.later_name(rng, entity.kind.relations[relation].statements[form])
                person = entity.kind.noun is None
                if n and name is None and person and rng.random() < recipe.surnames:
                    name = entity.second
                sentences.append(entity.state(relation, form, name))
            texts.append((entity.name, " ".join(sentences)))
        return tuple(texts)


def draw_context(rng: np.random.Generator, recipe: Recipe, split: Split) -> Context:
    """Draws the entities of a sequence with their facts and statement forms."""
    entities: list[Entity] = []
    if recipe.linked:
        entities = draw_linked(rng, recipe, split)
    else:
        if recipe.entities > 1 and rng.random() < recipe.mixed:
            kinds = rng.integers(len(KINDS), size=recipe.entities).tolist()
        else:
            # Persons have the most relations and the longest lists of names: more often.
            kinds = [rng.choice(len(KINDS), p=[0.32, 0.17, 0.17, 0.17, 0.17])] * recipe.entities
        facts = _facts(rng, recipe)
        for kind in dict.fromkeys(kinds):
            entities += draw_kind(rng, recipe, split, KINDS[kind], kinds.count(kind), facts)
    shuffled = [entities[i] for i in rng.permutation(len(entities))]
    return Context(shuffled, [draw_forms(rng, one, split) for one in shuffled])


def draw_forms(rng: np.random.Generator, entity: Entity, split: Split) -> dict[str, int]:
    """A statement form for each relation of an entity."""
    return {name: entity.kind.relations[name].draw_pair(rng, split)[0] for name in entity.facts}


def _facts(rng: np.random.Generator, recipe: Recipe) -> int:
    fewer = rng.random() < recipe.fewer
    return int(rng.integers(1, recipe.facts + 1)) if fewer else recipe.facts


def draw_kind(
    rng: np.random.Generator,
    recipe: Recipe,
    split: Split,
    kind: Kind,
    count: int,
    facts: int,
    always: str | None = None,
) -> list[Entity]:
    """Entities with different names that state the same relations, each at least one of them."""
    others = [r for r in kind.relations if r != always]
    relations = [others[i] for i in rng.permutation(len(others))[: facts - (always is not None)]]
    if always is not None:
        relations.append(always)
    entities: list[Entity] = []
    in_vain = 0
    while len(entities) < count:
        like = pick(rng, entities) if entities and rng.random() < recipe.kin else None
        if in_vain > 100:  # all held-out names that share a word with one of these are taken
            like = None
        first, second = draw_name(rng, kind, split, like)
        shared = any({first, second} & {one.first, one.second} for one in entities)
        same = any((first, second) == (one.first, one.second) for one in entities)
        # Short word lists run out of names without a common word: then any new name will do.
        if same or (shared and like is None and rng.random() < 0.9):
            in_vain += 1
            continue
        in_vain = 0
        present = [r for r in relations if rng.random() >= recipe.missing] or [pick(rng, relations)]
        facts_of = {r: kind.relations[r].draw_value(rng, split) for r in present}
        entities.append(Entity(kind, first, second, facts_of))
    return entities


# In the order in which the shipped models' sequences were drawn.
LINKS = [
    (kind, name)
    for kind in (*KINDS[1:], KINDS[0])
    for name, relation in kind.relations.items()
    if relation.bridge
]
"""Kinds with the relation that names an entity of another kind."""


def target_of(kind: Kind, relation: str) -> Kind:
    """The kind whose names are the relation's values."""
    values = kind.relations[relation].values
    return kind_named(values.kind) if isinstance(values, NamesOf) else kind


def draw_linked(rng: np.random.Generator, recipe: Recipe, split: Split) -> list[Entity]:
    """Half of the entities, rounded up, and others that name them by one relation."""
    kind, relation = pick(rng, LINKS)
    target = target_of(kind, relation)
    reached = (recipe.entities + 1) // 2
    facts = max(2, _facts(rng, recipe))
    targets = draw_kind(rng, recipe, split, target, reached, facts)
    sources = draw_kind(rng, recipe, split, kind, recipe.entities - reached, facts, always=relation)
    order = rng.permutation(reached)
    for n, source in enumerate(sources):
        # Some links lead out of the passages: what lies behind them is not stated.
        if relation in source.facts and rng.random() < 0.9:
            linked = {**source.facts, relation: targets[order[n]].name}
            sources[n] = replace(source, facts=linked)
    return targets + sources


def draw_turns(
    rng: np.random.Generator, recipe: Recipe, context: Context, split: Split
) -> tuple[Turn, ...]:
    """Draws the questions, with replacement: asking each fact once would teach elimination."""
    facts = [(e, r) for e, entity in enumerate(context.entities) for r in entity.facts]
    turns: list[Turn] = []
    while len(turns) < recipe.questions:
        turn: Turn | None
        before = turns[-1].passage if turns else None
        if rng.random() < recipe.unstated:
            turn = _unstated(rng, context, split)
        elif rng.random() < recipe.hops:
            turn = draw_hop(rng, context, split)
        elif before is not None and rng.random() < recipe.follow:
            relation = pick(rng, list(context.entities[before].facts))
            turn = draw_stated(rng, context, before, relation, split, True)
        else:
            turn = draw_stated(rng, context, *pick(rng, facts), split, False)
        if turn is not None:
            turns.append(turn)
    return tuple(turns)


def blind_chance(context: Context, entity: Entity, relation: str) -> float:
    """Chance of a reader that knows kind and relation, but not whom the question is about."""
    same = [e for e in context.entities if e.kind is entity.kind and relation in e.facts]
    values = [e.facts[relation] for e in same]
    return values.count(entity.facts[relation]) / len(values)


def draw_stated(
    rng: np.random.Generator, context: Context, e: int, relation: str, split: Split, follow: bool
) -> Turn:
    """A question that passage `e` answers; `follow`: by a pronoun where the form allows one."""
    entity = context.entities[e]
    asked = entity.kind.relations[relation]
    form = asked.draw_question(rng, context.forms[e][relation], split)
    name = entity.later_name(rng, asked.questions[form]) if follow else None
    return Turn(
        entity.ask(relation, form, name),
        entity.facts[relation],
        e,
        "follow-up" if name else "single",
        blind_chance(context, entity, relation),
        None if name else entity.name,
    )


def _unstated(rng: np.random.Generator, context: Context, split: Split) -> Turn | None:
    """A question without an answer: an absent relation of an entity, or an absent entity."""
    entities = context.entities
    e = int(rng.integers(len(entities)))
    entity = entities[e]
    passage: int | None = e
    if rng.random() < 0.5:
        stated = {r for other in entities if other.kind is entity.kind for r in other.facts}
        absent = [r for r in entity.kind.relations if r not in entity.facts]
        tempting = [r for r in absent if r in stated]
        pool = tempting if tempting and rng.random() < 0.7 else absent
        if not pool:
            return None
        relation = pick(rng, pool)
    else:
        first, second = draw_name(rng, entity.kind, split)
        if any({first, second} & {o.first, o.second} for o in entities if o.kind is entity.kind):
            return None
        relation = pick(rng, list(entity.facts))
        entity, passage = Entity(entity.kind, first, second, {}), None
    form = entity.kind.relations[relation].draw_pair(rng, split)[1]
    return Turn(entity.ask(relation, form), NOT_STATED, passage, "not stated", 0.0)


def draw_hop(rng: np.random.Generator, context: Context, split: Split) -> Turn | None:
    """A question about the founder, author, employer ... of an entity, in two steps.

    The answer names that entity, asks the second question, which single questions teach, and
    answers it: "Alra Ashden. Where was Alra Ashden born? Arava".
    """
    links = [(one, r) for one in context.entities for r in one.facts if (one.kind, r) in LINKS]
    if not links:
        return None
    source, relation = pick(rng, links)
    name, bridge = source.facts[relation], source.kind.relations[relation].bridge
    described = str(bridge).format(n=source.name)
    reached = next((i for i, one in enumerate(context.entities) if one.name == name), None)
    if reached is None:
        target = target_of(source.kind, relation)
        wanted = pick(rng, list(target.relations))
        form = target.relations[wanted].draw_pair(rng, split)[1]
        first, second = name.split(" ")
        entity, answer = Entity(target, first, second, {}), NOT_STATED
        task, blind = "open hop", 0.0
    else:
        entity, task = context.entities[reached], "two-hop"
        wanted = pick(rng, list(entity.facts))
        statement = context.forms[reached][wanted]
        form = entity.kind.relations[wanted].draw_question(rng, statement, split)
        answer, blind = entity.facts[wanted], blind_chance(context, entity, wanted)
    steps = f"{name}. {entity.ask(wanted, form)}"
    question = entity.ask(wanted, form, described)
    return Turn(question, f"{steps} {answer}", None, task, blind, source.name, name, steps)


FILLERS = 12
"""So many of the made-up words, the first ones, mean nothing in any sequence: were they drawn anew
for each, a word that is shown once could as well be a keyword."""


def draw_demonstrations(
    rng: np.random.Generator, recipe: Demonstrations, split: Split = "train"
) -> Sample:
    """Draws a labelling rule, lines that follow it, and questions on keywords among them."""
    labels = rng.permutation(len(LABELS))[: rng.integers(*recipe.labels, endpoint=True)]
    count = int(rng.integers(*recipe.keywords, endpoint=True))
    words = [w for w in rng.permutation(len(MADE_UP)) if w >= FILLERS]
    label_of: dict[int, int] = {}
    for label in labels.tolist():
        fitting = [w for w in words if are_held_out(w, label) == (split == "held-out")][:count]
        words = [w for w in words if w not in fitting]
        label_of.update(dict.fromkeys(fitting, label))
    keywords = list(label_of)

    def line(keyword: int) -> str:
        others = int(rng.integers(*recipe.words, endpoint=True)) - 1
        picked = [*rng.permutation(FILLERS)[:others], keyword]
        return " ".join(MADE_UP[picked[i]] for i in rng.permutation(len(picked)))

    total = recipe.passages * recipe.lines
    # Every keyword comes up once before any is repeated, as far as there are lines.
    drawn = [keywords[i] for i in rng.permutation(len(keywords))][:total]
    shown = list(drawn)
    drawn += [pick(rng, keywords) for _ in range(total - len(drawn))]
    drawn = [drawn[i] for i in rng.permutation(total)]
    rows = [f"{line(keyword)}: {LABELS[label_of[keyword]]}" for keyword in drawn]
    texts = ["\n".join(rows[i : i + recipe.lines]) for i in range(0, total, recipe.lines)]
    turns = []
    for _ in range(recipe.questions):
        keyword = pick(rng, shown)
        answer = LABELS[label_of[keyword]]
        turns.append(Turn(f"{line(keyword)}:", answer, None, "classification", 1 / len(labels)))
    return Sample(tuple((None, text) for text in texts), tuple(turns))


LEADS = ("", "Question: ", "Query: ", "User: ", "The question: ", "QUESTION:\n")
ENDS = ("", "\nAnswer:", "\nAnswer: ", "\nYour answer:", "\n\nANSWER:\n")
RULES = ("", "---------------------\n", "```\n", "====\n", "\n")


def _instruction(rng: np.random.Generator) -> str:
    """Up to two sentences of common words: such text may stand anywhere around a question."""
    sentences = []
    for _ in range(int(rng.integers(0, 3))):
        words = [COMMON[int(i)] for i in rng.integers(len(COMMON), size=rng.integers(3, 16))]
        sentences.append(" ".join(words) + ".:"[int(rng.random() < 0.2)])
    return " ".join(sentences)


def _draw_frame(rng: np.random.Generator) -> tuple[str, str, str]:
    """Text before the passages, before a question and after it, as prompt templates have it."""
    rule = pick(rng, RULES)
    before = _instruction(rng)
    before = f"{before}\n{rule}" if before and rng.random() < 0.6 else ""
    instruction = _instruction(rng)
    gap = "\n" if rng.random() < 0.7 else "\n\n"
    label = pick(rng, LEADS)
    opening = (rule if before else "") + (f"{instruction}{gap}" if instruction else "") + label
    return before, opening, pick(rng, ENDS)


def draw_sample(
    rng: np.random.Generator, recipe: Recipe | Demonstrations, split: Split = "train"
) -> Sample:
    """Draws one context with its conversation."""
    if isinstance(recipe, Demonstrations):
        return draw_demonstrations(rng, recipe, split)
    context = draw_context(rng, recipe, split)
    passages = context.passages(rng, recipe)
    system = pick(rng, SYSTEM_PROMPTS) if rng.random() < recipe.system else None
    turns = draw_turns(rng, recipe, context, split)
    if rng.random() >= recipe.framed:
        return Sample(passages, turns, system)
    before, opening, closing = _draw_frame(rng)
    framed = [
        replace(turn, question=f"{opening}{turn.question}{closing}") if rng.random() < 0.5 else turn
        for turn in turns
    ]
    return Sample(passages, tuple(framed), system, before)
