"""Request traces for `cache_policy.py`: who asks for which window, in which order."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All windows there are.

    Attributes:
        keys: 64 hexadecimal characters each.
        sizes: bytes.
        costs: seconds of encoding.
    """

    keys: list[str]
    sizes: list[int]
    costs: list[float]

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests, and which of them count.

    Attributes:
        name: what the table says.
        requests: indices into the catalogue.
        counted: one flag per request; those of a scan and of the warm-up don't count.
        phases: (first request, popularity per window) of each stretch of equal popularity.
    """

    name: str
    requests: list[int]
    counted: list[bool]
    phases: list[tuple[int, NDArray[np.float64]]]


def catalogue(windows: int, seed: int) -> Catalogue:
    """Windows of 24 to 1,024 tokens (lognormal, median 220) at 128 KiB a token.

    Encoding takes 2 ms and 0.1 ms a token, times a lognormal factor (sigma 0.3): machines vary.
    """
    rng = np.random.default_rng(seed)
    tokens = np.clip(rng.lognormal(math.log(220), 0.6, windows), 24, 1024).astype(np.int64)
    costs = (0.002 + 1e-4 * tokens) * np.exp(rng.normal(0.0, 0.3, windows))
    keys = [f"{seed:032x}{index:032x}" for index in range(windows)]
    return Catalogue(keys, (tokens * 131_072).tolist(), costs.tolist())


def zipf(windows: int, exponent: float, requests: int, warm_up: int, seed: int) -> Trace:
    """Independent requests; the window at rank r is asked for in proportion to r ** -exponent."""
    rng = np.random.default_rng(seed)
    popularity = _zipf(windows, exponent)[rng.permutation(windows)]
    drawn = rng.choice(windows, size=requests, p=popularity).tolist()
    counted = [index >= warm_up for index in range(requests)]
    return Trace(f"Zipf {exponent}", drawn, counted, [(0, popularity)])


def shifting(windows: int, period: int, requests: int, warm_up: int, seed: int) -> Trace:
    """Zipf 1.0; every `period` requests the top tenth swaps places with others drawn at random."""
    rng = np.random.default_rng(seed)
    base, hot = _zipf(windows, 1.0), windows // 10
    at_rank = rng.permutation(windows)
    drawn: list[int] = []
    phases = []
    for first in range(0, requests, period):
        popularity = np.empty(windows)
        popularity[at_rank] = base
        phases.append((first, popularity))
        size = min(period, requests - first)
        drawn += rng.choice(windows, size=size, p=popularity).tolist()
        others = rng.choice(np.arange(hot, windows), size=hot, replace=False)
        swapped = at_rank.copy()
        swapped[:hot], swapped[others] = at_rank[others], at_rank[:hot]
        at_rank = swapped
    counted = [index >= warm_up for index in range(requests)]
    return Trace(f"shift every {period:,}", drawn, counted, phases)


def scanned(trace: Trace, first: int, new: range, share: int) -> tuple[Trace, Trace]:
    """The trace with a scan of windows that nobody asks for again, and the same without it.

    Both count the same requests: those of the trace from the scan's start on.

    Args:
        trace: at least as long as what the scan is spread over.
        first: request before which the scan begins.
        new: the windows scanned, in their order.
        share: so many scanned windows for each ordinary request; 0 puts them all in one run.
    """
    head, tail = trace.requests[:first], trace.requests[first:]
    mixed: list[tuple[int, bool]] = []
    if share == 0:
        mixed = [(window, False) for window in new] + [(window, True) for window in tail]
    else:
        spread = len(new) // share
        for index, window in enumerate(tail):
            if index < spread:
                scan = new[index * share : (index + 1) * share]
                mixed += [(other, False) for other in scan]
            mixed.append((window, True))
    unscored = [False] * first
    name = "scan in one run" if share == 0 else f"scan, {share} per request"
    with_scan = Trace(
        name,
        head + [window for window, _ in mixed],
        unscored + [counts for _, counts in mixed],
        trace.phases,
    )
    return with_scan, Trace(name, trace.requests, unscored + [True] * len(tail), trace.phases)


def _zipf(windows: int, exponent: float) -> NDArray[np.float64]:
    weights = np.arange(1, windows + 1, dtype=np.float64) ** -exponent
    return np.asarray(weights / weights.sum(), dtype=np.float64)
