"""Many questions at once, which share half of their passages."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rag_windows.batching.loop import BatchLoop
from rag_windows.batching.rows import Asked
from rag_windows.benchmark.clock import synchronize
from rag_windows.benchmark.load import Load, sharing
from rag_windows.benchmark.result import Crowd
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.context import prefill_parts
from rag_windows.errors import GenerationError
from rag_windows.model import WindowedLM
from rag_windows.prefill import complete

ALONE, TOGETHER = "one by one", "together"
_ROOM = "64GiB"


def measure_crowd(
    lm: WindowedLM, questions: int, context: int, window: int, tokens: int, rounds: int
) -> list[Crowd]:
    """Answer them one by one and together, in turn; their windows are in memory before.

    Args:
        lm: without a cache.
        questions: how many.
        context: tokens of each.
        window: tokens of each window.
        tokens: new ones of each.
        rounds: of both ways, every second one in the opposite order.

    Raises:
        GenerationError: both ways gave different tokens in fp32.
    """
    asked = sharing(int(lm.model.config.vocab_size), questions, context, window)
    cache = PassageCache(_ROOM)
    warm = lm.with_cache(cache)
    took: dict[str, list[float]] = {ALONE: [], TOGETHER: []}
    try:
        for load in asked:
            warm.encode_ids(load.prefix, load.windows)
        ways = [(ALONE, _alone), (TOGETHER, _together)]
        for number in range(rounds):
            answers = {}
            for way, answer in ways if number % 2 == 0 else reversed(ways):
                synchronize()
                begun = time.perf_counter()
                answers[way] = answer(warm, asked, tokens)
                synchronize()
                took[way].append(time.perf_counter() - begun)
            # In less precision, two tokens of nearly the same logit may change places.
            if lm.model.dtype.itemsize >= 4 and answers[ALONE] != answers[TOGETHER]:
                raise GenerationError(
                    "Questions answered together got other tokens than one by one; please report "
                    "this with the command that you ran."
                )
    finally:
        cache.close()
    return [Crowd(questions, context, way, seconds, tokens) for way, seconds in took.items()]


def _options(tokens: int) -> dict[str, object]:
    return {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}


def _alone(lm: WindowedLM, asked: Sequence[Load], tokens: int) -> list[list[int]]:
    return [
        lm.generate_ids(
            lm.encode_ids(load.prefix, load.windows),
            load.query,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
        )
        for load in asked
    ]


def _together(lm: WindowedLM, asked: Sequence[Load], tokens: int) -> list[list[int]]:
    loop = BatchLoop(lm.engine.encoder, lm.engine.decoder)
    rows = []
    for load in asked:
        context = complete(prefill_parts(loop.encoder, load.prefix, load.windows, lm.method))
        row = loop.admit(Asked(context, load.query, _options(tokens)))
        if row is None:
            raise GenerationError("The batch can't take these options; please report this.")
        rows.append(row)
    while loop.rows:
        for row in loop.step():
            if row.error is not None:
                raise row.error
    return [list(row.chooser.result()) for row in rows]
