"""Tasks for tests: a question over passages, with names and forms that no training saw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from training.samples import Demonstrations, Recipe, draw_sample
from training.world import Split

PLAIN = Recipe(1, questions=1, fewer=0.0, mixed=0.0, system=0.0)
TASKS: Mapping[str, Recipe | Demonstrations] = {
    # One question with the full name; full names in every sentence.
    "single": PLAIN,
    # As above, but half of the names share a word with another name.
    "kin": replace(PLAIN, kin=0.5),
    # Later sentences say he, she, it, "the company" or a surname.
    "pronouns": replace(PLAIN, pronouns=0.5, surnames=0.2),
    # A second question with a pronoun or "the company", about the entity of the first.
    "follow-up": replace(PLAIN, questions=2, follow=1.0),
    # The fact, or the entity, is not in the passages.
    "not stated": replace(PLAIN, missing=0.2, unstated=1.0),
    # "Where was the founder of Wendwick Press born?", over two passages.
    "two-hop": replace(PLAIN, linked=True, hops=1.0),
    # Made-up words with made-up labels, eight demonstrations a passage.
    "classification": Demonstrations(1, questions=1),
    # Every name shares a word with another one's, and all state the same relations.
    "many alike": replace(PLAIN, kin=1.0),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One question over passages: (title, text) pairs, messages before it, the right answer.

    `blind` is the chance of being right for a reader that knows the kind of entity and the relation
    but not the entity; for classification, of one that knows the labels.
    """

    passages: tuple[tuple[str | None, str], ...]
    messages: tuple[Mapping[str, str], ...]
    answer: str
    blind: float


def draw_case(
    rng: np.random.Generator, task: str, passages: int, split: Split = "held-out"
) -> Case:
    """Draws a case of a task with this many passages.

    Raises:
        ValueError: the task needs two passages at least.
    """
    if passages < 2 and task == "two-hop":
        raise ValueError(f"the task {task!r} needs at least 2 passages, not {passages}")
    plain = TASKS[task]
    recipe: Recipe | Demonstrations = (
        replace(plain, entities=passages)
        if isinstance(plain, Recipe)
        else replace(plain, passages=passages)
    )
    wanted = "single" if task in ("kin", "pronouns", "many alike") else task
    while (sample := draw_sample(rng, recipe, split)).turns[-1].task != wanted:
        pass
    *before, last = sample.turns
    messages: list[Mapping[str, str]] = []
    for turn in before:
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": turn.answer})
    messages.append({"role": "user", "content": last.question})
    return Case(sample.passages, tuple(messages), last.answer, last.blind)
