"""The passage cache: encoded windows in tiers, from the accelerator down to the disk."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
import shutil
import sys
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
from rag_windows.cache.tier import CacheStats, prometheus_text
from rag_windows.errors import CacheError, InputError
from rag_windows.threads import Lock, Worker, in_children

logger = logging.getLogger(__name__)

Size = int | str
"""Bytes, a text such as "4GiB" or "500MB", or a share of what is free now, such as "25%"."""

DEFAULT_DISK = "50GiB"
"""Taken where a path is given but no size, and at most by `cache=True`."""

FOLDER_VARIABLE = "RAG_WINDOWS_CACHE_DIR"

_MEMORY_SHARE, _DISK_SHARE = 0.25, 0.2  # of what is free; what `cache=True` takes
_WAITING_SHARE, _LEAST_WAITING = 0.25, 256 << 20  # to be written: of the memory tier; at least
_UNKNOWN_MEMORY = 4 << 30
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
        # Files that were read, such as a model's, are counted as taken and go when others want it.
        told = (_GROUP / "memory.stat").read_text(encoding="ascii")
        unused = sum(map(int, re.findall(r"^inactive_file (\d+)$", told, re.MULTILINE)))
        free.append(max(0, most - taken + unused))
    return min(free)


def free_disk(path: Path) -> int:
    """Bytes free on the file system that `path` lies on, or would lie on."""
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(folder).free
    return 0


def default_folder() -> Path:
    """``RAG_WINDOWS_CACHE_DIR``, else a folder in the platform's cache folder; not created here."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:  # the specification wants an absolute path
        base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"
    return base / "rag-windows" / "windows"


