"""Which windows to keep under a limit in bytes; measured in benchmarks/results/passage_cache.md.

A window's worth is its uses lately times the seconds that encoding it takes, over its bytes, as in
Greedy-Dual-Size-Frequency (Cherkasova, HP Labs 1998; RAGCache, https://arxiv.org/abs/2404.12457).
Uses are counted for windows that aren't held, too, and a newcomer must be worth more than all it
displaces (TinyLFU, size-aware: https://arxiv.org/abs/1512.00727, https://arxiv.org/abs/2105.08770).
Simulated caches, of keys without tensors, replay the requests with a short, a middle and a long
memory of uses, and the best one leads.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from rag_windows.errors import InputError

HALF_LIVES = (0.5, 6.0, 64.0)
"""After how many uses a use counts half, in units of the number of windows held."""

REMEMBERED = 32_768
"""Windows whose uses are remembered beside those held; about 10 MB when full."""

_MIN_PERIOD = 16  # windows; below, half-lives would be shorter than one request
_MOST_USES = 1 << 20
_LEAST_CHOICE, _CHOICE_PERIODS = 512, 2  # requests between two choices; per window held
_FADE = 0.5  # what earlier choices' evidence still counts
_ADVANTAGE = 1.02  # avoids switching between two equally good half-lives


class Policy:
    """Decides what a tier takes in and gives up; keeps no tensors. Not thread-safe, deterministic.

    A use counts 1 and loses half of that every half-life. The log2 of the sum, relative to a moving
    origin (the clock), only changes when the key is used again, so a heap of such levels stays in
    order without being touched (LRFU: Lee et al., IEEE Trans. Computers 50(12), 2001).

    Args:
        limit_bytes: most bytes that the windows held may have together.
        cost_exponent: worth grows with seconds to this power: 1 saves most seconds, 0 most windows.
    """

    def __init__(self, limit_bytes: int, cost_exponent: float = 1.0) -> None:
        if limit_bytes < 0:
            raise InputError(f"A cache's limit must be at least 0 bytes, not {limit_bytes}.")
        self.limit_bytes = limit_bytes
        self._cost_exponent = cost_exponent
        self.clear()

    def clear(self) -> None:
        """Forget everything, the counted uses included."""
        self._held = _Ranking(self.limit_bytes)
        self._trials = [_Ranking(self.limit_bytes) for _ in HALF_LIVES]
        self._gains = [0.0 for _ in HALF_LIVES]
        self._clocks = [0.0 for _ in HALF_LIVES]
        self._levels: OrderedDict[str, list[float]] = OrderedDict()
        self._leader = len(HALF_LIVES) - 1
        self._until_choice = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the windows held; never over the limit."""
        return self._held.nbytes

    def __len__(self) -> int:
        return len(self._held.members)

    def __contains__(self, key: object) -> bool:
        return key in self._held.members

    def touch(self, key: str) -> None:
        """Count a request for `key`, held or not. Call it for every key asked for."""
        levels = self._use(key, 1)
        self._until_choice -= 1
        if self._until_choice < 0:
            self._choose()
        member = self._held.members.get(key)
        if member is not None:
            member.used(levels[self._leader])
        for index, trial in enumerate(self._trials):
            simulated = trial.members.get(key)
            if simulated is not None:
                simulated.used(levels[index])
                self._gains[index] += simulated.nbytes * math.exp2(simulated.density)
            elif member is not None:
                trial.offer(key, member.nbytes, member.density, levels[index])

    def admit(self, key: str, nbytes: int, cost_s: float) -> list[str] | None:
        """Offer a window that took `cost_s` seconds; one that is held already is rated again.

        Returns windows to give up for it, worst first, which are no members any more; None if it is
        not admitted, and then nothing changes.
        """
        nbytes = max(nbytes, 1)
        # Bounded: a clock that stood still or jumped must not decide for ever.
        seconds = min(max(cost_s, 1e-6), 1e6) if cost_s == cost_s else 1e-6
        density = self._cost_exponent * math.log2(seconds) - math.log2(nbytes)
        levels = self._levels.get(key, self._clocks)
        for trial, level in zip(self._trials, levels, strict=True):
            trial.offer(key, nbytes, density, level)
        return self._held.offer(key, nbytes, density, levels[self._leader])

    def sync(self, held: Iterable[tuple[str, int, float, int]]) -> list[str]:
        """Take over what is held, which others have changed; returns what is too much.

        `held` is key, size, seconds and number of uses of each window, the latest used last.
        """
        members = {key: rest for key, *rest in held}
        for key, member in list(self._held.members.items()):
            if key not in members or member.nbytes != max(members[key][0], 1):
                self.forget(key)
        victims: list[str] = []
        for key in [key for key in members if key not in self]:
            nbytes, cost_s, uses = members[key]
            self._use(key, min(max(int(uses), 1), _MOST_USES))
            given_up = self.admit(key, int(nbytes), cost_s)
            victims += [key] if given_up is None else given_up
        return victims

    def forget(self, key: str) -> bool:
        """A window was removed otherwise; False if it wasn't held. Its uses still count."""
        return self._held.pop(key) is not None

    def _use(self, key: str, times: int) -> list[float]:
        """Count so many uses at once and let time pass by one; one level per half-life."""
        period = max(len(self), _MIN_PERIOD)
        clocks = [
            clock + 1.0 / (half_life * period)
            for clock, half_life in zip(self._clocks, HALF_LIVES, strict=True)
        ]
        before = self._levels.pop(key, None)
        if before is None:
            levels = [clock + math.log2(times) for clock in clocks]
            if len(self._levels) >= REMEMBERED:
                self._levels.popitem(last=False)
        else:
            levels = [
                clock + math.log2(times + math.exp2(level - clock))
                for level, clock in zip(before, clocks, strict=True)
            ]
        self._clocks, self._levels[key] = clocks, levels
        return levels

    def _choose(self) -> None:
        self._until_choice = max(_LEAST_CHOICE, _CHOICE_PERIODS * len(self))
        best = max(range(len(self._gains)), key=self._gains.__getitem__)
        if self._gains[best] > _ADVANTAGE * self._gains[self._leader]:
            self._leader = best
            for key, member in self._held.members.items():
                levels = self._levels.get(key)  # those whose uses are not remembered go first
                member.score = member.density + (levels[best] if levels else -math.inf)
            self._held.rebuild()
        self._gains = [gain * _FADE for gain in self._gains]


