"""What a method costs at each token: the same windows, read by one method and by another."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence

import torch

from rag_windows.benchmark.clock import synchronize
from rag_windows.benchmark.load import Load
from rag_windows.benchmark.plan import Place
from rag_windows.benchmark.result import Reading
from rag_windows.context import EncodedContext
from rag_windows.methods import Method, resolve
from rag_windows.model import WindowedLM


def measure_readings(
    lm: WindowedLM, place: Place, asked: Load, methods: Sequence[str], tokens: int, rounds: int
) -> list[Reading]:
    """Decode by all methods at once, a token of each in turn.

    Methods that encode alike read the same keys and values in memory. What ``generate`` does beside
    the model's pass is left out; it is the same for all.

    Args:
        lm: without a cache.
        place: that the load was made for.
        asked: what is read.
        methods: their names.
        tokens: new ones in each round, at least two.
        rounds: of every method.
    """
    kinds = [resolve(name) for name in methods]
    made = [
        Reading(place.context, place.window, place.ragged, name, tokens, [], []) for name in methods
    ]
    readers = [Reader(lm, context, asked) for context in _contexts(lm, asked, kinds)]
    for number in range(rounds + 1):
        firsts = [reader.ask() for reader in readers]
        steps: list[list[float]] = [[] for _ in readers]
        for step in range(1, tokens if number else 2):
            # Neither goes first always, and a slow moment of the machine meets all of them.
            order = range(len(readers)) if step % 2 else reversed(range(len(readers)))
            for index in order:
                steps[index].append(readers[index].step())
        if number:  # the round before only warms up
            for reading, first, own in zip(made, firsts, steps, strict=True):
                reading.first_s.append(first)
                reading.token_s.append(statistics.median(own))
    return made


class Reader:
    """One greedy answer, a token at a time.

    Args:
        lm: reads.
        context: what is read.
        asked: its query is answered.
    """

    def __init__(self, lm: WindowedLM, context: EncodedContext, asked: Load) -> None:
        self._decoder = lm.engine.decoder
        self._query = torch.tensor([asked.query])
        self._context = self._decoder.narrowed(context, asked.query)
        self._tail, self._past, self._ids = self._context.new_tail(), 0, self._query

    @property
    def token(self) -> int:
        """The last one."""
        return int(self._ids[0, -1])

    def ask(self) -> float:
        """Begin anew and read the query; returns seconds to the first token."""
        self._tail, self._past, self._ids = self._context.new_tail(), 0, self._query
        return self.step()

    def step(self) -> float:
        """The next token; returns its seconds."""
        synchronize()
        begun = time.perf_counter()
        logits = self._decoder.forward(self._context, self._ids, self._tail, self._past, last=1)
        self._past += self._ids.shape[1]
        self._ids = logits[:, -1].argmax(dim=-1, keepdim=True)
        synchronize()
        return time.perf_counter() - begun


def _contexts(lm: WindowedLM, asked: Load, methods: Sequence[Method]) -> list[EncodedContext]:
    made: list[EncodedContext] = []
    for method in methods:
        alike = next((one for one in made if _encodes_alike(one.method, method)), None)
        if alike is None:
            made.append(lm.encode_ids(asked.prefix, asked.windows, method=method))
        else:
            made.append(dataclasses.replace(alike, method=method))
    return made


def _encodes_alike(one: Method, other: Method) -> bool:
    def steps(method: Method) -> tuple[object, ...]:
        return method.refinement, method.linking, method.selection, method.combination

    plain = not any(steps(one)) and not any(steps(other))
    same = (one.windowed, one.alignment, one.encoding) == (
        other.windowed,
        other.alignment,
        other.encoding,
    )
    return plain and same
