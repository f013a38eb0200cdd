"""The passage cache: encoded windows in tiers, from the accelerator down to a shared store."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import re
import shutil
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import ByteSize, TypeAdapter, ValidationError

from rag_windows.cache.arena import ArenaTier
from rag_windows.cache.codec import EXACT, Entry, check_store
from rag_windows.cache.disk import LOCKS_WORK, MOST_LABELS, DiskTier
from rag_windows.cache.keys import is_key, label_digest, salt_key
from rag_windows.cache.memory import MemoryTier, to_host
from rag_windows.cache.shared import SharedTier, StoreReading
from rag_windows.cache.tier import CacheStats, prometheus_text
from rag_windows.cache.weight_sums import WeightSums
from rag_windows.errors import CacheError, InputError
from rag_windows.folders import FOLDER_VARIABLE, default_folder, in_home
from rag_windows.threads import PATIENCE, Lock, Worker, in_children

logger = logging.getLogger(__name__)

Size = int | str
"""Bytes, a text such as "4GiB" or "500MB", or a share of what is free now, such as "25%"."""

DEFAULT_DISK = "50GiB"
"""Taken where a path is given but no size, and at most by `cache=True`."""

_MEMORY_SHARE, _DISK_SHARE = 0.25, 0.2  # of what is free; what `cache=True` takes
_WAITING_SHARE, _LEAST_WAITING = 0.25, 256 << 20  # to be written: of the memory tier; at least
_UNKNOWN_MEMORY = 4 << 30
_UPLOADS = 8  # windows written to the shared store at the same time
_GUESSED_TOKEN_S = 0.0005  # encoding a token, before this process has measured it
_LEAST_WAIT_S = 0.1  # for the shared store; with less, a healthy one would often be late
_LEAST_MEASURED = 128  # tokens of a pass; the time of smaller ones is overhead
_PACE_DECAY = 0.9  # weight of earlier measurements beside a new one
_GROUP = Path("/sys/fs/cgroup")  # of this process, in a container
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[kmgt]?i?b|)", re.ASCII | re.IGNORECASE)


def parse_size(size: Size, name: str, free: int | None = None) -> int:
    """Bytes of a size, or of a share of what is free; InputError if it is none."""
    value = 0
    match = _SIZE.fullmatch(str(size).strip() if isinstance(size, int | str) else "")
    if match and match[2] != "%":
        with contextlib.suppress(ValidationError, OverflowError):
            value = int(TypeAdapter(ByteSize).validate_python(match[0].lower()))
    elif match and free is not None and float(match[1]) <= 100:
        value = int(free * float(match[1]) / 100)
    if value < 1:
        raise InputError(
            f"{name}={size!r} is not a size. Give bytes, a text such as '4GiB' or '500MB', or a "
            "share of what is free, such as '25%'."
        )
    return value


def free_memory() -> int:
    """Bytes of host memory that this process could still take, limits of a container included."""
    free = [_UNKNOWN_MEMORY]
    with contextlib.suppress(AttributeError, OSError, ValueError):  # Windows has no sysconf
        free = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2]
    with contextlib.suppress(OSError):  # not Linux
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        free = [int(kib) * 1024 for kib in re.findall(r"MemAvailable:\s*(\d+)", text)] or free
    with contextlib.suppress(OSError, ValueError):  # no such group, or "max" for no limit
        most, taken = (int((_GROUP / f"memory.{one}").read_text()) for one in ("max", "current"))
        # Cached files, such as a model's, are counted as taken but freed on demand.
        statistics = (_GROUP / "memory.stat").read_text(encoding="ascii")
        unused = sum(map(int, re.findall(r"^inactive_file (\d+)$", statistics, re.MULTILINE)))
        free.append(max(0, most - taken + unused))
    return min(free)


def free_disk(path: Path) -> int:
    """Bytes free on the file system that `path` lies on, or would lie on."""
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(folder).free
    return 0


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


AnyTier = MemoryTier | DiskTier | SharedTier


class PassageCache:
    """Keeps the keys and values of encoded windows.

    Give one to `WindowedLM.from_pretrained(..., cache=...)`. Several models, threads and processes
    may share a folder, and several models and threads an object, because a window's key holds all
    that the window depends on. A damaged or doubtful entry is never used; its window is encoded
    again. The cache makes a request fail in one case only: keys or values that are NaN or infinite
    (`NonFiniteError`).

    Args:
        memory: host memory to use, or None. Sizes are bytes, "4GiB", "500MB", or a share of what is
            free, such as "25%".
        disk: disk space to use; None means none, or 50 GiB if `path` is given.
        path: folder of the disk tier; by default the platform's cache folder.
        device_bytes: accelerator memory to use, for models on an accelerator; ignored for others.
            All of it is allocated at the first request, except with ``store="int8"``.
        salt: secret of a tenant. Without it, nobody can read what is stored under it or find out
            what is. Set it in the server's own code, and never take it from a request.
        store: "as computed" (exact), or "int8" (smaller and not exact).
        ttl: seconds for which an entry may be used; None for no limit.
        shared: a store that machines share: a folder, or a URL of fsspec such as
            "s3://bucket/prefix". Its entries come into memory and onto the disk of this machine,
            and what is encoded here is written to it behind the answer.
        shared_options: fsspec's storage options for it, such as an endpoint and credentials.
        shared_apart: whether each tenant's entries have a folder of their own in it.
        shared_wait: seconds that a request waits for it, at most; None for as long as encoding
            would take, as measured here, and at least 0.1 s.

    Raises:
        InputError: a size, salt, store, ttl or wait, or the shared store's URL, can't be used.
        CacheError: the folder can't be used.
        MissingExtraError: the shared store needs a package that is not installed.
    """

    accelerator_may_be_cpu: ClassVar[bool] = False
    """For tests without an accelerator: whether models on the CPU get an accelerator's tier."""

    def __init__(
        self,
        memory: Size | None = "4GiB",
        disk: Size | None = None,
        path: str | Path | None = None,
        device_bytes: Size | None = None,
        *,
        salt: str | bytes | None = None,
        store: str = EXACT,
        ttl: float | None = None,
        shared: str | Path | None = None,
        shared_options: Mapping[str, Any] | None = None,
        shared_apart: bool = False,
        shared_wait: float | None = None,
    ) -> None:
        for name, seconds in (("ttl", ttl), ("shared_wait", shared_wait)):
            if seconds is not None and not seconds > 0:
                raise InputError(
                    f"{name} must be None or a number of seconds above 0, not {seconds!r}."
                )
        if all(one is None for one in (memory, disk, path, device_bytes, shared)):
            raise InputError(
                "A cache needs memory=, disk=, device_bytes= or shared=. To have no cache, pass "
                "cache=None."
            )
        self.store = check_store(store)
        self.ttl = ttl
        self.salt_key = salt_key(salt)
        self.path: Path | None = None
        if path is not None or disk is not None:
            self.path = in_home(path) if path is not None else default_folder()
        self.memory: MemoryTier | None = None
        self.disk: DiskTier | None = None
        waiting = _LEAST_WAITING
        if memory is not None:
            limit = parse_size(memory, "memory", free_memory())
            self.memory = MemoryTier(limit, store)
            waiting = max(waiting, int(limit * _WAITING_SHARE))
        if self.path is not None:
            free = free_disk(self.path)
            limit = parse_size(DEFAULT_DISK if disk is None else disk, "disk", free)
            self.disk = DiskTier(self.path, limit, store)
        self.shared: SharedTier | None = None
        self._shared_apart, self._shared_wait = shared_apart, shared_wait
        if shared is not None:
            self.shared = SharedTier(os.fspath(shared), shared_options, store)
            if shared_apart:
                self.shared = self.shared.of_tenant(self.salt_key)
        self.flights = Flights()
        self._device_bytes = (
            None if device_bytes is None else parse_size(device_bytes, "device_bytes")
        )
        self._writer = Writer(waiting)
        self._uploads = Writer(waiting, _UPLOADS)
        self._common = _Common()

    @classmethod
    def default(cls, path: str | Path | None = None, **options: Any) -> PassageCache:
        """What ``cache=True`` means.

        A quarter of the free host memory, and of the disk a fifth of what is free, 50 GiB at most.
        Without a folder, in `path` or ``RAG_WINDOWS_CACHE_DIR``, where the platform's can't be
        used or the system has no file locks: memory only. A warning says so once.
        """
        options.setdefault("memory", max(1, int(free_memory() * _MEMORY_SHARE)))
        in_memory = {name: one for name, one in options.items() if name != "disk"}
        if path is None and options["memory"] is not None and not LOCKS_WORK:
            return cls(**in_memory)
        optional = path is None and not os.environ.get(FOLDER_VARIABLE)
        optional = optional and options["memory"] is not None
        try:
            folder = in_home(path) if path is not None else default_folder()
            if optional:
                folder.mkdir(0o700, parents=True, exist_ok=True)
            most = parse_size(DEFAULT_DISK, "disk")
            options.setdefault("disk", max(1, min(most, int(free_disk(folder) * _DISK_SHARE))))
            return cls(path=folder, **options)
        except (CacheError, OSError) as error:
            if not optional:
                raise
            cache = cls(**in_memory)  # raises again what came from the shared store
            _warn_once(
                "The default folder of the passage cache can't be used, so windows are cached in "
                f"memory only ({str(error).partition('. ')[0]}). Name another one in "
                f"{FOLDER_VARIABLE}."
            )
            return cache

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
            f"cache must be a PassageCache, True or None, not {type(cache).__name__}. For a "
            "folder, write cache=PassageCache(path=...)."
        )

    def tenant(self, salt: str | bytes) -> PassageCache:
        """The same tiers and limits for another tenant: neither finds what the other stored.

        `invalidate` acts on its own tenant. Counters, `clear`, `prune` and `verify`
        concern all tenants together.
        """
        other = copy.copy(self)
        other.salt_key = salt_key(salt)
        if other.shared is not None and self._shared_apart:
            other.shared = other.shared.of_tenant(other.salt_key)
        return other

    def stats(self) -> CacheStats:
        """Hits, misses and seconds saved, and the contents and counters of each tier."""
        named: dict[str, AnyTier | None] = {
            "device" if len(self._common.devices) == 1 else f"device {device}": tier
            for device, tier in list(self._common.devices.items())
        }
        named |= {"memory": self.memory, "disk": self.disk, "shared": self.shared}
        tiers = {name: tier.stats() for name, tier in named.items() if tier is not None}
        return CacheStats(**self._common.counts, tiers=tiers)

    def metrics(self, labels: Mapping[str, str] | None = None) -> str:
        """`stats` in Prometheus' text format; `labels` go with every line."""
        return prometheus_text(self.stats(), labels or {})

    def digests(self, ids: Collection[str] | str) -> tuple[str, ...]:
        """The digests that entries hold instead of passage or document ids, for this tenant.

        32 hexadecimal digits for each id, in order, for ``invalidate(..., every_tenant=True)``.
        """
        given = [ids] if isinstance(ids, str) else ids
        return tuple(label_digest(self.salt_key, one) for one in given)

    def resident(self) -> set[str]:
        """Digests of the contents of all passages that memory and accelerators hold.

        Of all tenants, each under its own salt; tiers that are slower are left out.
        """
        fast = [tier for tier in self._tiers() if isinstance(tier, MemoryTier)]
        return {label for tier in fast for label in tier.first_labels()}

    def invalidate(self, ids: Collection[str] | str, *, every_tenant: bool = False) -> int:
        """Remove this tenant's windows of some passages or documents: here, on disk, in the store.

        Windows that are being encoded just now are not stored either. Windows in the memory of
        other processes, and on the disks of other machines, stay there until they are evicted.

        Args:
            ids: ids of passages, or of documents as passages name them.
            every_tenant: for operators, who do not know the salts: `ids` are then digests (see
                `digests`) or names of entries' files without the ending, of any tenant.

        Returns:
            The number of windows removed.

        Raises:
            CacheError: the shared store can't be asked; what is here is removed.
        """
        given = [ids] if isinstance(ids, str) else list(ids)
        for one in given if every_tenant else ():
            if not is_key(one) and not re.fullmatch("[0-9a-f]{32}", one):
                raise InputError(
                    f"{one!r:.80} is neither a digest (32 hexadecimal digits, as from digests()) "
                    "nor the name of a window's file (64 digits, without the ending). To remove "
                    "a passage by its id, use its tenant's salt and leave every_tenant out."
                )
        named = given if every_tenant else self.digests(given)
        keys: set[str] = set()

        def find(tier: AnyTier) -> None:
            keys.update(one for one in named if is_key(one) and one in tier)
            keys.update(tier.keys_with(named))

        self._drop(find, lambda tier: tier.remove(keys), every_tenant=every_tenant)
        return len(keys)

    def windows_of(self, ids: Collection[str] | str) -> int:
        """How many windows of some passages or documents there are, as `invalidate` finds them.

        Raises:
            CacheError: the shared store can't be asked.
        """
        named = self.digests(ids)
        return len({key for tier in self._tiers() for key in tier.keys_with(named)})

    def remove(self, keys: Collection[str]) -> None:
        """Remove entries by their keys from every tier."""
        self._drop(lambda tier: tier.remove(keys))

    @property
    def weight_sums(self) -> WeightSums | None:
        """Digests of models' weights beside the disk tier; None without one."""
        return None if self.disk is None else WeightSums(Path(self.disk.path), self.salt_key)

    def clear(self) -> None:
        """Remove all windows of all tenants and models from every tier, the shared store included.

        Raises:
            CacheError: the shared store can't be reached; what is here is removed.
        """
        self._drop(lambda tier: tier.clear(), every_tenant=True)

    def prune(self, older_than_s: float | None = None) -> int:
        """Remove entries whose ttl has passed; returns how many.

        In the shared store, which is listed for it, also those that were written more than
        `older_than_s` seconds ago.

        Raises:
            CacheError: the shared store can't be used.
        """
        now = time.time()
        removed = 0
        for tier in self._tiers(every_tenant=True):
            more = (older_than_s,) if isinstance(tier, SharedTier) else ()
            removed += tier.prune(now, *more)
        return removed

    def verify(self) -> tuple[int, int]:
        """Check every entry on disk and in the shared store, and delete damaged ones.

        Returns:
            The number of entries checked, and of those deleted.

        Raises:
            CacheError: there is neither, or the shared store can't be used.
        """
        tiers = list(self._tiers(every_tenant=True))
        far = [tier for tier in tiers if isinstance(tier, DiskTier | SharedTier)]
        if not far:
            raise CacheError(
                "This cache has neither a disk tier nor a shared store, so there is nothing to "
                "verify. Give it path=, disk= or shared=."
            )
        self.flush()
        checked, deleted = zip(*(tier.verify() for tier in far), strict=True)
        return sum(checked), sum(deleted)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all encoded windows are written; False if the timeout passed before."""
        begun = time.monotonic()
        if not self._writer.flush(timeout_s):
            return False
        left = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - begun))
        return self._uploads.flush(left)

    def close(self) -> None:
        """Write what waits to be written and close the tiers; afterwards the cache is empty.

        For a shared store that does not answer it waits 30 seconds at most.
        """
        self._writer.close()
        if not self._uploads.close(PATIENCE):
            logger.warning(
                "The shared store takes too long, so some windows were not written to it. Answers "
                "stay right; these windows are encoded again."
            )
        for tier in self._tiers():
            tier.close()

    def __enter__(self) -> PassageCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _drop(self, *calls: Callable[[AnyTier], object], every_tenant: bool = False) -> None:
        """Drop entries from every tier, for good.

        Twice: a read that begins during the first round may find an entry that is still on disk,
        and put it into a fast tier that is cleared already. The second round's epoch stops such
        a read, and the round removes what it has put there before.
        """
        failure: CacheError | None = None
        for _ in range(2):
            with self._common.lock:
                self._common.epoch += 1
            for call in calls:
                for tier in self._tiers(every_tenant=every_tenant):
                    try:
                        call(tier)
                    except CacheError as error:  # what is here must be removed all the same
                        failure = error
        if failure is not None:
            raise failure

    # What the engine calls

    def __contains__(self, key: str) -> bool:
        """Whether an entry is on this machine, by what the tiers know without reading it."""
        return any(key in tier for tier in self._tiers() if tier is not self.shared)

    def present(self, keys: Collection[str]) -> set[str]:
        """Which entries need not be encoded, by what the tiers know without reading them.

        What is only on this machine is written to the shared store, too.
        """
        found = {key for key in keys if key in self}
        there = None if self.shared is None else self.shared.present(keys)
        if there is None:
            return found
        for key in found - there:
            self._uploads.submit(partial(self._share, key, self._common.epoch), 0)
        return found | there

    def _share(self, key: str, epoch: int) -> None:
        for tier in (self.memory, self.disk):
            entry = None if tier is None else tier.get_many([key]).get(key)
            if entry is not None and self.shared is not None:
                self._put([self.shared], key, entry, epoch)
                return

    @property
    def epoch(self) -> int:
        """Changes whenever entries are dropped; what was encoded before that is not stored."""
        return self._common.epoch

    def _tiers(self, *, every_tenant: bool = False) -> Iterator[AnyTier]:
        """Every tier, fastest first; of the shared store this tenant's part, or all."""
        yield from list(self._common.devices.values())
        shared = self.shared
        if shared is not None and every_tenant:
            shared = shared.of_all()
        yield from (tier for tier in (self.memory, self.disk, shared) if tier is not None)

    def _near(self, device: torch.device | None) -> list[AnyTier]:
        """The fast tiers: that of an accelerator, if one is wanted there, and host memory."""
        found = self._accelerator(device), self.memory
        return [tier for tier in found if tier is not None]

    def _accelerator(self, device: torch.device | None) -> MemoryTier | None:
        if device is None or self._device_bytes is None:
            return None
        if device.type == "cpu" and not self.accelerator_may_be_cpu:
            return None
        with self._common.lock:
            tier = self._common.devices.get(device)
            if tier is None:
                if self.store == EXACT and not self._common.any_shape:
                    tier = ArenaTier(self._device_bytes, device)
                else:
                    tier = MemoryTier(self._device_bytes, self.store, device)
                self._common.devices[device] = tier
            return tier

    def take_any_shape(self) -> None:
        """Let an accelerator's tier, if it is not there yet, hold windows that are no tokens alone.

        Each is then a block of its own, not a range of one arena.
        """
        self._common.any_shape = True

    def held(self, keys: Collection[str], device: torch.device) -> set[str]:
        """Entries whose keys and values are on a device as they are read there.

        Reading them takes no further memory.
        """
        tier = self._accelerator(device)
        if tier is None and device.type == "cpu":
            tier = self.memory
        return set() if tier is None else {key for key in keys if tier.as_read(key)}

    def quick(self, keys: Sequence[str], device: torch.device | None = None) -> dict[str, Entry]:
        """Entries on the accelerator and in host memory; the former takes in what is worth it."""
        epoch, near = self._common.epoch, self._near(device)
        found: dict[str, Entry] = {}
        for tier in near:
            missing = [key for key in keys if key not in found]
            got = tier.get_many(missing) if missing else {}
            if tier is not near[0] and isinstance(near[0], ArenaTier):
                for key, entry in got.items():
                    self._put(near[:1], key, entry, epoch)
            found |= got
        return found

    def again(self, keys: Sequence[str], device: torch.device | None = None) -> dict[str, Entry]:
        """Entries on disk, and those that came into host memory since they were missed there."""
        memory = self.memory
        came = {} if memory is None else memory.get_many([key for key in keys if key in memory])
        return came | self.from_disk([key for key in keys if key not in came], device)

    def from_disk(
        self, keys: Sequence[str], device: torch.device | None = None
    ) -> dict[str, Entry]:
        """Entries on disk; they are stored in the faster tiers, too."""
        disk, epoch = self.disk, self._common.epoch
        if disk is None or not keys:
            return {}
        found, near = disk.get_many(keys), self._near(device)
        for key, entry in found.items():
            self._put(near, key, entry, epoch)
        more = [key for key, entry in found.items() if entry.more_labels and near]

        def look() -> None:
            for key, labels in disk.labels(more).items():
                for tier in near:
                    tier.add_labels(key, labels)

        if more:
            self._writer.submit(look, 0)
        return found

    def from_shared(self, keys: Sequence[str], tokens: int, model: bytes) -> StoreReading | None:
        """Begin to read entries of the shared store, for as long as encoding them would take.

        None if there is none, or in a pause. Give what the reading's `landed` yields to `take_in`.
        """
        if self.shared is None or not keys:
            return None
        within_s = self._shared_wait
        if within_s is None:
            seconds, measured = self._common.pace.get(model, (_GUESSED_TOKEN_S, 1.0))
            within_s = max(_LEAST_WAIT_S, tokens * seconds / measured)
        return self.shared.reading(keys, within_s)

    def take_in(
        self, entries: Mapping[str, Entry], epoch: int, device: torch.device | None = None
    ) -> None:
        """Store what came from the shared store in the tiers of this machine."""
        near, disk = self._near(device), self.disk
        for key, entry in entries.items():
            self._put(near, key, entry, epoch)
            if disk is not None:
                self._writer.submit(partial(self._put, [disk], key, entry, epoch), entry.nbytes)

    def measured(self, model: bytes, tokens: int, seconds: float) -> None:
        """Note how many seconds a model took to encode so many tokens."""
        if tokens < _LEAST_MEASURED:
            return
        with self._common.lock:
            before = self._common.pace.get(model, (0.0, 0.0))
            self._common.pace[model] = (
                before[0] * _PACE_DECAY + seconds,
                before[1] * _PACE_DECAY + tokens,
            )

    def on_accelerator(
        self, entries: Mapping[str, Entry], device: torch.device | None = None
    ) -> dict[str, Entry]:
        """The same entries, from the accelerator's tier where it holds them as well."""
        tier = self._accelerator(device)
        return {**entries, **(tier.peek(entries) if isinstance(tier, ArenaTier) else {})}

    def relabel(self, key: str, entry: Entry, labels: Collection[str]) -> None:
        """Note further ids of an entry that was found, so that `invalidate` knows them."""
        missing = [one for one in self.digests(labels) if one not in entry.labels]
        missing = missing[: max(0, MOST_LABELS - len(entry.labels))]
        for tier in self._tiers() if missing else ():
            if isinstance(tier, MemoryTier):
                tier.add_labels(key, missing)
            else:
                writer = self._uploads if tier is self.shared else self._writer
                writer.submit(partial(tier.add_labels, key, missing), 0)

    def keep(
        self,
        key: str,
        entry: Entry,
        epoch: int,
        *,
        device: torch.device | None = None,
        done: Callable[[], None] | None = None,
        wait: bool = False,
    ) -> None:
        """Store a compact entry: at once in the fast tiers, and on disk by a thread of its own.

        `epoch` is that in which its encoding began; `done` is called when the entry is stored or
        given up; with `wait`, it waits while too much is queued, and else is not written.
        """
        on_host = entry.window.packed is not None or all(
            tensor.device.type == "cpu" for tensor in entry.window.tensors
        )
        near = self._near(device)
        far: list[AnyTier] = [] if self.disk is None else [self.disk]
        if not on_host and self.memory is not None:
            near.remove(self.memory)
            far.insert(0, self.memory)
        self._put(near, key, entry, epoch)

        def upload(host: Entry) -> None:
            if self.shared is not None:
                job = partial(self._put, [self.shared], key, host, epoch)
                if not self._uploads.submit(job, host.nbytes, wait=wait):
                    self.shared.leave_out()

        def write() -> None:
            host = None
            try:
                if self._common.epoch == epoch:
                    host = replace(entry, window=to_host(entry.window))
                    self._put(far, key, host, epoch)
            finally:
                if done is not None:
                    done()
            if host is not None and not on_host:
                upload(host)

        if on_host:
            upload(entry)
        taken = bool(far) or (not on_host and self.shared is not None)
        taken = taken and self._writer.submit(write, entry.nbytes, wait=wait)
        if not taken and done is not None:
            done()

    def _put(self, tiers: Sequence[AnyTier], key: str, entry: Entry, epoch: int) -> None:
        """Store an entry in some tiers, unless something was forgotten since the epoch."""
        if self._common.epoch != epoch:
            return
        for tier in tiers:
            tier.put(key, entry)
        if self._common.epoch != epoch:  # what was invalidated meanwhile must not come back
            for tier in tiers:
                tier.remove([key])

    def count(self, **amounts: float) -> None:
        """Add to the counters; see `CacheStats`."""
        with self._common.lock:
            for name, amount in amounts.items():
                self._common.counts[name] += amount


