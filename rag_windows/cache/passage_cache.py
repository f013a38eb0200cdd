"""The passage cache: encoded windows in tiers, from the accelerator down to the disk."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rag_windows.cache.counters import prometheus_text
from rag_windows.cache.entry import Entry
from rag_windows.cache.entry_key import is_key
from rag_windows.cache.files import LOCKS_WORK
from rag_windows.cache.fingerprint import PROBE_BYTES
from rag_windows.cache.flight import Flights
from rag_windows.cache.keys import label_digest, salt_key
from rag_windows.cache.sizes import (
    DISK_SHARE,
    MEMORY_SHARE,
    MOST_DISK,
    Size,
    default_folder,
    free_disk,
    free_memory,
    parse_size,
)
from rag_windows.cache.stats import CacheStats
from rag_windows.cache.tiers import Counted, Tiers
from rag_windows.errors import CacheError, InputError

if TYPE_CHECKING:
    from rag_windows.cache.disk import DiskTier

STORES = ("as computed", "fp8", "int8")
MOST_LABELS = 16
"""Ids that one entry may carry: windows of equal text are one entry, whatever their ids."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """A moment between two invalidations; what was encoded in an earlier one is not kept."""

    number: int


class PassageCache:
    """Keeps the keys and values of encoded windows.

    Give one to `WindowedLM.from_pretrained(..., cache=...)`. Several models, threads and processes
    may share one folder, and several models and threads one object: a key holds all that a window
    depends on. What can't be proved right is encoded again; nothing here makes a request fail but
    keys or values that are NaN or infinite (`NonFiniteError`).

    Args:
        memory: host memory to use; None for none. Sizes are bytes, "4GiB", "500MB", or a share of
            what is free, such as "25%".
        disk: disk space to use; None for none, unless `path` is given (then 50 GiB).
        path: folder of the disk tier; by default the platform's cache folder.
        device: memory of the accelerator to use, on models that are on one; ignored on others.
        salt: secret of a tenant. Without it, what is stored under it can neither be read nor
            probed. It is set here, by the server's own code, and never taken from a request.
        store: "as computed" (exact), or "fp8" or "int8" (smaller, and not exact any more).
        ttl: seconds for which an entry may be used; None for as long as it lasts.
        probe: bytes of weights that each request reads again, to notice edits that PyTorch does
            not count; see `ModelIdentity`.

    Raises:
        InputError: a size, salt, store or time that makes no sense.
        CacheError: the folder can't be used.
    """

    def __init__(
        self,
        memory: Size | None = "4GiB",
        disk: Size | None = None,
        path: str | Path | None = None,
        device: Size | None = None,
        *,
        salt: str | bytes | None = None,
        store: str = "as computed",
        ttl: float | None = None,
        probe: Size = PROBE_BYTES,
    ) -> None:
        if store not in STORES:
            raise InputError(f"store={store!r} is unknown; choose one of {list(STORES)}.")
        if ttl is not None and not ttl > 0:
            raise InputError(f"ttl={ttl!r} must be a number of seconds above zero, or None.")
        if memory is None and disk is None and path is None and device is None:
            raise InputError("A cache needs memory, disk or device; pass cache=None for none.")
        self.store = store
        self.ttl = ttl
        self.probe_bytes = parse_size(probe, "probe")
        self.salt_key = salt_key(salt)
        self.path: Path | None = None
        if path is not None or disk is not None:
            self.path = Path(path).expanduser() if path is not None else default_folder()
        # What copies of this object for other tenants share.
        self._shared = Tiers(memory, disk, self.path, device, store)
        self.flights: Flights[Entry] = self._shared.flights

    @classmethod
    def default(cls, path: str | Path | None = None, **options: Any) -> PassageCache:
        """What ``cache=True`` means.

        A quarter of the free host memory, and of the disk a fifth of what is free, 50 GiB at most.
        Memory alone where the system has no file locks and no `path` is given.
        """
        folder = Path(path) if path is not None else default_folder()
        disk = min(MOST_DISK, int(free_disk(folder) * DISK_SHARE))
        options.setdefault("memory", max(1, int(free_memory() * MEMORY_SHARE)))
        if path is None and options["memory"] is not None and not LOCKS_WORK:
            options.pop("disk", None)
            return cls(**options)
        options.setdefault("disk", max(1, disk))
        return cls(path=folder, **options)

    @classmethod
    def of(cls, cache: PassageCache | bool | None) -> PassageCache | None:
        """What the option ``cache=`` means.

        Raises:
            InputError: it is neither a cache nor True, False or None.
        """
        if cache is None or cache is False:
            return None
        if cache is True:
            return cls.default()
        if isinstance(cache, PassageCache):
            return cache
        raise InputError(
            f"cache must be a PassageCache, True or None, not {type(cache).__name__}; for a folder "
            "write cache=PassageCache(path=...)."
        )

    def tenant(self, salt: str | bytes) -> PassageCache:
        """The same tiers and limits for another tenant: neither finds what the other stored.

        `invalidate` acts on its own tenant. Counters, `remove`, `clear`, `prune` and `verify` are
        those of all of them together.
        """
        other = copy.copy(self)
        other.salt_key = salt_key(salt)
        return other

    # What the engine calls

    @property
    def disk(self) -> DiskTier | None:
        """The tier on disk, if there is one."""
        return self._shared.disk

    @property
    def epoch(self) -> Epoch:
        """The present one; entries are stored with that in which their encoding began."""
        return Epoch(self._shared.epoch)

    def __contains__(self, key: str) -> bool:
        """Whether an entry is there, by what the tiers know without reading it."""
        return any(key in tier for tier in self._shared.all())

    def quick(self, keys: Sequence[str], device: torch.device | None = None) -> dict[str, Entry]:
        """Entries on the accelerator and in host memory."""
        return self._shared.get([*self._shared.on(device), self._shared.memory], keys)

    def slow(self, keys: Sequence[str], device: torch.device | None = None) -> dict[str, Entry]:
        """Entries that came into memory since they were missed, and those on disk.

        What comes from disk is kept in memory, too.
        """
        tiers = self._shared
        late = [key for key in keys if tiers.memory is not None and key in tiers.memory]
        found = tiers.get([tiers.memory], late)
        return found | self.from_disk([key for key in keys if key not in found], device)

    def from_disk(
        self, keys: Sequence[str], device: torch.device | None = None
    ) -> dict[str, Entry]:
        """Entries on disk; they are kept in the faster tiers, too."""
        tiers = self._shared
        epoch = tiers.epoch
        found = tiers.get([tiers.disk], keys)
        near = [tier for tier in (*tiers.on(device), tiers.memory) if tier is not None]
        for key, entry in found.items():
            tiers.put(near, key, entry, epoch)
        return found

    def keep(
        self,
        key: str,
        entry: Entry,
        epoch: Epoch,
        *,
        device: torch.device | None = None,
        ready: Callable[[], None] | None = None,
        done: Callable[[], None] | None = None,
        wait: bool = False,
    ) -> None:
        """Store an entry: at once in the fast tiers, and on disk by a thread of its own.

        Args:
            key: of the entry.
            entry: compact, on any device.
            epoch: in which its encoding began.
            device: of the model, if its windows may stay there.
            ready: waits until the entry's tensors are computed.
            done: called when the entry is where it will be, or when it will not be.
            wait: whether to wait while too much is waiting to be written, rather than not write.
        """
        self._shared.keep(key, entry, epoch.number, device, ready, done, wait=wait)

    def relabel(self, key: str, entry: Entry, labels: Collection[str], epoch: Epoch) -> None:
        """Note further ids of an entry that was found, so that `invalidate` knows them."""
        missing = [one for one in self.digests(labels) if one not in entry.labels]
        if missing and len(entry.labels) < MOST_LABELS:
            merged = (*entry.labels, *missing)[:MOST_LABELS]
            self.keep(key, replace(entry, labels=merged), epoch)

    def count(self, counted: Counted) -> None:
        """Add what a request did to the counters."""
        self._shared.count(counted)

    # What users call

    def stats(self) -> CacheStats:
        """Hits, misses and seconds saved, and per tier what it holds and did."""
        return self._shared.stats()

    def metrics(self, labels: Mapping[str, str] | None = None) -> str:
        """`stats` in Prometheus' text format; `labels` go with every line."""
        return prometheus_text(self.stats(), labels or {})

    def digests(self, ids: Collection[str] | str) -> tuple[str, ...]:
        """What entries hold in place of passage or document ids, under this tenant's salt.

        32 hexadecimal digits for each id, in the order given; for an operator's `invalidate`.
        """
        given = [ids] if isinstance(ids, str) else ids
        return tuple(label_digest(self.salt_key, one) for one in given)

    def invalidate(self, ids: Collection[str] | str, *, every_tenant: bool = False) -> int:
        """Forget this tenant's windows of passage or document ids, in this process and on disk.

        Windows that are being encoded meanwhile are not kept either. What other processes hold in
        memory stays there until they end or evict it.

        Args:
            ids: as passages had them.
            every_tenant: for operators, who know no salts: `ids` are digests (see `digests`) or
                entries (names of their files, without the ending), whosever they are.

        Returns:
            How many windows were forgotten.
        """
        if not every_tenant:
            return self._shared.forget(self.digests(ids))
        given = [ids] if isinstance(ids, str) else list(ids)
        for one in given:
            if not is_key(one) and not re.fullmatch("[0-9a-f]{32}", one):
                raise InputError(
                    f"{one!r:.80} is neither a digest (32 hexadecimal digits, as from digests()) "
                    "nor an entry (64, the name of its file); an id has to be invalidated under "
                    "its tenant's salt."
                )
        return self._shared.forget(given)

    def remove(self, keys: Collection[str]) -> None:
        """Forget entries by their keys, in this process and on disk."""
        self._shared.remove(keys)

    def clear(self) -> None:
        """Forget all windows of all tenants and models, in this process and on disk."""
        self._shared.clear()

    def prune(self) -> int:
        """Drop entries whose time is up; returns how many."""
        now = time.time()
        return sum(tier.prune(now) for tier in self._shared.all())

    def verify(self) -> tuple[int, int]:
        """Read every entry on disk and put aside those that can't be proved right.

        Returns:
            How many were read, and how many of them were put aside.

        Raises:
            CacheError: there is no disk tier.
        """
        if self.disk is None:
            raise CacheError("This cache has no disk tier, so there is nothing to verify.")
        self.flush()
        return self.disk.verify()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was encoded is written; False if that took too long."""
        return self._shared.writer.flush(timeout_s)

    def close(self) -> None:
        """Write what waits and close the tiers; afterwards nothing is found or kept."""
        self._shared.close()

    def __enter__(self) -> PassageCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