@dataclass(slots=True)
class _Member:
    """A window's bytes, log2 of a use's worth per byte, and that plus log2 of its uses."""

    nbytes: int
    density: float
    score: float

    def used(self, level: float) -> None:
        # Uses of a key that was long unused may have been forgotten; the heap needs rising scores.
        self.score = max(self.score, level + self.density)


class _Ranking:
    """Members under a limit in bytes, the one of the lowest score first.

    A use only raises a score, so the heap may hold an older, lower one: what comes up first is
    checked against the member and put back if it has risen since.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.nbytes = 0
        self.members: dict[str, _Member] = {}
        self._heap: list[tuple[float, str]] = []

    def offer(self, key: str, nbytes: int, density: float, level: float) -> list[str] | None:
        """Take in a newcomer, or a member with a new size or worth, if it is worth its bytes.

        Returns what was dropped for it, worst first; None (and nothing changed) if it is too large,
        if one of those is worth as much per byte, or all of them together as much as it.
        """
        newcomer = _Member(nbytes, density, level + density)
        before = self.pop(key)
        victims: list[tuple[str, _Member]] = []
        lost = 0.0
        admitted = nbytes <= self._limit_bytes
        while admitted and self.nbytes + nbytes > self._limit_bytes:
            worst, other = heapq.heappop(self._heap)
            member = self.members.get(other)
            if member is None or member.score < worst:
                continue  # left over from a member that is gone or was rated again
            if member.score > worst:
                heapq.heappush(self._heap, (member.score, other))
                continue
            # Removed at once: the heap may hold a key that was rated again twice.
            self.pop(other)
            victims.append((other, member))
            lost += member.nbytes * math.exp2(min(0.0, worst - newcomer.score))
            admitted = worst < newcomer.score and lost < nbytes
        if admitted:
            self._place(key, newcomer)
            return [other for other, _ in victims]
        for other, member in (*victims, *([(key, before)] if before else [])):
            self._place(other, member)
        return None

    def pop(self, key: str) -> _Member | None:
        member = self.members.pop(key, None)
        self.nbytes -= 0 if member is None else member.nbytes
        return member

    def rebuild(self) -> None:
        self._heap = [(member.score, key) for key, member in self.members.items()]
        heapq.heapify(self._heap)

    def _place(self, key: str, member: _Member) -> None:
        self.members[key] = member
        self.nbytes += member.nbytes
        heapq.heappush(self._heap, (member.score, key))
        if len(self._heap) > 2 * len(self.members) + 64:
            self.rebuild()
