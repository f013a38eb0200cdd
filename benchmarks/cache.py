"""The passage cache's policy of eviction: hit rates on made-up traces.

    python benchmarks/cache.py [--quick]

They stand beside those of LRU, and of a cache that knows every window's true popularity. Cells are
"hits / seconds": percent of the counted requests that hit, and percent of the seconds of encoding
that they save. About two minutes on one core. What a hit costs stands
in benchmarks/results/passage_cache.md.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rag_windows.cache.policy import Policy
from rag_windows_eval.benchmark.result import table

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Trace:
    """Requests for windows, by their numbers, and which of them count.

    `phases` are stretches of equal popularity: the first request, and the popularity per window.
    """

    name: str
    requests: NDArray[np.int64]
    counted: NDArray[np.bool_]
    phases: list[tuple[int, Numbers]]


def catalogue(windows: int, seed: int) -> tuple[list[int], Numbers]:
    """Bytes of windows, and seconds of encoding.

    24 to 1,024 tokens (lognormal, median 220) at 128 KiB a token; 2 ms and 0.1 ms a token, times a
    lognormal factor (sigma 0.3): machines vary.
    """
    rng = np.random.default_rng(seed)
    tokens = np.clip(rng.lognormal(np.log(220), 0.6, windows), 24, 1024).astype(np.int64)
    costs: Numbers = np.exp(rng.normal(0, 0.3, windows), dtype=np.float64)
    costs *= 0.002 + 1e-4 * tokens
    return (tokens * 131_072).tolist(), costs


def zipf(windows: int, exponent: float, requests: int, warm_up: int, seed: int) -> Trace:
    """Independent requests; the window at rank r is asked for in proportion to r ** -exponent."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, windows + 1) ** -exponent
    popularity = (weights / weights.sum())[rng.permutation(windows)]
    drawn = rng.choice(windows, size=requests, p=popularity)
    return Trace(f"Zipf {exponent}", drawn, np.arange(requests) >= warm_up, [(0, popularity)])


def shifting(windows: int, period: int, requests: int, warm_up: int, seed: int) -> Trace:
    """Zipf 1.0; every `period` requests the top tenth swaps places with others drawn at random."""
    rng = np.random.default_rng(seed)
    base, hot = 1 / np.arange(1, windows + 1), windows // 10
    at_rank = rng.permutation(windows)
    drawn, phases = [], []
    for first in range(0, requests, period):
        popularity = np.empty(windows)
        popularity[at_rank] = base / base.sum()
        phases.append((first, popularity))
        drawn.append(rng.choice(windows, size=min(period, requests - first), p=popularity))
        others = rng.choice(np.arange(hot, windows), size=hot, replace=False)
        at_rank[:hot], at_rank[others] = at_rank[others], at_rank[:hot].copy()
    counted = np.arange(requests) >= warm_up
    return Trace(f"shift every {period:,}", np.concatenate(drawn), counted, phases)