@dataclass
class _Common:
    """State that the copies of a cache for other tenants share."""

    lock: Lock = field(default_factory=Lock)
    epoch: int = 0
    counts: defaultdict[str, Any] = field(default_factory=lambda: defaultdict(int))
    devices: dict[torch.device, MemoryTier] = field(default_factory=dict)
    any_shape: bool = False
    pace: dict[bytes, tuple[float, float]] = field(default_factory=dict)
    """Of each model, seconds of encoding and tokens encoded; the latest ones count most."""


class Flights:
    """Claims on keys: the first request to claim one leads and must end it, the others follow.

    A follower that got no entry by then (the leader failed or was cancelled) encodes it itself.
    """

    def __init__(self) -> None:
        self.after_fork()
        in_children(self)

    def after_fork(self) -> None:
        """A child drops the claims: only the parent's threads could end them."""
        self._lock = threading.Lock()
        self._flying: dict[str, Future[Entry | None]] = {}

    def claim(self, keys: Iterable[str]) -> tuple[list[str], dict[str, Future[Entry | None]]]:
        """Claim keys; those that this request leads now, and those that another leads already."""
        with self._lock:
            asked = list(dict.fromkeys(keys))
            theirs = {key: self._flying[key] for key in asked if key in self._flying}
            mine = [key for key in asked if key not in theirs]
            self._flying |= {key: Future() for key in mine}
        return mine, theirs

    def land(self, key: str, entry: Entry | None) -> None:
        """Hand followers an entry; the claim stays, so that whoever comes later gets it, too."""
        with self._lock:
            flight = self._flying.get(key)
        if flight is not None and not flight.done():  # else the parent's, in a forked child
            flight.set_result(entry)

    def end(self, key: str) -> None:
        """End a claim: its entry is stored now, or never will be."""
        self.land(key, None)
        with self._lock:
            self._flying.pop(key, None)


