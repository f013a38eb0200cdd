"""A small invented run: three methods at two depths over talks about a harbour."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rag_windows.evaluation.record import ReadPassage, Record, Speed
from rag_windows.evaluation.run import Arm
from rag_windows.evaluation.task import Example, Reference, Score, ratio
from rag_windows.passage import Passage

LABELS = ("sequential", "ape", "pcw")
ARMS = tuple(Arm(label, top_k=depth) for depth in (2, 4) for label in LABELS)
KINDS = ("answer", "clarification")


class HarbourTask:
    """Twelve talks of three questions; the last question of a talk names no evidence."""

    name = "harbour"
    pool: Sequence[Passage] | None = None
    settings: Mapping[str, Any] = {}
    prefix: str | None = None
    max_new_tokens = 8
    metrics: Sequence[str] = ("right", "length")

    def __init__(self, talks: int = 12) -> None:
        self.examples = [
            Example(
                key=f"{talk}/{turn}",
                messages=({"role": "user", "content": f"Question {turn}?"},),
                references=(Reference("yes", evidence=(f"p{talk}.{turn}",) if turn < 2 else ()),),
                group=f"talk {talk}",
                kinds=(KINDS[turn % 2],),
            )
            for talk in range(talks)
            for turn in range(3)
        ]

    def scores(self, examples: Sequence[Example], records: Sequence[Record]) -> list[Score]:
        """A mean, and one that is computed from sums."""
        right = [100.0 * (one.answer == "yes") for one in records]
        lengths = np.array([(float(len(one.answer)), 4.0) for one in records])
        return [
            Score.mean("right", right),
            Score.of_sums("length", lengths.reshape(-1, 2), ratio),
        ]


def records_of(task: HarbourTask, arms: Sequence[Arm] = ARMS) -> dict[str, dict[str, Record]]:
    """Sequential knows most; four passages hold the evidence of every even talk."""
    found: dict[str, dict[str, Record]] = {}
    chance = {"sequential": 0.9, "ape": 0.7, "pcw": 0.5}
    for arm in arms:
        rng = random.Random(arm.name)
        found[arm.name] = {}
        for example in task.examples:
            talk, turn = map(int, example.key.split("/"))
            ids = ["a", "b", f"p{talk}.{turn}" if talk % 2 == 0 else "c", "d"][: arm.top_k]
            if talk % 4 == 0:
                ids.reverse()
            found[arm.name][example.key] = Record(
                example.key,
                arm.name,
                "yes" if rng.random() < chance.get(arm.label, 0.5) else "no",
                finish_reason="length" if turn == 1 else "stop",
                passages=tuple(ReadPassage("digest", id=name) for name in ids),
                prompt_tokens=100,
                cached_tokens=40,
                completion_tokens=2,
                windows_encoded=3,
                windows_reused=1,
                encode_s=0.1,
                ttft_s=0.25,
                total_s=0.5,
            )
    return found


def speeds_of(arms: Sequence[Arm] = ARMS) -> dict[str, list[Speed]]:
    """Four contexts an arm, of 100 to 2,000 tokens."""
    return {
        arm.name: [
            Speed(
                f"{place}/0", arm.name, tokens, (3.0, tokens / 100, tokens / 100), (0.1, 0.3, 0.2)
            )
            for place, tokens in enumerate((100, 256, 257, 2000))
        ]
        for arm in arms
    }
