"""Texts answered in batches by the likeliest of their choices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rag_windows.evaluation.answering import Answered
from rag_windows.evaluation.arm import Arm
from rag_windows.evaluation.example import Example
from rag_windows.evaluation.icl.item import Item
from rag_windows.evaluation.icl.measuring import Measured
from rag_windows.evaluation.icl.ready import Ready
from rag_windows.evaluation.record import Record
from rag_windows.passage import Passage

if TYPE_CHECKING:
    from rag_windows.evaluation.icl.task import IclTask
    from rag_windows.model import WindowedLM


@dataclass(slots=True)
class IclAnswerer:
    """Answers an `IclTask`; windows don't depend on the batch, so it changes no answer.

    Attributes:
        task: whose examples are answered.
        prefix: system prompt, or None.
        batch: examples that share an encoding.
    """

    task: IclTask
    prefix: str | None
    batch: int = 32
    _ready: dict[tuple[str, int], Ready] = field(default_factory=dict, init=False, repr=False)
    _measured: Measured | None = field(default=None, init=False, repr=False)

    def answer(
        self, lm: WindowedLM, arm: Arm, asked: Sequence[tuple[Example, Sequence[Passage]]]
    ) -> list[Answered]:
        """Answer examples by one arm; the passages beside them count for nothing.

        Raises:
            InputError: choices that are the same tokens, or fewer demonstrations than asked for.
            LimitError: a text or a demonstration that doesn't fit the model's positions.
        """
        if self._measured is None or self._measured.lm is not lm:
            self._measured = Measured(self.task, lm)
            self._ready.clear()
        measured = self._measured
        groups: dict[tuple[int, str | None], list[int]] = {}
        items = [self.task.asked[example.details["item"]] for example, _ in asked]
        for index, item in enumerate(items):
            own = item.key if measured.apart(item) else None
            groups.setdefault((asked[index][0].details["seed"], own), []).append(index)
        made: dict[int, Answered] = {}
        for (seed, own), indices in groups.items():
            some = [items[index] for index in indices]
            if own is None:
                if (arm.name, seed) not in self._ready:
                    self._ready[arm.name, seed] = Ready.of(
                        lm, self.task, arm, seed, self.prefix, *measured.usual
                    )
                ready = self._ready[arm.name, seed]
            else:
                text, choices = self.task.text_of(some[0]), [measured.labels(some[0])]
                ready = Ready.of(lm, self.task, arm, seed, self.prefix, text, choices)
            keys = [asked[index][0].key for index in indices]
            answers = self._answered(arm, keys, measured, ready, some)
            made |= dict(zip(indices, answers, strict=True))
        return [made[index] for index in range(len(asked))]

    def _answered(
        self,
        arm: Arm,
        keys: Sequence[str],
        measured: Measured,
        ready: Ready,
        items: Sequence[Item],
    ) -> list[Answered]:
        task = self.task
        begun = time.perf_counter()
        judged = ready.shown.judge(
            [task.text_of(item) for item in items],
            [measured.labels(item) for item in items],
            task.normalize,
            task.options.calibrate_with,
        )
        seconds = (time.perf_counter() - begun) / len(items)
        read = judged.read
        made = []
        for number, (item, found) in enumerate(zip(items, judged.labels, strict=True)):
            first = number == 0
            cached = read.cached_tokens if first else read.context_tokens
            record = Record(
                key=keys[number],
                arm=arm.name,
                answer=item.choices[list(found.scores).index(found.label)],
                finish_reason="chosen",
                passages=ready.passages,
                left_out=ready.left_out,
                prompt_tokens=read.context_tokens + read.query_tokens[number],
                cached_tokens=cached,
                # The first of a batch pays for what the others find.
                windows_encoded=read.encoded_windows if first else 0,
                windows_reused=read.cached_windows + (0 if first else read.encoded_windows),
                encode_s=read.encode_s / len(items),
                ttft_s=seconds,
                total_s=seconds,
                scores=dict(zip(item.choices, found.scores.values(), strict=True)),
                notes=tuple(note.message for note in found.notes),
            )
            made.append(Answered(record, ready.shown.windows))
        return made
