"""Which windows to keep under a limit in bytes.

Kept is what saves most seconds of encoding per byte: a window's worth is its uses lately times the
seconds that encoding it takes, over its bytes, as in Greedy-Dual-Size-Frequency (Cherkasova, HP
Labs 1998; RAGCache, https://arxiv.org/abs/2404.12457). Uses are counted for windows that aren't
held, too, and a newcomer must be worth more than all it displaces (TinyLFU, size-aware:
https://arxiv.org/abs/1512.00727, https://arxiv.org/abs/2105.08770). docs/passage_cache.md has the
measurements.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from rag_windows.errors import InputError

HALF_LIFE = 8.0
"""After how many uses a use counts half, in units of the number of windows held."""

REMEMBERED = 32_768
"""Windows whose uses are remembered beside those held; about 5 MB when full."""

_MIN_PERIOD = 16  # windows; below, the half-life would be shorter than one request
_MOST_USES = 1 << 20


@dataclass(slots=True)
class _Member:
    """A window that is held: its bytes, log2 of what one use is worth per byte, and its score.

    The score is log2 of its decayed number of uses, plus the density; the lowest goes first.
    """

    nbytes: int
    density: float
    score: float


class Policy:
    """Decides what a tier takes in and gives up; keeps no tensors. Not thread-safe, deterministic.

    A use counts 1 and loses half of that every half-life. The log2 of the sum, relative to a moving
    origin (the clock), only changes when the key is used again, so a heap of such levels stays in
    order without being touched (LRFU: Lee et al., IEEE Trans. Computers 50(12), 2001). A use only
    raises a score, so the heap may hold an older, lower one: what comes up first is checked against
    the member, and put back if it has risen since.

    Args:
        limit_bytes: most bytes that the windows held may have together.
        cost_exponent: worth grows with seconds to this power: 1 saves most seconds, 0 most windows.
    """

    def __init__(self, limit_bytes: int, cost_exponent: float = 1.0) -> None:
        if limit_bytes < 0:
            raise InputError(f"a cache's limit is at least 0 bytes, not {limit_bytes}.")
        self._limit_bytes = limit_bytes
        self._cost_exponent = cost_exponent
        self.clear()

    def clear(self) -> None:
        """Forget everything, the counted uses included."""
        self.nbytes = 0
        self._members: dict[str, _Member] = {}
        self._heap: list[tuple[float, str]] = []
        self._levels: OrderedDict[str, float] = OrderedDict()
        self._clock = 0.0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, key: object) -> bool:
        return key in self._members

    def touch(self, key: str, times: int = 1) -> None:
        """Count a request for `key`, held or not. Call it for every key asked for."""
        self._clock += 1.0 / (HALF_LIFE * max(len(self), _MIN_PERIOD))
        before = self._levels.pop(key, -math.inf)
        if len(self._levels) >= REMEMBERED:
            self._levels.popitem(last=False)
        level = self._clock + math.log2(times + math.exp2(before - self._clock))
        self._levels[key] = level
        member = self._members.get(key)
        if member is not None:
            # Uses of what was long unused may be forgotten; the heap needs rising scores.
            member.score = max(member.score, level + member.density)

    def admit(self, key: str, nbytes: int, cost_s: float) -> list[str] | None:
        """Offer a window that took `cost_s` seconds; one that is held already is weighed anew.

        Returns:
            Windows to give up for it, worst first, perhaps none; they are no members any more.
            None if it is too large, or one of those is worth as much per byte, or all of them
            together as much as it; then nothing changes.
        """
        nbytes = max(nbytes, 1)
        # Bounded: a clock that stood still or jumped must not decide for ever.
        seconds = min(max(cost_s, 1e-6), 1e6) if cost_s == cost_s else 1e-6
        density = self._cost_exponent * math.log2(seconds) - math.log2(nbytes)
        newcomer = _Member(nbytes, density, self._levels.get(key, self._clock) + density)
        before = self._pop(key)
        victims: dict[str, _Member] = {}
        lost = 0.0
        admitted = nbytes <= self._limit_bytes
        while admitted and self.nbytes + nbytes > self._limit_bytes:
            worst, other = heapq.heappop(self._heap)
            member = self._members.get(other)
            if member is None or member.score < worst:
                continue  # left over from a member that is gone or was weighed anew
            if member.score > worst:
                heapq.heappush(self._heap, (member.score, other))
                continue
            victims[other] = member
            self._pop(other)
            lost += member.nbytes * math.exp2(min(0.0, worst - newcomer.score))
            admitted = worst < newcomer.score and lost < nbytes
        if admitted:
            self._place(key, newcomer)
            return list(victims)
        if before is not None:
            victims[key] = before
        for other, member in victims.items():
            self._place(other, member)
        return None

    def sync(self, held: Iterable[tuple[str, int, float, int]]) -> list[str]:
        """Take over what is held, which others have changed; returns what is too much.

        Args:
            held: key, size, seconds and number of uses of each window, in the order of last use,
                oldest first.
        """
        members = {key: rest for key, *rest in held}
        for key, member in list(self._members.items()):
            if key not in members or member.nbytes != max(members[key][0], 1):
                self.forget(key)
        victims: list[str] = []
        for key in [key for key in members if key not in self]:
            nbytes, cost_s, uses = members[key]
            self.touch(key, min(max(int(uses), 1), _MOST_USES))
            given_up = self.admit(key, int(nbytes), cost_s)
            victims += [key] if given_up is None else given_up
        return victims

    def forget(self, key: str) -> bool:
        """A window is gone for another reason; False if it wasn't held. Its uses still count."""
        return self._pop(key) is not None

    def _pop(self, key: str) -> _Member | None:
        member = self._members.pop(key, None)
        self.nbytes -= 0 if member is None else member.nbytes
        return member

    def _place(self, key: str, member: _Member) -> None:
        self._members[key] = member
        self.nbytes += member.nbytes
        heapq.heappush(self._heap, (member.score, key))
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(member.score, key) for key, member in self._members.items()]
            heapq.heapify(self._heap)
