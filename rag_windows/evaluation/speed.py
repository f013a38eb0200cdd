"""Seconds to the first token, cold and warm."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rag_windows.cache.passage_cache import PassageCache
from rag_windows.cache.sizes import Size
from rag_windows.errors import InputError, MissingExtraError, ModelError, RagWindowsError
from rag_windows.evaluation.arm import Arm
from rag_windows.evaluation.example import Example
from rag_windows.evaluation.fitting import fitting
from rag_windows.evaluation.folder import RunFolder
from rag_windows.evaluation.options import RunOptions
from rag_windows.evaluation.record import Speed
from rag_windows.evaluation.runner import Progress, Ranking, chosen_examples
from rag_windows.evaluation.task import Task
from rag_windows.model import WindowedLM
from rag_windows.passage import Passage
from rag_windows.results import Generation


def measure_speed(
    lm: WindowedLM,
    task: Task,
    arms: Sequence[Arm],
    ranking: Ranking,
    folder: RunFolder,
    count: int,
    *,
    options: RunOptions,
    rounds: int = 3,
    memory: Size = "4GiB",
    progress: Progress | None = None,
) -> tuple[str, ...]:
    """Time the first token of some examples with every arm, and keep what is measured.

    Each example is asked with an empty cache once before anything is timed. Then come rounds of one
    cold and one warm call, in turns the one first or the other, so that a machine that slows down
    is no advantage for either. What was measured in an earlier run is not measured again.

    Args:
        lm: the model; its own cache is neither read nor filled.
        task: brings the examples, of which evenly spaced ones are taken.
        arms: of the folder's manifest.
        ranking: ranks the passages of an example.
        folder: begun by `RunFolder.begin`.
        count: how many examples; all of them if there are fewer.
        options: of the run.
        rounds: how often each is timed.
        memory: for the warm cache.
        progress: told how far it is.

    Returns:
        What could not be measured, and why.
    """
    if count < 1 or rounds < 1:
        raise InputError("Speed is measured on at least one example, in at least one round.")
    chosen = evenly(chosen_examples(task, arms, folder), count)
    begun, total, notes = time.monotonic(), len(chosen) * len(arms), []
    if progress is not None:
        progress(0, total, 0.0)
    with PassageCache(memory=memory) as cache:
        timed = _Timed(lm.with_cache(None), lm.with_cache(cache), options, rounds)
        for place, example in enumerate(chosen):
            lacking = [arm for arm in arms if example.key not in folder.speeds(arm.name)]
            try:
                passages = ranking(example) if lacking else ()
                for arm in lacking:
                    folder.add([timed.measure(arm, example, passages[: arm.top_k])])
            except (ModelError, MissingExtraError):
                raise
            except RagWindowsError as error:
                notes.append(f"{example.key}: not timed: {error}")
            # A cache that fills up would begin to refuse windows.
            cache.clear()
            if progress is not None:
                progress((place + 1) * len(arms), total, time.monotonic() - begun)
    return tuple(notes)


def evenly(examples: Sequence[Example], count: int) -> list[Example]:
    """So many examples at even distances, the first and the last one among them."""
    last = len(examples) - 1
    if count > last:
        return list(examples)
    steps = max(1, count - 1)
    return [examples[number * last // steps] for number in range(count)]


class _Timed:
    """Asks for first tokens."""

    def __init__(
        self, cold: WindowedLM, warm: WindowedLM, options: RunOptions, rounds: int
    ) -> None:
        self._cold = cold
        self._warm = warm
        self._options = options
        self._rounds = rounds

    def measure(self, arm: Arm, example: Example, passages: Sequence[Passage]) -> Speed:
        """One example's timings."""
        count = fitting(
            self._cold,
            list(example.messages),
            passages,
            arm.method,
            prefix=self._options.prefix,
            max_new_tokens=self._options.max_new_tokens,
        )
        passages = passages[:count]
        self._first_token(self._warm, arm, example, passages)
        seconds: dict[WindowedLM, list[float]] = {self._cold: [], self._warm: []}
        for number in range(self._rounds):
            pair = (self._cold, self._warm)
            for lm in pair if number % 2 == 0 else pair[::-1]:
                found = self._first_token(lm, arm, example, passages)
                seconds[lm].append(found.timings.ttft_s)
        return Speed(
            example.key,
            arm.name,
            self._context_tokens(arm, example, passages),
            tuple(seconds[self._cold]),
            tuple(seconds[self._warm]),
        )

    def _first_token(
        self, lm: WindowedLM, arm: Arm, example: Example, passages: Sequence[Passage]
    ) -> Generation:
        return lm.generate(
            list(example.messages),
            passages,
            prefix=self._options.prefix,
            method=arm.method,
            max_new_tokens=1,
            citations=False,
            seed=self._options.seed,
            do_sample=False,
            num_beams=1,
        )

    def _context_tokens(self, arm: Arm, example: Example, passages: Sequence[Passage]) -> int:
        request = self._cold.engine.request(
            list(example.messages),
            passages,
            method=arm.method,
            prefix=self._options.prefix,
            max_new_tokens=1,
        )
        return sum(len(window.ids) for window in request.parts.windows)
