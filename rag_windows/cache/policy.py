"""Which windows to keep under a limit in bytes.

Kept is what saves most seconds of encoding per byte: a window's worth is its uses lately times the
seconds that encoding it takes, over its bytes, as in Greedy-Dual-Size-Frequency (Cherkasova, HP
Labs 1998; RAGCache, https://arxiv.org/abs/2404.12457), with two differences that
``benchmarks/cache_policy.py`` shows to matter.

- Uses are counted for windows that aren't held, too, and a newcomer is admitted only if it is worth
  more than all it displaces together (TinyLFU, https://arxiv.org/abs/1512.00727, and its size-aware
  form with aggregated victims, https://arxiv.org/abs/2105.08770). A scan thus displaces nothing of
  worth.
- How fast uses are forgotten is chosen while running: small simulated caches, of keys without
  tensors, replay the requests with a short, a middle and a long memory, and the best one leads.
  The shortest is close to LRU.
"""

from __future__ import annotations

import math

from rag_windows.cache.history import History
from rag_windows.cache.ranking import Ranking
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

    Raises:
        InputError: if a number is outside its domain.
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
        """Offer a window.

        Args:
            key: its name. One that is held already is weighed anew.
            nbytes: its size.
            cost_s: seconds that encoding it took.

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

    def restore(
        self, key: str, nbytes: int, cost_s: float, uses: int = 1, last_used: float = 0.0
    ) -> list[str] | None:
        """Offer a window that an earlier process left behind.

        Call it in the order of last use, oldest first.

        Args:
            key: its name.
            nbytes: its size.
            cost_s: seconds that encoding it took.
            uses: how often it was used, if that is known.
            last_used: not read; the order of the calls says it.

        Returns:
            As `admit`; what it names, or `key` itself if it is None, is to be given up.
        """
        self._history.use(key, max(len(self._held), _MIN_PERIOD), min(max(uses, 1), _MOST_USES))
        return self.admit(key, nbytes, cost_s)

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
