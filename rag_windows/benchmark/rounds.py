"""The rounds over one context: every way in turn, so that a noisy machine treats them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rag_windows.benchmark.clock import Timing
from rag_windows.benchmark.floor import Floor
from rag_windows.benchmark.load import Load, load
from rag_windows.benchmark.peak import Peaks
from rag_windows.benchmark.plan import COLD, DISK, MEMORY, PREFIX_KEPT, SEQUENTIAL, Place, Plan
from rag_windows.benchmark.result import Cell
from rag_windows.benchmark.shape import weight_bytes
from rag_windows.benchmark.way import Way
from rag_windows.model import WindowedLM

_WARM = (MEMORY, DISK)


def measure_ways(
    plan: Plan,
    place: Place,
    lm: WindowedLM,
    ways: Sequence[Way],
    floor: Floor,
    peaks: Peaks,
    tell: Callable[[str], None],
) -> list[Cell]:
    """Time every way in every round, every second round in the opposite order.

    Args:
        plan: of the run.
        place: what they answer over.
        lm: without a cache.
        ways: those to time.
        floor: of the machine.
        peaks: measures memory.
        tell: called with each finished round.
    """
    vocabulary = lm.model.config.vocab_size
    asked = load(vocabulary, place.context, place.window, ragged=place.ragged)
    short = load(vocabulary, 32, 16)
    took: dict[str, list[Timing]] = {way.name: [] for way in ways}
    for way in ways:
        way.run(short, 2)
        if way.name in _WARM:
            way.run(asked, 1)
    for number in range(plan.rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            if number < plan.rounds_of(way.name, place.context):
                timing = way.run(asked, plan.tokens_of(way.name, place.context))
                took[way.name].append(timing)
        tell(f"{place.context} tokens, {place.windows}: round {number + 1} of {plan.rounds}")
    weights = weight_bytes(lm.model)
    return [_cell(plan, place, asked, way, took[way.name], floor, peaks, weights) for way in ways]


def _cell(
    plan: Plan,
    place: Place,
    asked: Load,
    way: Way,
    timings: Sequence[Timing],
    floor: Floor,
    peaks: Peaks,
    weights: int,
) -> Cell:
    tokens = plan.tokens_of(way.name, place.context)
    computed = _computed(way.name, asked)
    return Cell(
        context=place.context,
        window=place.window,
        ragged=place.ragged,
        way=way.name,
        prefill_s=[one.first_s if one.encode_s is None else one.encode_s for one in timings],
        first_s=[one.first_s for one in timings],
        tokens=tokens,
        tokens_per_s=[one.tokens_per_s for one in timings],
        end_s={str(n): [one.end_s(n) for one in timings] for n in plan.tokens if n <= tokens},
        prefill_floor_s=None if computed is None else floor.prefill_s(computed),
        decode_floor_s=floor.decode_s(len(asked.prompt)),
        peak_bytes=peaks.of(way, place, asked),
        kv_bytes=len(asked.prompt) * floor.token,
        weight_bytes=weights,
    )


def _computed(way: str, asked: Load) -> int | None:
    """Tokens that a way's prefill computes; None for windows that are found."""
    whole = len(asked.prompt)
    return {
        SEQUENTIAL: whole,
        PREFIX_KEPT: whole - len(asked.prefix),
        COLD: whole - len(asked.query),
    }.get(way)
