"""What every tier of the cache can do: device, host memory and disk alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rag_windows.cache.entry import Entry
    from rag_windows.cache.stats import TierStats


class Tier(Protocol):
    """Entries by key, under a limit in bytes; threads may share one tier.

    A key is a sha256 in 64 lowercase hexadecimal characters. Anything else is a `CacheError`, in
    every method and before anything else is done.
    """

    def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        """Return the entries that are there and provably right; the other keys are missing.

        What can't be proved right, is expired or can't be read is a miss, never an error.
        """

    def put(self, key: str, entry: Entry) -> bool:
        """Keep an entry; False if it was refused or could not be written, never an error of I/O."""

    def remove(self, keys: Iterable[str]) -> int:
        """Drop entries; returns how many there were."""

    def clear(self) -> None:
        """Drop all entries."""

    def __contains__(self, key: str) -> bool:
        """Whether an entry is there, by what the tier knows without reading it."""

    def stats(self) -> TierStats:
        """Counters since the tier was made, and what it holds now."""
