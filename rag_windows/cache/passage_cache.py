"""The passage cache: encoded windows in tiers, from the accelerator down to the disk."""

from __future__ import annotations

import copy
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from rag_windows.cache.codec import Entry, codec_named
from rag_windows.cache.counters import CacheStats, prometheus_text
from rag_windows.cache.disk import MOST_LABELS, DiskTier
from rag_windows.cache.fingerprint import PROBE_BYTES
from rag_windows.cache.keys import is_key, label_digest, salt_key
from rag_windows.cache.locks import LOCKS_WORK
from rag_windows.cache.memory import MemoryTier
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
from rag_windows.cache.transfer import to_host
from rag_windows.cache.writer import Writer
from rag_windows.errors import CacheError, InputError, NonFiniteError
from rag_windows.threads import Lock, in_children

DEFAULT_DISK = "50GiB"
"""Taken where a path is given but no size."""

_WAITING_SHARE = 0.25
_LEAST_WAITING = 256 << 20
"""Bytes that may wait to be written: a share of the memory tier, and so many at least."""

Tier = MemoryTier | DiskTier

T = TypeVar("T")


class Counted(NamedTuple):
    """What one request did; see `CacheStats`."""

    hits: int = 0
    misses: int = 0
    joined: int = 0
    cached_tokens: int = 0
    seconds_saved: float = 0.0
    seconds_spent: float = 0.0


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
        store: "as computed" (exact), or "int8" (smaller, and not exact any more).
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
        codec_named(store)
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
        self._shared = _Tiers(memory, disk, self.path, device, store)
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
        return self._shared.from_disk(keys, device)

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

    def relabel(self, key: str, entry: Entry, labels: Collection[str]) -> None:
        """Note further ids of an entry that was found, so that `invalidate` knows them."""
        missing = [one for one in self.digests(labels) if one not in entry.labels]
        if missing and len(entry.labels) < MOST_LABELS:
            self._shared.add_labels(key, missing[: MOST_LABELS - len(entry.labels)])

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


class Flights(Generic[T]):
    """Claims on keys: the first thread to claim one leads, the others follow it.

    A leader must land every claim once, and retire those that landed with a value; a follower that
    gets none (the leader failed, was cancelled, or took too long) does the work itself. Leading
    before following keeps two requests that wait for parts of each other from waiting for ever.
    """

    def __init__(self) -> None:
        self.after_fork()
        in_children(self)

    def after_fork(self) -> None:
        """What others were leading never lands in a child."""
        self._lock = threading.Lock()
        self._flying: dict[str, Future[T | None]] = {}

    def claim(self, keys: Iterable[str]) -> tuple[list[str], dict[str, Future[T | None]]]:
        """Claim keys.

        Returns:
            Those that this thread leads now, and those that another thread leads already.
        """
        mine: list[str] = []
        theirs: dict[str, Future[T | None]] = {}
        with self._lock:
            for key in dict.fromkeys(keys):
                flight = self._flying.get(key)
                if flight is None:
                    self._flying[key] = Future()
                    mine.append(key)
                else:
                    theirs[key] = flight
        return mine, theirs

    def land(self, key: str, value: T | None) -> None:
        """Tell followers what came of a claim; None tells them to do it themselves.

        With a value the claim stays until it is retired, so that whoever comes before the value
        can be found elsewhere gets it from here. Without one it ends at once.
        """
        with self._lock:
            flying = self._flying
            flight = flying.get(key) if value is not None else flying.pop(key, None)
        if flight is not None:  # else the parent's, in a child that was forked on the way
            flight.set_result(value)

    def retire(self, key: str) -> None:
        """End a claim that landed with a value: it is stored now, or never will be."""
        with self._lock:
            self._flying.pop(key, None)


