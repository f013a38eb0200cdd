"""What no policy, or none without knowledge of the future, can beat; for `cache_policy.py`."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from benchmarks.cache_traces import Catalogue, Trace

_NEVER = 1 << 60
_SAMPLE = 32


def perfect_frequencies(
    trace: Trace, windows: Catalogue, limit: int, values: Sequence[float]
) -> float:
    """Expected percentage of the value when every window's true popularity is known.

    The best fixed set of windows under the limit, by popularity times value over bytes, the last
    one in part (a fractional knapsack). For independent requests nothing that doesn't see the
    future does better in the long run. Where the popularity shifts, the set changes with it, at no
    cost.
    """
    sizes = np.asarray(windows.sizes, dtype=np.float64)
    worth = np.asarray(values, dtype=np.float64)
    counts = np.asarray(trace.counted)
    ends = [first for first, _ in trace.phases[1:]] + [len(trace.requests)]
    got = whole = 0.0
    for (first, popularity), end in zip(trace.phases, ends, strict=True):
        value = popularity * worth
        order = np.argsort(-value / sizes)
        before = np.concatenate([[0.0], np.cumsum(sizes[order])[:-1]])
        parts = np.clip((limit - before) / sizes[order], 0.0, 1.0)
        requests = float(counts[first:end].sum())
        got += requests * float((value[order] * parts).sum())
        whole += requests * float(value.sum())
    return 100.0 * got / whole


def clairvoyant(trace: Trace, windows: Catalogue, limit: int, values: Sequence[float]) -> float:
    """Percentage of the value that a real schedule reaches which sees all requests to come.

    Belady's rule for bytes: room is made by giving up the window with the longest wait until its
    next use, times bytes over value; a newcomer that would go itself is not taken in. Of 32 members
    drawn at random the worst one goes. The best schedule possible (finding it is NP-hard) lies
    between this and `ceiling`.
    """
    rng = random.Random(0)
    upcoming = _next_uses(trace.requests)
    following: dict[int, int] = {}
    members: list[int] = []
    place: dict[int, int] = {}
    held = 0
    got = whole = 0.0

    def drop(window: int) -> None:
        nonlocal held
        held -= windows.sizes[window]
        last = members.pop()
        where = place.pop(window)
        if last != window:
            members[where], place[last] = last, where

    for now, window in enumerate(trace.requests):
        if trace.counted[now]:
            whole += values[window]
            got += values[window] if window in place else 0.0
        following[window] = upcoming[now]
        if window in place:
            if upcoming[now] == _NEVER:
                drop(window)
            continue
        if upcoming[now] == _NEVER or windows.sizes[window] > limit:
            continue
        place[window] = len(members)
        members.append(window)
        held += windows.sizes[window]
        while held > limit:
            drawn = members if len(members) <= _SAMPLE else rng.sample(members, _SAMPLE)
            drop(max(drawn, key=lambda w: (following[w] - now) * windows.sizes[w] / values[w]))
    return 100.0 * got / whole


def ceiling(trace: Trace, windows: Catalogue, limit: int, values: Sequence[float]) -> float:
    """Percentage of the value that not even the best schedule that sees the future can exceed.

    A hit holds its bytes from the request before to this one; over the counted stretch a cache has
    limit x requests to give away. The hits with the most value for that go first (the bound PFOO-L
    of Berger et al., https://arxiv.org/abs/1711.03709).
    """
    begin = trace.counted.index(True)
    last: dict[int, int] = {}
    room: list[float] = []
    gains: list[float] = []
    whole = 0.0
    for now, window in enumerate(trace.requests):
        if trace.counted[now]:
            whole += values[window]
            if window in last:
                room.append(float(windows.sizes[window]) * (now - max(last[window], begin)))
                gains.append(values[window])
        last[window] = now
    wanted, value = np.asarray(room), np.asarray(gains)
    order = np.argsort(wanted / value)
    before = np.concatenate([[0.0], np.cumsum(wanted[order])[:-1]])
    affordable = before < float(limit) * (len(trace.requests) - begin)
    return 100.0 * float(value[order][affordable].sum()) / whole


def _next_uses(requests: Sequence[int]) -> list[int]:
    upcoming = [_NEVER] * len(requests)
    seen: dict[int, int] = {}
    for index in range(len(requests) - 1, -1, -1):
        upcoming[index] = seen.get(requests[index], _NEVER)
        seen[requests[index]] = index
    return upcoming