class Writer:
    """Threads that do jobs while there are any, with a bound on the bytes that wait.

    A single thread does them in order, several at the same time.
    """

    def __init__(self, limit_bytes: int, threads: int = 1) -> None:
        self._limit, self._most_threads = limit_bytes, threads
        self._closed = False
        self.after_fork()
        in_children(self)

    def after_fork(self) -> None:
        """A child has no such thread; the parent writes what waits."""
        self._change = threading.Condition()
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        self._waiting_bytes = 0
        self._threads = 0

    def submit(self, job: Callable[[], None], nbytes: int, *, wait: bool = False) -> bool:
        """Queue a job that holds so many bytes in memory; False if that is over the limit."""
        with self._change:
            if wait:
                self._change.wait_for(lambda: self._closed or self._fits(nbytes))
            taken = not self._closed and self._fits(nbytes)
            if taken:
                self._jobs.append((job, nbytes))
                self._waiting_bytes += nbytes
                if self._threads < self._most_threads:
                    Worker(self._run, "rag-windows-cache", lambda: None).start()
                    self._threads += 1
        return taken

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to do; False if that took too long."""
        with self._change:
            return self._change.wait_for(lambda: not self._threads, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Do what waits; later jobs are refused. False if it took too long, and then they go."""
        done = self.flush(timeout_s)
        with self._change:
            self._closed = True
            self._jobs.clear()
            self._change.notify_all()
        return done

    def _fits(self, nbytes: int) -> bool:
        return not self._waiting_bytes or self._waiting_bytes + nbytes <= self._limit

    def _run(self) -> None:
        while True:
            with self._change:
                if not self._jobs:
                    self._threads -= 1
                    self._change.notify_all()
                    return
                job, nbytes = self._jobs.popleft()
            try:
                job()
            except Exception:  # the next jobs must run
                logger.exception("The passage cache could not write a window.")
            del job  # its memory is freed before the next one is let in
            with self._change:
                self._waiting_bytes -= nbytes
                self._change.notify_all()
