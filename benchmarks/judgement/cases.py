"""The questions: many on each context, so that one encoding serves them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rag_windows import Passage
from training.contexts import draw_context
from training.demonstrations import draw_demonstrations
from training.recipes import Demonstrations, Turn
from training.tasks import TASKS as RECIPES
from training.tasks import messages
from training.turns import draw_turns

TASKS = {
    "single-hop": "single",
    "two-hop": "two-hop",
    "not-stated": "not stated",
    "follow-up": "follow-up",
    "classification": "classification",
}
"""The tasks by the names of the page, and what the training calls them."""

FEWEST = {"two-hop": 2}
"""The fewest passages over which a task can be asked, where it is not one."""

PER_CONTEXT = {1: 8, 4: 16, 16: 20}
"""Questions on one context, from so many passages on; less where it has no more of them."""

_ATTEMPTS = 30
"""Questions drawn for each one wanted, before a context is given up as too poor."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question with its answer.

    Attributes:
        messages: the conversation, the question last.
        answer: the right answer, whole.
        steps: what of it comes before the value asked for: a two-hop answer's link.
        passage: index of the passage that states it, or None.
        blind: chance of a reader that knows the relation, but not whom the question is about.
    """

    messages: tuple[dict[str, str], ...]
    answer: str
    steps: str
    passage: int | None
    blind: float


@dataclass(frozen=True, slots=True)
class Group:
    """One context with its questions."""

    passages: tuple[Passage, ...]
    questions: tuple[Question, ...]


def draw_groups(task: str, passages: int, questions: int, seed: int) -> Iterator[Group]:
    """Draw contexts until they hold so many questions, held-out names and phrasings only.

    Args:
        task: one of `TASKS`.
        passages: of each context.
        questions: in all; the last context is cut to it.
        seed: equal arguments give equal groups.
    """
    rng = np.random.default_rng([seed, list(TASKS).index(task), passages])
    each = max(count for least, count in PER_CONTEXT.items() if least <= passages)
    left = questions
    while left:
        group = _draw(rng, TASKS[task], passages, min(each, left))
        if group.questions:
            left -= len(group.questions)
            yield group


def _draw(rng: np.random.Generator, task: str, passages: int, wanted: int) -> Group:
    recipe = RECIPES[task]
    found: dict[str, Question] = {}
    if isinstance(recipe, Demonstrations):
        sized = replace(recipe, passages=passages, questions=_ATTEMPTS * wanted)
        sample = draw_demonstrations(rng, sized, "held-out")
        texts = sample.passages
        conversations: Iterator[tuple[Turn, ...]] = ((turn,) for turn in sample.turns)
    else:
        facts = replace(recipe, entities=passages)
        context = draw_context(rng, facts, "held-out")
        texts = context.passages(rng, facts)
        conversations = (
            draw_turns(rng, facts, context, "held-out") for _ in range(_ATTEMPTS * wanted)
        )
    for turns in conversations:
        last = turns[-1]
        if last.task != task:
            continue
        asked = tuple(dict(message) for message in messages(turns))
        question = Question(asked, last.answer, last.steps or "", last.passage, last.blind)
        found.setdefault("\n".join(message["content"] for message in asked), question)
        if len(found) == wanted:
            break
    return Group(tuple(Passage(text, title=title) for title, text in texts), tuple(found.values()))
