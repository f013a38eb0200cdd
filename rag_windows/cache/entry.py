"""What the cache keeps for one window."""

from __future__ import annotations

from dataclasses import dataclass

from rag_windows.kv import Window


@dataclass(frozen=True, slots=True)
class Entry:
    """One encoded window with what the tiers need to know about it.

    Its tensors are never written to after it was made: several requests read them at once.

    Attributes:
        window: the keys and values; on any device. One that was on disk has 0 for every token id,
            as files do not hold them.
        cost_s: seconds that encoding it took, its share of the batch that it was encoded in.
        labels: digests of the document and passage ids that it belongs to, for `invalidate`.
        created: unix time, in seconds, at which it was encoded.
        expires: unix time from which it may no longer be used; None if never.
    """

    window: Window
    cost_s: float
    labels: tuple[str, ...]
    created: float
    expires: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all its keys and values."""
        return sum(t.nbytes for t in self.window.keys) + sum(t.nbytes for t in self.window.values)

    def expired(self, now: float) -> bool:
        """Whether it may no longer be used at unix time `now`."""
        return self.expires is not None and now >= self.expires
