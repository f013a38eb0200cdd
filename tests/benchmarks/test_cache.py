"""The cache's program runs, and its policy meets its goals on small versions of the traces."""

from __future__ import annotations

import random

import pytest

from benchmarks import cache
from benchmarks.cache import (
    POLICIES,
    Catalogue,
    catalogue,
    perfect_frequencies,
    replay,
    scanned,
    shifting,
    zipf,
)
from rag_windows.cache.policy import Policy

WINDOWS = catalogue(1000, seed=1)
STRANGERS = catalogue(1000, seed=2)
BOTH = Catalogue(
    WINDOWS.keys + STRANGERS.keys,
    WINDOWS.sizes + STRANGERS.sizes,
    WINDOWS.costs + STRANGERS.costs,
)
ALIKE = [1.0] * len(WINDOWS)
LIMIT = sum(WINDOWS.sizes) // 20


def test_close_to_what_perfect_frequencies_give_and_over_lru() -> None:
    trace = zipf(1000, 1.0, requests=24_000, warm_up=12_000, seed=3)
    known = perfect_frequencies(trace, WINDOWS, LIMIT, WINDOWS.costs)
    ours, lru = (replay(trace, WINDOWS, POLICIES[name](LIMIT)) for name in ("ours", "LRU"))
    assert ours.seconds > 0.95 * known
    assert ours.seconds > lru.seconds + 5
    assert ours.hits > lru.hits + 5
    hits = replay(trace, WINDOWS, POLICIES["ours, hits"](LIMIT)).hits
    assert hits > 0.95 * perfect_frequencies(trace, WINDOWS, LIMIT, ALIKE)


@pytest.mark.parametrize("together", [0, 1])
def test_a_scan_costs_less_than_two_points(together: int) -> None:
    trace = zipf(1000, 1.0, requests=10_000, warm_up=0, seed=3)
    scan, without = scanned(trace, 6000, range(1000, 2000), together)
    before, after = (replay(t, BOTH, Policy(LIMIT)) for t in (without, scan))
    assert before.hits - after.hits < 2
    assert before.seconds - after.seconds < 2


def test_a_hot_set_that_shifts_is_followed_as_fast_as_lru_does() -> None:
    trace = shifting(1000, 1500, requests=12_000, warm_up=3000, seed=4)
    limit = sum(WINDOWS.sizes) // 5
    ours, lru = (replay(trace, WINDOWS, POLICIES[name](limit)) for name in ("ours", "LRU"))
    assert ours.seconds > lru.seconds - 0.5
    assert ours.hits > lru.hits - 0.5


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_holds_more_than_the_limit(name: str) -> None:
    windows = catalogue(200, seed=7)
    limit = sum(windows.sizes) // 10
    policy, held, rng = POLICIES[name](limit), dict[str, int](), random.Random(0)
    for _ in range(3000):
        index = min(199, int(rng.paretovariate(0.6)))
        key = windows.keys[index]
        assert (key in policy) == (key in held)
        policy.touch(key)
        if key in held:
            continue
        victims = policy.admit(key, windows.sizes[index], windows.costs[index])
        held[key] = windows.sizes[index]
        for victim in [key] if victims is None else victims:
            del held[victim]
        assert sum(held.values()) <= limit


def test_perfect_frequencies_fill_the_room_by_worth_per_byte() -> None:
    trace = zipf(1000, 1.0, requests=10, warm_up=0, seed=1)
    whole = sum(WINDOWS.sizes)
    assert perfect_frequencies(trace, WINDOWS, whole, ALIKE) == pytest.approx(100)
    assert perfect_frequencies(trace, WINDOWS, 0, ALIKE) == 0
    half = perfect_frequencies(trace, WINDOWS, whole // 2, ALIKE)
    assert 85 < half < 100


def test_the_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    cache.main(["hits", "files", "forms", "--quick"])
    printed = capsys.readouterr().out
    assert "µs for each further hit" in printed
    assert "bytes a token, at least 512" in printed
    assert "| int8 |" in printed
