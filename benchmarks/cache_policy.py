"""Hit rates of the cache's policy beside known ones and beside what can be reached at all.

    python benchmarks/cache_policy.py [--quick]

Replays requests for windows of varying size and cost: Zipf traces, a hot set that shifts, and a
Zipf trace with a scan in it, with room for 1, 5 and 20% of all bytes. No tensors are involved.
Every cell reads "hits / seconds": percent of the counted requests that hit, and percent of the
seconds of encoding that they save. Each bound is computed once for hits and once for seconds, and
one schedule can't reach both at once. "ours" is what ships; "ours, hits" is the same with
``cost_exponent=0``, which is also what "ours" does where all windows cost the same. The first third
of a trace warms up and isn't counted. One to two minutes on one core; --quick takes a few seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.cache_bounds import ceiling, clairvoyant, perfect_frequencies
from benchmarks.cache_rivals import LRU, S3FIFO, GreedyDual, Replayed, WTinyLFU
from benchmarks.cache_traces import Catalogue, Trace, catalogue, scanned, shifting, zipf
from rag_windows.cache.policy import Policy

SHARES = (0.01, 0.05, 0.2)
POLICIES: dict[str, Callable[[int], Replayed]] = {
    "LRU": LRU,
    "LFU": partial(GreedyDual, plain=True),
    "GDSF": GreedyDual,
    "W-TinyLFU": WTinyLFU,
    "S3-FIFO": S3FIFO,
    "ours, hits": partial(Policy, cost_exponent=0.0),
    "ours": Policy,
}
BOUNDS = {
    "perfect frequencies": perfect_frequencies,
    "clairvoyant schedule": clairvoyant,
    "clairvoyant ceiling": ceiling,
}


@dataclass(frozen=True, slots=True)
class Rate:
    """Percent of the requests, and of the seconds of encoding, that the cache answered."""

    hits: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.hits:.1f} / {self.seconds:.1f}"


@dataclass(frozen=True, slots=True)
class Row:
    """One trace with one amount of room."""

    trace: str
    share: float
    rates: dict[str, Rate]
    bounds: dict[str, Rate]


def replay(trace: Trace, windows: Catalogue, policy: Replayed) -> Rate:
    """Serve all requests: what misses is encoded and offered."""
    hits = hit_seconds = asked = asked_seconds = 0.0
    for window, counts in zip(trace.requests, trace.counted, strict=True):
        key, cost = windows.keys[window], windows.costs[window]
        held = key in policy
        policy.touch(key)
        if not held:
            policy.admit(key, windows.sizes[window], cost)
        if counts:
            asked, asked_seconds = asked + 1, asked_seconds + cost
            hits, hit_seconds = hits + held, hit_seconds + held * cost
    return Rate(100 * hits / asked, 100 * hit_seconds / asked_seconds)


def compare(trace: Trace, windows: Catalogue, limit: int, share: float) -> Row:
    """All policies and bounds on one trace."""
    rates = {name: replay(trace, windows, make(limit)) for name, make in POLICIES.items()}
    alike = [1.0] * len(windows)
    bounds = {
        name: Rate(bound(trace, windows, limit, alike), bound(trace, windows, limit, windows.costs))
        for name, bound in BOUNDS.items()
    }
    print(".", end="", file=sys.stderr, flush=True)
    return Row(trace.name, share, rates, bounds)


def lost_to_scan(scan: Trace, without: Trace, windows: Catalogue, limit: int, share: float) -> Row:
    """Points that the scan costs each policy."""
    lost = {}
    for name, make in POLICIES.items():
        before = replay(without, windows, make(limit))
        after = replay(scan, windows, make(limit))
        lost[name] = Rate(before.hits - after.hits, before.seconds - after.seconds)
    print(".", end="", file=sys.stderr, flush=True)
    return Row(scan.name, share, lost, {})


def show(title: str, rows: list[Row]) -> None:
    """Print a table in Markdown."""
    names = [*rows[0].rates, *rows[0].bounds]
    print(f"\n{title}\n\n| trace | room | {' | '.join(names)} |")
    print(f"|---|---|{'---|' * len(names)}")
    for row in rows:
        cells = " | ".join(str(rate) for rate in [*row.rates.values(), *row.bounds.values()])
        print(f"| {row.trace} | {row.share:.0%} | {cells} |")


def judge(zipfs: list[Row], shifts: list[Row], scans: list[Row]) -> None:
    """Print how far the goals are met, at their worst cell."""
    print("\nWorst cell for each goal:\n")
    for name in BOUNDS:
        hits = max(1 - row.rates["ours, hits"].hits / row.bounds[name].hits for row in zipfs)
        plain = max(1 - row.rates["ours"].hits / row.bounds[name].hits for row in zipfs)
        seconds = max(1 - row.rates["ours"].seconds / row.bounds[name].seconds for row in zipfs)
        print(
            f"- Zipf, below {name}: hits {hits:.1%} (ours, hits) and {plain:.1%} (ours); "
            f"seconds {seconds:.1%} (ours)"
        )
    for name in ("ours, hits", "ours"):
        rows = [*zipfs, *shifts]
        hits = min(row.rates[name].hits - row.rates["LRU"].hits for row in rows)
        seconds = min(row.rates[name].seconds - row.rates["LRU"].seconds for row in rows)
        print(f"- {name}, points over LRU: hits {hits:+.1f}, seconds {seconds:+.1f}")
        scan = max(row.rates[name].hits for row in scans)
        scan_seconds = max(row.rates[name].seconds for row in scans)
        print(f"- {name}, points lost to a scan: hits {scan:.1f}, seconds {scan_seconds:.1f}")


def overhead(trace: Trace, windows: Catalogue, limit: int) -> None:
    """Print what a request costs in bookkeeping."""
    spent = {}
    for name in ("LRU", "ours"):
        begin = time.process_time()
        replay(trace, windows, POLICIES[name](limit))
        spent[name] = 1e6 * (time.process_time() - begin) / len(trace.requests)
    parts = ", ".join(f"{name} {micros:.1f}" for name, micros in spent.items())
    print(f"- microseconds of bookkeeping per request, the replay's own included: {parts}")


def main() -> None:
    """Replay, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few windows and short traces")
    quick = parser.parse_args().quick
    count, length = (400, 6000) if quick else (4000, 90_000)
    periods = (length // 15, length // 4)
    windows = catalogue(count, seed=1)
    strangers = catalogue(2 * count, seed=2)
    both = Catalogue(
        windows.keys + strangers.keys,
        windows.sizes + strangers.sizes,
        windows.costs + strangers.costs,
    )
    limits = [(share, int(share * sum(windows.sizes))) for share in SHARES]
    warm_up, new = length // 3, range(count, 3 * count)
    traces = [zipf(count, exponent, length, warm_up, seed=3) for exponent in (0.7, 1.0, 1.3)]
    moving = [shifting(count, period, length, warm_up, seed=4) for period in periods]
    zipfs = [compare(t, windows, limit, share) for t in traces for share, limit in limits]
    shifts = [compare(t, windows, limit, share) for t in moving for share, limit in limits]
    # The scan's harm is looked for where it is greatest: until as many requests have passed since.
    short = zipf(count, 1.0, warm_up + 2 * len(new), warm_up, seed=3)
    pairs = [scanned(short, warm_up, new, together) for together in (0, 1, 4)]
    scans = [
        lost_to_scan(scan, without, both, limit, share)
        for scan, without in pairs
        for share, limit in limits
    ]
    print(file=sys.stderr)
    print(f"{count:,} windows, {length:,} requests; hits / seconds, in percent.")
    show("Zipf", zipfs)
    show("A hot set that shifts", shifts)
    show("Points lost to a scan of twice as many windows as there are", scans)
    judge(zipfs, shifts, scans)
    overhead(traces[1], windows, limits[1][1])


if __name__ == "__main__":
    main()
