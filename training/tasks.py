"""The evaluation's tasks: held-out names and held-out pairs of phrasings, drawn from a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from training.samples import Recipe, Sample, Turn, draw_context, draw_turns, passage_text
from training.world import Split

TASKS: Mapping[str, Recipe] = {
    # One question with the full name; full names in every sentence.
    "single": Recipe(1, fewer=0.0, mixed=0.0),
    # As above, but half of the names share a word with another name.
    "kin": Recipe(1, fewer=0.0, mixed=0.0, kin=0.5),
    # Later sentences say he, she, it or a surname.
    "pronouns": Recipe(1, fewer=0.0, mixed=0.0, pronouns=0.5, surnames=0.2),
    # A second question with a pronoun, about the entity of the first.
    "follow-up": Recipe(1, fewer=0.0, mixed=0.0, follow=1.0),
    # The fact, or the entity, is not in the passages.
    "not stated": Recipe(1, fewer=0.0, mixed=0.0, missing=0.2, unstated=1.0),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One question over passages: (title, text) pairs, messages before it, the right answer.

    `blind` is the chance of being right for a reader that knows the kind of entity and the relation
    but not the entity.
    """

    passages: tuple[tuple[str, str], ...]
    messages: tuple[Mapping[str, str], ...]
    answer: str
    blind: float


def draw_case(
    rng: np.random.Generator, task: str, passages: int, split: Split = "held-out"
) -> Case:
    """Draws a case of a task with this many passages."""
    recipe = replace(TASKS[task], entities=passages, questions=2 if task == "follow-up" else 1)
    while True:
        entities, forms = draw_context(rng, recipe, split)
        turns = draw_turns(rng, recipe, entities, forms, split)
        if turns[-1].task == ("single" if task in ("single", "kin", "pronouns") else task):
            break
    texts = tuple(
        (entity.name, passage_text(rng, entity, form, recipe))
        for entity, form in zip(entities, forms, strict=True)
    )
    return Case(texts, messages(turns), turns[-1].answer, turns[-1].blind)


def messages(turns: tuple[Turn, ...]) -> tuple[Mapping[str, str], ...]:
    """The conversation up to and with the last question."""
    before: list[Mapping[str, str]] = []
    for turn in turns[:-1]:
        before.append({"role": "user", "content": turn.question})
        before.append({"role": "assistant", "content": turn.answer})
    return (*before, {"role": "user", "content": turns[-1].question})


def as_sample(case: Case) -> Sample:
    """The case as a training sample, for readers of token ids; a single question only."""
    turn = Turn(case.messages[-1]["content"], case.answer, None, "single", case.blind)
    return Sample(case.passages, (turn,))