def scanned(trace: Trace, first: int, new: range, share: int) -> tuple[Trace, Trace]:
    """The trace with a scan of windows that nobody asks for again, and the same without it.

    The scan begins before the request `first`, from which on both count the trace's own. There are
    `share` new windows for each ordinary request; 0: all in one run.
    """
    name = f"scan, {share} per request" if share else "scan in one run"
    places = first + (np.arange(len(new)) // share if share else np.zeros(len(new), dtype=int))
    counted = np.arange(len(trace.requests)) >= first
    without = replace(trace, name=name, counted=counted)
    requests = np.insert(trace.requests, places, new)
    return replace(without, requests=requests, counted=np.insert(counted, places, False)), without


class LRU:
    """The least recently used goes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = self._free = limit_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def touch(self, key: str) -> None:
        """A request makes a key that is held the latest one."""
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def admit(self, key: str, nbytes: int, cost_s: float) -> None:
        """Takes in everything that fits at all."""
        if nbytes <= self._limit:
            self._free -= nbytes
            self._sizes[key] = nbytes
        while self._free < 0:
            self._free += self._sizes.popitem(last=False)[1]


POLICIES: dict[str, Callable[[int], Policy | LRU]] = {
    "LRU": LRU,
    "ours, hits": partial(Policy, cost_exponent=0.0),
    "ours": Policy,
}
"""Ours is what ships; "ours, hits" values every hit alike, however long encoding took."""


def replay(trace: Trace, sizes: Sequence[int], costs: Numbers, policy: Policy | LRU) -> Numbers:
    """Percent of the requests, and of the seconds of encoding, that the cache answers.

    What misses is encoded and offered.
    """
    held = np.zeros(len(trace.requests), dtype=bool)
    keys = [f"{number:064x}" for number in range(len(sizes))]
    for at, window in enumerate(trace.requests.tolist()):
        held[at] = keys[window] in policy
        policy.touch(keys[window])
        if not held[at]:
            policy.admit(keys[window], sizes[window], float(costs[window]))
    asked = costs[trace.requests[trace.counted]]
    found = held[trace.counted]
    return np.array([100 * found.mean(), 100 * asked[found].sum() / asked.sum()])


def perfect_frequencies(trace: Trace, sizes: Sequence[int], worth: Numbers, limit: int) -> float:
    """Expected percentage of the worth when every window's true popularity is known.

    The best fixed set of windows under the limit, by popularity times worth over bytes, the last
    one in part (a fractional knapsack). For independent requests nothing that doesn't see the
    future does better in the long run. Where the popularity shifts, the set follows at no cost.
    """
    size = np.asarray(sizes, dtype=np.float64)
    ends = [first for first, _ in trace.phases[1:]] + [len(trace.requests)]
    got = whole = 0.0
    for (first, popularity), end in zip(trace.phases, ends, strict=True):
        value = popularity * worth
        order = np.argsort(-value / size)
        before = np.cumsum(size[order]) - size[order]
        parts = np.clip((limit - before) / size[order], 0.0, 1.0)
        requests = trace.counted[first:end].sum()
        got += requests * (value[order] * parts).sum()
        whole += requests * value.sum()
    return float(100 * got / whole)


def shown(rate: Numbers) -> str:
    """Hits and seconds."""
    return f"{rate[0]:.1f} / {rate[1]:.1f}"


def policy(count: int, length: int) -> None:
    """Replay all traces with room for 1, 5 and 20% of all bytes, and print the tables."""
    (sizes, costs), (more_sizes, more_costs) = catalogue(count, 1), catalogue(2 * count, 2)
    both = sizes + more_sizes, np.concatenate([costs, more_costs])
    warm_up, new = length // 3, range(count, 3 * count)
    traces = [zipf(count, exponent, length, warm_up, seed=3) for exponent in (0.7, 1.0, 1.3)]
    traces += [shifting(count, length // n, length, warm_up, seed=4) for n in (15, 4)]
    # The scan's harm is looked for where it is greatest: until as many requests have passed since.
    short = zipf(count, 1.0, warm_up + 2 * len(new), warm_up, seed=3)
    pairs = [scanned(short, warm_up, new, together) for together in (0, 1, 4)]
    reached, lost = [], []
    for share in (0.01, 0.05, 0.2):
        limit = int(share * sum(sizes))
        for trace in traces:
            rates = [replay(trace, sizes, costs, make(limit)) for make in POLICIES.values()]
            worths = (np.ones(count), costs)
            bound = [perfect_frequencies(trace, sizes, worth, limit) for worth in worths]
            rates.append(np.array(bound))
            reached.append([trace.name, f"{share:.0%}", *map(shown, rates)])
        for scan, without in pairs:
            points = [
                shown(replay(without, *both, make(limit)) - replay(scan, *both, make(limit)))
                for make in POLICIES.values()
            ]
            lost.append([scan.name, f"{share:.0%}", *points])
    print(f"{count:,} windows, {length:,} requests; hits / seconds, in percent.\n")
    print("\n".join(table(["trace", "room", *POLICIES, "perfect frequencies"], reached)))
    print("\nPoints lost to a scan of twice as many windows as there are:\n")
    print("\n".join(table(["trace", "room", *POLICIES], lost)))


def main(given: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs")
    quick = parser.parse_args(given).quick
    policy(*((400, 6000) if quick else (4000, 90_000)))


if __name__ == "__main__":
    main()