AnyTier = MemoryTier | DiskTier


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
        device: accelerator memory to use, for models on an accelerator; ignored for others. All of
            it is allocated at the first request, except with ``store="int8"``.
        salt: secret of a tenant. Without it, nobody can read what is stored under it or find out
            what is. Set it in the server's own code, and never take it from a request.
        store: "as computed" (exact), or "int8" (smaller and not exact).
        ttl: seconds for which an entry may be used; None for no limit.

    Raises:
        InputError: a size, salt, store or ttl can't be used.
        CacheError: the folder can't be used.
    """

    accelerator_may_be_cpu: ClassVar[bool] = False
    """For tests without an accelerator: whether models on the CPU get the tier of `device`, too."""

    def __init__(
        self,
        memory: Size | None = "4GiB",
        disk: Size | None = None,
        path: str | Path | None = None,
        device: Size | None = None,
        *,
        salt: str | bytes | None = None,
        store: str = EXACT,
        ttl: float | None = None,
    ) -> None:
        if ttl is not None and not ttl > 0:
            raise InputError(f"ttl must be None or a number of seconds above 0, not {ttl!r}.")
        if memory is None and disk is None and path is None and device is None:
            raise InputError(
                "A cache needs memory=, disk= or device=. To have no cache, pass cache=None."
            )
        self.store = check_store(store)
        self.ttl = ttl
        self.salt_key = salt_key(salt)
        self.path: Path | None = None
        if path is not None or disk is not None:
            self.path = Path(path).expanduser() if path is not None else default_folder()
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
        self.flights = Flights()
        self._device_bytes = None if device is None else parse_size(device, "device")
        self._writer = Writer(waiting)
        self._shared = _Shared()

    @classmethod
    def default(cls, path: str | Path | None = None, **options: Any) -> PassageCache:
        """What ``cache=True`` means.

        A quarter of the free host memory, and of the disk a fifth of what is free, 50 GiB at most.
        Memory alone where the system has no file locks and no `path` is given.
        """
        folder = Path(path) if path is not None else default_folder()
        options.setdefault("memory", max(1, int(free_memory() * _MEMORY_SHARE)))
        if path is None and options["memory"] is not None and not LOCKS_WORK:
            options.pop("disk", None)
            return cls(**options)
        most = parse_size(DEFAULT_DISK, "disk")
        options.setdefault("disk", max(1, min(most, int(free_disk(folder) * _DISK_SHARE))))
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
        return other

    def stats(self) -> CacheStats:
        """Hits, misses and seconds saved, and the contents and counters of each tier."""
        named: dict[str, AnyTier | None] = {
            "device" if len(self._shared.devices) == 1 else f"device {device}": tier
            for device, tier in list(self._shared.devices.items())
        }
        named |= {"memory": self.memory, "disk": self.disk}
        tiers = {name: tier.stats() for name, tier in named.items() if tier is not None}
        return CacheStats(**self._shared.counts, tiers=tiers)

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

        Of all tenants, each under its own salt; tiers that are slower are left out, and so is what
        was stored by versions before this one.
        """
        fast = [tier for tier in self._tiers() if isinstance(tier, MemoryTier)]
        return {label for tier in fast for label in tier.first_labels()}

    def invalidate(self, ids: Collection[str] | str, *, every_tenant: bool = False) -> int:
        """Remove this tenant's windows of some passages or documents, here and on disk.

        Windows that are being encoded at this moment are not kept either. Windows in the memory of
        other processes stay there until those processes end or evict them.

        Args:
            ids: ids of passages, or of documents as passages name them.
            every_tenant: for operators, who do not know the salts: `ids` are then digests (see
                `digests`) or names of entries' files without the ending, of any tenant.

        Returns:
            The number of windows removed.
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

        self._drop(find, lambda tier: tier.remove(keys))
        return len(keys)

    def remove(self, keys: Collection[str]) -> None:
        """Remove entries by their keys, in this process and on disk."""
        self._drop(lambda tier: tier.remove(keys))

    def clear(self) -> None:
        """Remove all windows of all tenants and models, in this process and on disk."""
        self._drop(lambda tier: tier.clear())

    def prune(self) -> int:
        """Remove entries whose ttl has passed; returns how many."""
        now = time.time()
        return sum(tier.prune(now) for tier in self._tiers())

    def verify(self) -> tuple[int, int]:
        """Check every entry on disk and delete damaged ones.

        Returns:
            The number of entries checked, and of those deleted.

        Raises:
            CacheError: there is no disk tier.
        """
        if self.disk is None:
            raise CacheError(
                "This cache has no disk tier, so there is nothing to verify. Give it "
                "path= or disk=."
            )
        self.flush()
        return self.disk.verify()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all encoded windows are written; False if the timeout passed before."""
        return self._writer.flush(timeout_s)

    def close(self) -> None:
        """Write what waits to be written and close the tiers; afterwards the cache is empty."""
        self._writer.close()
        for tier in self._tiers():
            tier.close()

    def __enter__(self) -> PassageCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _drop(self, *calls: Callable[[AnyTier], object]) -> None:
        """Drop entries from every tier, for good.

        Twice: a read that begins in the midst of the first round may find an entry that is still
        on disk, and put it into a fast tier that is through already. The second round's epoch
        stops such a read, and the round takes out what it has put there before.
        """
        for _ in range(2):
            with self._shared.lock:
                self._shared.epoch += 1
            for call in calls:
                for tier in self._tiers():
                    call(tier)

    # What the engine calls

    def __contains__(self, key: str) -> bool:
        """Whether an entry is there, by what the tiers know without reading it."""
        return any(key in tier for tier in self._tiers())

    @property
    def epoch(self) -> int:
        """Another one whenever something was forgotten; what was encoded before is not kept."""
        return self._shared.epoch

    def _tiers(self) -> Iterator[AnyTier]:
        """Every tier, fastest first."""
        yield from list(self._shared.devices.values())
        yield from (tier for tier in (self.memory, self.disk) if tier is not None)

    def _near(self, device: torch.device | None) -> list[AnyTier]:
        """The fast tiers: that of an accelerator, if one is wanted there, and host memory."""
        found = self._accelerator(device), self.memory
        return [tier for tier in found if tier is not None]

    def _accelerator(self, device: torch.device | None) -> MemoryTier | None:
        if device is None or self._device_bytes is None:
            return None
        if device.type == "cpu" and not self.accelerator_may_be_cpu:
            return None
        with self._shared.lock:
            tier = self._shared.devices.get(device)
            if tier is None:
                if self.store == EXACT:
                    tier = ArenaTier(self._device_bytes, device)
                else:
                    tier = MemoryTier(self._device_bytes, self.store, device)
                self._shared.devices[device] = tier
            return tier

    def held(self, keys: Collection[str], device: torch.device) -> set[str]:
        """Entries whose keys and values stand on a device as they are read there.

        To read them takes no further memory.
        """
        tier = self._accelerator(device)
        if tier is None and device.type == "cpu":
            tier = self.memory
        if tier is None or self.store != EXACT:
            return set()
        return {key for key in keys if key in tier}

    def quick(self, keys: Sequence[str], device: torch.device | None = None) -> dict[str, Entry]:
        """Entries on the accelerator and in host memory, which it takes in if it is worth it."""
        epoch, near = self._shared.epoch, self._near(device)
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
        """Entries on disk; they are kept in the faster tiers, too."""
        disk, epoch = self.disk, self._shared.epoch
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
                self._writer.submit(partial(tier.add_labels, key, missing), 0)

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

        `epoch` is that in which its encoding began; `done` is called when the entry is where it
        will be, or when it will not be; `wait` rather than not write while too much waits.
        """
        on_host = all(tensor.device.type == "cpu" for tensor in entry.window.keys)
        near = self._near(device)
        far: list[AnyTier] = [] if self.disk is None else [self.disk]
        if not on_host and self.memory is not None:
            near.remove(self.memory)
            far.insert(0, self.memory)
        self._put(near, key, entry, epoch)

        def write() -> None:
            try:
                if self._shared.epoch == epoch:
                    self._put(far, key, replace(entry, window=to_host(entry.window)), epoch)
            finally:
                if done is not None:
                    done()

        taken = bool(far) and self._writer.submit(write, entry.nbytes, wait=wait)
        if not taken and done is not None:
            done()

    def _put(self, tiers: Sequence[AnyTier], key: str, entry: Entry, epoch: int) -> None:
        """Store an entry in some tiers, unless something was forgotten since the epoch."""
        if self._shared.epoch == epoch:
            for tier in tiers:
                tier.put(key, entry)
        if self._shared.epoch != epoch:  # what was invalidated meanwhile must not come back
            for tier in tiers:
                tier.remove([key])

    def count(self, **amounts: float) -> None:
        """Add to the counters; see `CacheStats`."""
        with self._shared.lock:
            for name, amount in amounts.items():
                self._shared.counts[name] += amount


@dataclass
class _Shared:
    """What copies of a cache for other tenants have in common and change."""

    lock: Lock = field(default_factory=Lock)
    epoch: int = 0
    counts: defaultdict[str, Any] = field(default_factory=lambda: defaultdict(int))
    devices: dict[torch.device, MemoryTier] = field(default_factory=dict)


class Flights:
    """Claims on keys: the first request to claim one leads and must end it, the others follow.

    A follower that got no entry by then (the leader failed or was cancelled) does it itself.
    """

    def __init__(self) -> None:
        self.after_fork()
        in_children(self)

    def after_fork(self) -> None:
        """What others were leading never lands in a child."""
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
    """A thread that does jobs in order while there are any, with a bound on the bytes that wait."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._closed = False
        self.after_fork()
        in_children(self)

    def after_fork(self) -> None:
        """A child has no such thread, and what waits is the parent's to write."""
        self._change = threading.Condition()
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        self._waiting_bytes = 0
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None], nbytes: int, *, wait: bool = False) -> bool:
        """Hand over a job that keeps so many bytes in memory; False if there is no room for it."""
        with self._change:
            if wait:
                self._change.wait_for(lambda: self._closed or self._has_room(nbytes))
            taken = not self._closed and self._has_room(nbytes)
            if taken:
                self._jobs.append((job, nbytes))
                self._waiting_bytes += nbytes
                if self._thread is None:
                    thread = Worker(self._run, "rag-windows-cache", lambda: None)
                    thread.start()
                    self._thread = thread
        return taken

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to do; False if that took too long."""
        with self._change:
            return self._change.wait_for(lambda: self._thread is None, timeout_s)

    def close(self) -> None:
        """Do what waits; later jobs are refused."""
        self.flush()
        with self._change:
            self._closed = True
            self._change.notify_all()

    def _has_room(self, nbytes: int) -> bool:
        return not self._waiting_bytes or self._waiting_bytes + nbytes <= self._limit

    def _run(self) -> None:
        while True:
            with self._change:
                if not self._jobs:
                    self._thread = None
                    self._change.notify_all()
                    return
                job, nbytes = self._jobs.popleft()
            try:
                job()
            except Exception:  # the next ones shall be done
                logger.exception("The passage cache could not write a window.")
            del job  # what it holds is free before others may take its room
            with self._change:
                self._waiting_bytes -= nbytes
                self._change.notify_all()
