"""Calibration as a user would run it, on contexts that the judgement does not ask about."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence

from benchmarks.judgement.cases import draw_groups
from benchmarks.judgement.journal import Choice
from rag_windows import WindowedLM
from rag_windows.calibration import Example
from rag_windows.methods import describe

OTHER_SEED = 1000
"""Added to the seed of the judgement's questions."""


def calibrate(
    lm: WindowedLM,
    model: str,
    examples: int,
    seed: int,
    sizes: Mapping[str, Sequence[int]],
) -> Choice:
    """Choose APE's numbers for a model.

    All its tasks take part: numbers for questions without an answer alone would be those with which
    the model never finds one.

    Args:
        lm: the model.
        model: its name.
        examples: how many labelled ones to look at, each on a context of its own; tasks and numbers
            of passages take turns.
        seed: of the judgement.
        sizes: the numbers of passages, by task.
    """
    kinds = [
        (task, own[n])
        for n in range(max(map(len, sizes.values())))
        for task, own in sizes.items()
        if n < len(own)
    ]
    drawn: list[Example] = []
    for number, (task, passages) in enumerate(kinds):
        own = len(range(number, examples, len(kinds)))
        groups = draw_groups(task, passages, 10**9, seed + OTHER_SEED)
        for group in itertools.islice(groups, own):
            question = group.questions[0]
            drawn.append(Example(list(question.messages), group.passages, question.answer))
    begun = time.perf_counter()
    profile = lm.calibrate(drawn)
    return Choice(
        model=model,
        description=json.dumps(describe(profile.best)),
        adopted=profile.beats_default,
        verdict=profile.verdict,
        examples=len(drawn),
        seconds=time.perf_counter() - begun,
    )
