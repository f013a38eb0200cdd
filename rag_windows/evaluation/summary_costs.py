"""Counters and seconds of one arm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from rag_windows.evaluation.record import Record, Speed
from rag_windows.evaluation.summary import Counters, SpeedBin, Times

SHORTEST = 256
"""Tokens up to which all contexts share a bin; every further bin is twice as long."""


def counters(records: Sequence[Record]) -> Counters:
    """Sums over the records."""
    return Counters(
        windows_encoded=sum(one.windows_encoded for one in records),
        windows_reused=sum(one.windows_reused for one in records),
        prompt_tokens=sum(one.prompt_tokens for one in records),
        cached_tokens=sum(one.cached_tokens for one in records),
        completion_tokens=sum(one.completion_tokens for one in records),
        left_out_passages=sum(one.left_out for one in records),
        left_out_questions=sum(one.left_out > 0 for one in records),
        errors=sum(one.error is not None for one in records),
        unfinished=sum(one.error is None and one.finish_reason == "length" for one in records),
    )


def times(records: Iterable[Record]) -> Times | None:
    """Medians over the records with an answer; None if there is none."""
    answered = [one for one in records if one.error is None]
    if not answered:
        return None
    return Times(
        encode_s=statistics.median(one.encode_s for one in answered),
        ttft_s=statistics.median(one.ttft_s for one in answered),
        total_s=statistics.median(one.total_s for one in answered),
    )


def speed_bins(speeds: Iterable[Speed]) -> tuple[SpeedBin, ...]:
    """Medians for contexts up to 256 tokens, up to 512, up to 1,024 and so on; empty bins are not.

    A context counts with the median of its rounds.
    """
    bins: dict[int, list[Speed]] = {}
    for one in speeds:
        bins.setdefault(_up_to(one.context_tokens), []).append(one)
    return tuple(
        SpeedBin(
            above=0 if up_to == SHORTEST else up_to // 2,
            up_to=up_to,
            tokens=float(statistics.median(one.context_tokens for one in found)),
            n=len(found),
            cold_s=median_s(one.cold_s for one in found),
            warm_s=median_s(one.warm_s for one in found),
        )
        for up_to, found in sorted(bins.items())
    )


def median_s(rounds: Iterable[Sequence[float]]) -> float:
    """Median over contexts of the medians of their rounds; NaN without any."""
    measured = [statistics.median(one) for one in rounds if one]
    return statistics.median(measured) if measured else math.nan


def _up_to(tokens: int) -> int:
    up_to = SHORTEST
    while up_to < tokens:
        up_to *= 2
    return up_to
