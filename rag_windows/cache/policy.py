"""Which windows to keep under a limit in bytes.

Kept is what saves most seconds of encoding per byte: a window's worth is its uses lately times the
seconds that encoding it takes, over its bytes, as in Greedy-Dual-Size-Frequency (Cherkasova, HP
Labs 1998; RAGCache, https://arxiv.org/abs/2404.12457), with two differences that
``benchmarks/cache.py policy`` shows to matter.

- Uses are counted for windows that aren't held, too, and a newcomer is admitted only if it is worth
  more than all it displaces together (TinyLFU, https://arxiv.org/abs/1512.00727, and its size-aware
  form with aggregated victims, https://arxiv.org/abs/2105.08770). A scan thus displaces nothing of
  worth.
- How fast uses are forgotten is chosen while running: small simulated caches, of keys without
  tensors, replay the requests with a short, a middle and a long memory, and the best one leads.
  The shortest is close to LRU.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
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
_ADVANTAGE = 1.02  # keeps two equally good memories from taking turns


class Policy:
    """Decides what a tier takes in and gives up; keeps no tensors and does no input or output.

    Not thread-safe: the tier's lock guards it. Deterministic: the same calls give the same victims.
    `touch` and `admit` take O(log n) for n windows held (`touch` now and then O(n), when the
    leading memory changes).

    Args:
        limit_bytes: most bytes that the windows held may have together.
        cost_exponent: worth grows with seconds to this power: 1 saves most seconds, 0 most windows.
    """

    def __init__(self, limit_bytes: int, cost_exponent: float = 1.0) -> None:
        if limit_bytes < 0:
            raise InputError(f"a cache's limit is at least 0 bytes, not {limit_bytes}.")
        if not 0.0 <= cost_exponent <= 1.0:
            raise InputError(f"cost_exponent is from 0 to 1, not {cost_exponent}.")
        self.limit_bytes = limit_bytes
        self._cost_exponent = cost_exponent
        self.clear()

    def clear(self) -> None:
        """Forget everything, the counted uses included."""
        self._held = Ranking(self.limit_bytes)
        self._trials = [Ranking(self.limit_bytes) for _ in HALF_LIVES]
        self._gains = [0.0] * len(HALF_LIVES)
        self._history = History(HALF_LIVES, REMEMBERED)
        self._leader = len(HALF_LIVES) - 1
        self._until_choice = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the windows held; never over the limit."""
        return self._held.nbytes

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def touch(self, key: str) -> None:
        """Count a request for `key`, held or not. Call it for every key asked for."""
        levels = self._history.use(key, max(len(self._held), _MIN_PERIOD))
        self._until_choice -= 1
        if self._until_choice < 0:
            self._choose()
        member = self._held.get(key)
        if member is not None:
            self._held.raise_to(key, levels[self._leader])
        for index, trial in enumerate(self._trials):
            simulated = trial.get(key)
            if simulated is not None:
                trial.raise_to(key, levels[index])
                self._gains[index] += simulated.worth
            elif member is not None:
                trial.offer(key, member.nbytes, member.log_density, levels[index])

    def admit(self, key: str, nbytes: int, cost_s: float) -> list[str] | None:
        """Offer a window that took `cost_s` seconds; one that is held already is weighed anew.

        Returns:
            Windows to give up for it, worst first, perhaps none; they are no members any more.
            None if it is not admitted, and then nothing changes: what is held stays.
        """
        nbytes = max(nbytes, 1)
        density = self._cost_exponent * _log_seconds(cost_s) - math.log2(nbytes)
        levels = self._history.levels(key)
        for trial, level in zip(self._trials, levels, strict=True):
            trial.offer(key, nbytes, density, level)
        return self._held.offer(key, nbytes, density, levels[self._leader])

    def sync(self, held: Iterable[tuple[str, int, float, int]]) -> list[str]:
        """Take over what is held, which others have changed; returns what is too much.

        Args:
            held: key, size, seconds and number of uses of each window, in the order of last use,
                oldest first.
        """
        members = {key: (nbytes, cost_s, uses) for key, nbytes, cost_s, uses in held}
        for key in self._held.members():
            if key not in members or self._held.nbytes_of(key) != max(members[key][0], 1):
                self.forget(key)
        victims: list[str] = []
        for key, (nbytes, cost_s, uses) in members.items():
            if key not in self._held:
                times = min(max(uses, 1), _MOST_USES)
                self._history.use(key, max(len(self._held), _MIN_PERIOD), times)
                given_up = self.admit(key, nbytes, cost_s)
                victims += [key] if given_up is None else given_up
        return victims

    def forget(self, key: str) -> bool:
        """A window is gone for another reason; False if it wasn't held. Its uses still count."""
        return self._held.drop(key)

    def _choose(self) -> None:
        self._until_choice = max(_LEAST_CHOICE, _CHOICE_PERIODS * len(self._held))
        best = max(range(len(self._gains)), key=self._gains.__getitem__)
        if self._gains[best] > _ADVANTAGE * self._gains[self._leader]:
            self._leader = best
            self._held.rescore(self._history.by_key(best))
        self._gains = [gain * _FADE for gain in self._gains]


def _log_seconds(cost_s: float) -> float:
    """Log2, bounded: a clock that stood still or jumped must not decide for ever."""
    return math.log2(min(max(cost_s, 1e-6), 1e6)) if cost_s == cost_s else math.log2(1e-6)


class History:
    """Decayed numbers of uses of the keys seen last, whether they are held or not.

    A use counts 1 and loses half of that every half-life. The log2 of the sum, relative to a moving
    origin (the clock), only changes when the key is used again, so a heap of such levels stays in
    order without being touched (LRFU: Lee et al., IEEE Trans. Computers 50(12), 2001).

    Half-lives are in units of the period given to `use`. Of more keys than `limit`, those not used
    for longest are forgotten.
    """

    def __init__(self, half_lives: Sequence[float], limit: int) -> None:
        self._half_lives = tuple(half_lives)
        self._limit = limit
        self._levels: OrderedDict[str, list[float]] = OrderedDict()
        self.clocks = [0.0] * len(self._half_lives)

    def __len__(self) -> int:
        return len(self._levels)

    def use(self, key: str, period: float, times: float = 1.0) -> list[float]:
        """Count a use, or so many at once, and let time pass by one; one level per half-life.

        The half-lives' unit is `period` uses of any key.
        """
        clocks = self.clocks
        for index, half_life in enumerate(self._half_lives):
            clocks[index] += 1.0 / (half_life * period)
        levels = self._levels.get(key)
        if levels is None:
            if len(self._levels) >= self._limit:
                self._levels.popitem(last=False)
            levels = [clock + math.log2(times) for clock in clocks]
            self._levels[key] = levels
            return levels
        self._levels.move_to_end(key)
        for index, clock in enumerate(clocks):
            levels[index] = clock + math.log2(times + math.exp2(levels[index] - clock))
        return levels

    def levels(self, key: str) -> Sequence[float]:
        """One level per half-life; that of a single use now if the key isn't remembered."""
        return self._levels.get(key, self.clocks)

    def by_key(self, index: int) -> dict[str, float]:
        """The levels of all keys remembered for one half-life."""
        return {key: levels[index] for key, levels in self._levels.items()}


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

    def members(self) -> list[str]:
        """Keys of all members."""
        return list(self._members)

    def nbytes_of(self, key: str) -> int:
        """A member's size."""
        return self._members[key].nbytes

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
