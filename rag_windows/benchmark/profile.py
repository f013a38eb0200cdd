"""Where the time of a generated token goes."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

from rag_windows.benchmark.load import Load
from rag_windows.benchmark.plan import Place
from rag_windows.benchmark.result import Step
from rag_windows.model import WindowedLM

_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
_TOKENS, _ROUNDS = 17, 3


def profile_step(lm: WindowedLM, place: Place, load: Load) -> Step:
    """Profile tokens after the first one; the whole is timed without the profiler.

    Each figure is the least of three rounds; the rest is what they leave of the whole.

    Args:
        lm: on the CPU, with or without a cache.
        place: what stands in the result.
        load: what is read.
    """
    context = lm.encode_ids(load.prefix, load.windows)

    def generate(tokens: int) -> None:
        lm.generate_ids(context, load.query, max_new_tokens=tokens, min_new_tokens=tokens)

    generate(2)
    wholes, parts = [], []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        generate(1)
        first = time.perf_counter()
        generate(_TOKENS)
        wholes.append((time.perf_counter() - first - (first - begun)) * 1e3)
        before = _profiled(lambda: generate(1), load.context)
        after = _profiled(lambda: generate(_TOKENS), load.context)
        parts.append([late - early for early, late in zip(before, after, strict=True)])
    linear, windows, tail = (min(some) / (_TOKENS - 1) for some in zip(*parts, strict=True))
    rest = min(wholes) / (_TOKENS - 1) - linear - windows - tail
    return Step(place.context, place.window, place.ragged, linear, windows, tail, rest)


def _profiled(work: Callable[[], None], windows: int) -> tuple[float, float, float]:
    """Milliseconds in linear layers, in attention over so many tokens, and in other attention."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        work()
    linear = over_windows = other = 0.0
    for event in seen.key_averages(group_by_input_shape=True):
        took = event.cpu_time_total / 1e3
        if event.key == "aten::linear":
            linear += took
        elif event.key == _ATTENTION and event.input_shapes[1][2] == windows:
            over_windows += took
        elif event.key == _ATTENTION:
            other += took
    return linear, over_windows, other
