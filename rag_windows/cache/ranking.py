"""The members of one cache in the order in which they would be given up."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Member:
    """One entry's bookkeeping.

    Attributes:
        nbytes: its size; at least 1.
        log_density: log2 of what one use of it is worth per byte.
        score: log2 of its decayed number of uses, plus `log_density`; the lowest goes first.
    """

    nbytes: int
    log_density: float
    score: float

    @property
    def worth(self) -> float:
        """What one use of it is worth."""
        return self.nbytes * math.exp2(self.log_density)


class Ranking:
    """Members under a limit in bytes; finding victims takes O(log n), a use O(1).

    A use only raises a score, so the heap may hold an older, lower one: what comes up first is
    checked against the member and put back if it has risen since. Equal scores go by key, so equal
    histories give equal victims.

    Args:
        limit_bytes: most bytes that the members may have together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._members: dict[str, Member] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, key: object) -> bool:
        return key in self._members

    def get(self, key: str) -> Member | None:
        """A member's bookkeeping; None if the key is no member."""
        return self._members.get(key)

    def raise_to(self, key: str, level: float) -> None:
        """Note a member's use: `level` is log2 of its uses."""
        member = self._members[key]
        # Uses of a key that was long unused may have been forgotten; the heap needs rising scores.
        member.score = max(member.score, level + member.log_density)

    def offer(self, key: str, nbytes: int, log_density: float, level: float) -> list[str] | None:
        """Take in a newcomer, or a member with a new size or worth, if it is worth its room.

        Returns:
            What was dropped for it, worst first; None (and nothing changed) if it is too large, if
            one of those is worth as much per byte, or all of them together as much as it.
        """
        before = self._members.pop(key, None)
        if before is not None:
            self.nbytes -= before.nbytes
        victims = self._make_room(nbytes, level + log_density)
        if victims is None:
            if before is not None:
                self._place(key, before)
            return None
        self._place(key, Member(nbytes, log_density, level + log_density))
        return victims

    def drop(self, key: str) -> bool:
        """Let a key go; False if it was no member."""
        member = self._members.pop(key, None)
        if member is None:
            return False
        self.nbytes -= member.nbytes
        return True

    def _make_room(self, nbytes: int, score: float) -> list[str] | None:
        if nbytes > self.limit_bytes:
            return None
        free, lost = self.limit_bytes - self.nbytes, 0.0
        victims: list[tuple[str, Member]] = []
        while free < nbytes:
            worst, key = heapq.heappop(self._heap)
            member = self._members.get(key)
            if member is None or member.score < worst:
                continue  # left over from a member that is gone or was weighed anew
            if member.score > worst:
                heapq.heappush(self._heap, (member.score, key))
                continue
            # Out at once: the heap may name a key that was weighed anew twice.
            victims.append((key, self._members.pop(key)))
            free += member.nbytes
            lost += member.nbytes * math.exp2(min(0.0, worst - score))
            if worst >= score or lost >= nbytes:
                for key, member in victims:
                    self._members[key] = member
                    heapq.heappush(self._heap, (member.score, key))
                return None
        self.nbytes = self.limit_bytes - free
        return [key for key, _ in victims]

    def _place(self, key: str, member: Member) -> None:
        self._members[key] = member
        self.nbytes += member.nbytes
        if len(self._heap) > 2 * len(self._members) + 64:
            self._rebuild()
        else:
            heapq.heappush(self._heap, (member.score, key))

    def rescore(self, levels: Mapping[str, float]) -> None:
        """Rank all members anew; those without a level go first."""
        for key, member in self._members.items():
            member.score = levels.get(key, -math.inf) + member.log_density
        self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(member.score, key) for key, member in self._members.items()]
        heapq.heapify(self._heap)