class _Tiers:
    """The tiers and counters that the caches of several tenants share."""

    def __init__(
        self,
        memory: Size | None,
        disk: Size | None,
        path: Path | None,
        device: Size | None,
        store: str,
    ) -> None:
        self.flights: Flights[Entry] = Flights()
        self.epoch = 0
        self._store = store
        self._lock = Lock()
        self._counted = Counted()
        self._device_bytes = None if device is None else parse_size(device, "device")
        self._devices: dict[torch.device, MemoryTier] = {}
        self.memory: MemoryTier | None = None
        self.disk: DiskTier | None = None
        waiting = _LEAST_WAITING
        if memory is not None:
            limit = parse_size(memory, "memory", free_memory())
            self.memory = MemoryTier(limit, store, pin=torch.cuda.is_available())
            waiting = max(waiting, int(limit * _WAITING_SHARE))
        if path is not None:
            limit = parse_size(DEFAULT_DISK if disk is None else disk, "disk", free_disk(path))
            self.disk = DiskTier(path, limit, store)
        self.writer = Writer(waiting)

    def on(self, device: torch.device | None) -> list[MemoryTier]:
        """The tier on an accelerator, if one is wanted there."""
        if device is None or device.type == "cpu" or self._device_bytes is None:
            return []
        with self._lock:
            if device not in self._devices:
                self._devices[device] = MemoryTier(self._device_bytes, self._store, device=device)
            return [self._devices[device]]

    def all(self) -> Iterator[Tier]:
        """Every tier, fastest first."""
        yield from self._devices.values()
        yield from (tier for tier in (self.memory, self.disk) if tier is not None)

    def get(self, tiers: Sequence[Tier | None], keys: Sequence[str]) -> dict[str, Entry]:
        """Look for keys in tiers, one after the other."""
        now = time.time()
        found: dict[str, Entry] = {}
        for tier in tiers:
            missing = [key for key in keys if key not in found]
            if tier is not None and missing:
                found |= tier.get_many(missing)
        return {key: entry for key, entry in found.items() if not entry.expired(now)}

    def from_disk(self, keys: Sequence[str], device: torch.device | None) -> dict[str, Entry]:
        """See `PassageCache.from_disk`."""
        disk, epoch = self.disk, self.epoch
        found = self.get([disk], keys)
        near = self._near(device)
        for key, entry in found.items():
            self.put(near, key, entry, epoch)
        if disk is not None and found:
            more = disk.with_more_labels(found) if near else []

            def look(do: bool) -> None:
                if do and disk.many_uses:
                    disk.write_uses()
                for key, labels in disk.labels(more).items() if do and more else ():
                    for tier in near:
                        tier.add_labels(key, labels)

            if more or disk.many_uses:
                self.writer.submit(look, 0)
        return found

    def add_labels(self, key: str, labels: Sequence[str]) -> None:
        """Give an entry more labels, wherever it is."""
        for tier in (*self._devices.values(), self.memory):
            if tier is not None:
                tier.add_labels(key, labels)
        disk = self.disk
        if disk is not None:
            self.writer.submit(lambda do: disk.add_labels(key, labels) if do else None, 0)

    def keep(
        self,
        key: str,
        entry: Entry,
        epoch: int,
        device: torch.device | None,
        ready: Callable[[], None] | None,
        done: Callable[[], None] | None,
        *,
        wait: bool,
    ) -> None:
        """See `PassageCache.keep`."""
        on_host = all(tensor.device.type == "cpu" for tensor in entry.window.keys)
        self.put(self._near(device) if on_host else self.on(device), key, entry, epoch)
        far: list[Tier] = [] if self.disk is None else [self.disk]
        if not on_host and self.memory is not None:
            far.insert(0, self.memory)

        def write(do: bool) -> None:
            try:
                if do and self.epoch == epoch:
                    if ready is not None:
                        ready()
                    self.put(far, key, replace(entry, window=to_host(entry.window)), epoch)
            finally:
                if done is not None:
                    done()

        if far:
            self.writer.submit(write, entry.nbytes, wait=wait)
        elif done is not None:
            done()

    def put(self, tiers: Sequence[Tier], key: str, entry: Entry, epoch: int) -> None:
        """Store an entry in some tiers, unless something was forgotten since the epoch."""
        if self.epoch != epoch:
            return
        for tier in tiers:
            with suppress(NonFiniteError):  # a lossy form that overflows is not kept
                tier.put(key, entry)
        if self.epoch != epoch:  # what was invalidated meanwhile must not come back
            for tier in tiers:
                tier.remove([key])

    def forget(self, named: Collection[str]) -> int:
        """Forget entries that are named by their keys or by a label; see `PassageCache`."""

        def drop() -> set[str]:
            tiers = list(self.all())
            keys = {one for one in named if is_key(one) and any(one in tier for tier in tiers)}
            for tier in tiers:
                keys.update(tier.keys_with(named))
            for tier in tiers:
                tier.remove(keys)
            return keys

        return len(self._drop(drop))

    def remove(self, keys: Collection[str]) -> None:
        """See `PassageCache.remove`."""

        def drop() -> set[str]:
            for tier in self.all():
                tier.remove(keys)
            return set()

        self._drop(drop)

    def clear(self) -> None:
        """See `PassageCache.clear`."""

        def drop() -> set[str]:
            for tier in self.all():
                tier.clear()
            return set()

        self._drop(drop)

    def _drop(self, drop: Callable[[], set[str]]) -> set[str]:
        """Drop entries from every tier, for good; returns the keys that were dropped.

        Twice: a read that begins in the midst of the first round may find an entry that is still
        on disk, and put it into a fast tier that is through already. The second round's epoch
        stops such a read, and the round takes out what it has put there before.
        """
        dropped: set[str] = set()
        for _ in range(2):
            with self._lock:
                self.epoch += 1
            dropped |= drop()
        return dropped

    def _near(self, device: torch.device | None) -> list[MemoryTier]:
        """The tiers that take what is in host memory, fastest first."""
        return [tier for tier in (*self.on(device), self.memory) if tier is not None]

    def close(self) -> None:
        """See `PassageCache.close`."""
        self.writer.close()
        for tier in self.all():
            tier.close()

    def count(self, counted: Counted) -> None:
        """Add to the counters."""
        with self._lock:
            self._counted = Counted(
                *(before + more for before, more in zip(self._counted, counted, strict=True))  # type: ignore[arg-type] # whole numbers stay whole
            )

    def stats(self) -> CacheStats:
        """Counters, and what each tier holds."""
        tiers = {}
        for device, tier in list(self._devices.items()):
            name = "device" if len(self._devices) == 1 else f"device {device}"
            tiers[name] = tier.stats()
        if self.memory is not None:
            tiers["memory"] = self.memory.stats()
        if self.disk is not None:
            tiers["disk"] = self.disk.stats()
        return CacheStats(**self._counted._asdict(), tiers=tiers)
