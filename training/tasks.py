"""The evaluation's tasks: held-out names and held-out pairs of phrasings, drawn from a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from training.recipes import Demonstrations, Recipe, Sample, Turn
from training.samples import draw_sample
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
}
TRAINED: Mapping[str, tuple[str, ...]] = {
    "tiny-reader": ("single", "kin", "pronouns", "follow-up", "not stated"),
    "tiny-learner": ("single", "two-hop", "classification"),
}
"""The tasks that each shipped model was trained for."""
FEWEST = {"two-hop": 2}
"""The fewest passages that a task can be asked over, where it is not one."""


@dataclass(frozen=True, slots=True)
class Case:
    """One question over passages: (title, text) pairs, messages before it, the right answer.

    `blind` is the chance of being right for a reader that knows the kind of entity and the relation
    but not the entity; for classification, of one that knows the labels. `bridge` is the entity
    that a two-hop answer has to name first, `value` what it has to end with.
    """

    passages: tuple[tuple[str | None, str], ...]
    messages: tuple[Mapping[str, str], ...]
    answer: str
    blind: float
    bridge: str | None = None
    value: str | None = None

    def accepts(self, text: str) -> bool:
        """Whether an answer is right: the expected one; a two-hop one by both of its ends."""
        text = text.strip()
        if self.bridge is None:
            return text == self.answer
        return text.startswith(self.bridge) and text.endswith(f" {self.value}")


def draw_case(
    rng: np.random.Generator, task: str, passages: int, split: Split = "held-out"
) -> Case:
    """Draws a case of a task with this many passages."""
    recipe = TASKS[task]
    if isinstance(recipe, Demonstrations):
        sized: Recipe | Demonstrations = replace(recipe, passages=passages)
    else:
        sized = replace(recipe, entities=passages)
    wanted = "single" if task in ("kin", "pronouns") else task
    while True:
        sample = draw_sample(rng, sized, split)
        if sample.turns[-1].task == wanted:
            break
    last = sample.turns[-1]
    value = None if last.steps is None else last.answer.removeprefix(f"{last.steps} ")
    return Case(
        sample.passages, messages(sample.turns), last.answer, last.blind, last.bridge, value
    )


def messages(turns: tuple[Turn, ...]) -> tuple[Mapping[str, str], ...]:
    """The conversation up to and with the last question."""
    before: list[Mapping[str, str]] = []
    for turn in turns[:-1]:
        before.append({"role": "user", "content": turn.question})
        before.append({"role": "assistant", "content": turn.answer})
    return (*before, {"role": "user", "content": turns[-1].question})


def as_sample(case: Case) -> Sample:
    """The case as a training sample, for readers of token ids; its last question only."""
    turn = Turn(case.messages[-1]["content"], case.answer, None, "single", case.blind)
    return Sample(case.passages, (turn,))
