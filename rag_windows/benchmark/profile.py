"""Where the time of a generated token goes."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

from rag_windows.attention.native.kernel import NAME
from rag_windows.benchmark.load import Load
from rag_windows.benchmark.plan import Place
from rag_windows.benchmark.result import Step
from rag_windows.model import WindowedLM

_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
_TOKENS, _ROUNDS = 17, 3


def profile_step(lm: WindowedLM, place: Place, load: Load) -> Step:
    """Profile tokens after the first one.

    All figures are of the quickest of three rounds, under the profiler, which makes what is neither
    a linear layer nor attention look dearer than it is.

    Args:
        lm: on the CPU, with or without a cache.
        place: what stands in the result.
        load: what is read.
    """
    context = lm.encode_ids(load.prefix, load.windows)

    def generate(tokens: int) -> None:
        lm.generate_ids(context, load.query, max_new_tokens=tokens, min_new_tokens=tokens)

    generate(2)
    rounds = []
    for _ in range(_ROUNDS):
        before = _profiled(lambda: generate(1), load.context)
        after = _profiled(lambda: generate(_TOKENS), load.context)
        each = [(late - soon) / (_TOKENS - 1) for soon, late in zip(before, after, strict=True)]
        rounds.append(each)
    whole, linear, windows, tail = min(rounds)
    return Step(
        place.context,
        place.window,
        place.ragged,
        linear,
        windows,
        tail,
        whole - linear - windows - tail,
    )


def _profiled(work: Callable[[], None], windows: int) -> tuple[float, float, float, float]:
    """Milliseconds of all, linear layers, attention over so many tokens, and other attention."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        begun = time.perf_counter()
        work()
        whole = (time.perf_counter() - begun) * 1e3
    linear = over_windows = other = 0.0
    for event in seen.key_averages(group_by_input_shape=True):
        took = event.cpu_time_total / 1e3
        if event.key == "aten::linear":
            linear += took
        elif event.key == NAME or (event.key == _ATTENTION and event.input_shapes[1][2] == windows):
            # The kernel in C is asked for many keys alone, and these are the windows'.
            over_windows += took
        elif event.key == _ATTENTION:
            other += took
    return whole, linear, over_windows, other
