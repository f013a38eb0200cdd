"""The tier in memory: the host's, page-locked or not, or an accelerator's."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from rag_windows.cache.codec import Codec, Entry, Stored, codec_named
from rag_windows.cache.counters import TierStats
from rag_windows.cache.keys import check_key
from rag_windows.cache.policy import Policy
from rag_windows.cache.transfer import block_bytes, in_one_block
from rag_windows.errors import InputError
from rag_windows.threads import in_children

_OBJECT_BYTES = 1024  # of an entry without tensors and ids: the objects, the policy's bookkeeping
_TENSOR_BYTES = 512  # of one tensor's object


@dataclass(frozen=True, slots=True)
class _Slot:
    entry: Entry  # with the decoded window if decoding costs nothing, else with an empty one
    stored: Stored | None
    nbytes: int


class MemoryTier:
    """Entries in memory, under a limit in bytes; threads may share one.

    Tensors are copied in and decoded outside the lock, which is held for bookkeeping alone. What
    `get_many` returns is shared between all who ask and must never be written to. A window that was
    dropped lives on until the last request that reads it has ended.

    Args:
        limit_bytes: most bytes that all entries may have together: their tensors' blocks, and an
            estimate of the Python objects around them.
        store: the stored form, "as computed" or "int8".
        device: where the tensors are kept; None is the host.
        pin: keep them in page-locked memory if there is a CUDA device; else this does nothing.

    Raises:
        InputError: if an argument is outside its domain.
    """

    def __init__(
        self,
        limit_bytes: int,
        store: str = "as computed",
        *,
        device: torch.device | str | None = None,
        pin: bool = False,
    ) -> None:
        self._codec: Codec = codec_named(store)
        self._device = _indexed(torch.device(device or "cpu"))
        if pin and self._device.type != "cpu":
            raise InputError(f"only host memory can be page-locked, not {self._device}.")
        self._pin = pin and torch.cuda.is_available()
        self._policy = Policy(limit_bytes)
        self._lock = threading.Lock()
        self._slots: dict[str, _Slot] = {}
        self._stats = TierStats(limit_bytes=limit_bytes)
        self._closed = False
        in_children(self)

    def after_fork(self) -> None:
        """Keep what is held, unless a thread was changing it just then."""
        if self._lock.locked():
            self._policy = Policy(self._policy.limit_bytes)
            self._slots = {}
        # Even if it says that it is free: a thread that is about to get it has not said so yet.
        self._lock = threading.Lock()

    def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        """Return the entries that are there; every key counts once, however often it is named."""
        wanted = dict.fromkeys(check_key(key) for key in keys)
        now = time.time()
        found: dict[str, _Slot] = {}
        dropped: list[_Slot] = []
        with self._lock:
            for key in wanted:
                self._policy.touch(key)
                slot = self._slots.get(key)
                if slot is not None and slot.entry.expired(now):
                    dropped.append(self._drop(key))
                elif slot is not None:
                    found[key] = slot
            self._count(hits=len(found), misses=len(wanted) - len(found), expired=len(dropped))
        return {key: self._read(slot) for key, slot in found.items()}

    def put(self, key: str, entry: Entry) -> bool:
        """Keep an entry; False if it was refused.

        Raises:
            NonFiniteError: if a key or value is NaN or infinite.
            CacheError: if the window can't be kept in this form.
        """
        check_key(key)
        stored = self._codec.encode(entry.window)
        if stored.nbytes > self._policy.limit_bytes:  # spares the copy
            with self._lock:
                self._count(refused=1)
            return False
        try:
            tensors = in_one_block(stored.tensors, self._device, pin=self._pin)
        except MemoryError:
            with self._lock:
                self._count(failed=1)
            return False
        slot = self._slot(replace(stored, tensors=tensors), entry)
        dropped: list[_Slot] = []  # freed after the lock is
        with self._lock:
            victims = None
            if not self._closed:
                victims = self._policy.admit(key, slot.nbytes, entry.cost_s)
            if victims is None:
                self._count(refused=1)
                return False
            dropped += [self._slots.pop(victim) for victim in victims]
            dropped += [self._slots[key]] if key in self._slots else []
            self._slots[key] = slot
            self._count(stored=1, evictions=len(victims))
        return True

    def add_labels(self, key: str, labels: Iterable[str]) -> None:
        """Give an entry these labels beside its own."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is not None:
                merged = tuple(dict.fromkeys((*slot.entry.labels, *labels)))
                self._slots[key] = replace(slot, entry=replace(slot.entry, labels=merged))

    def remove(self, keys: Iterable[str]) -> int:
        """Drop entries; returns how many there were."""
        wanted = [check_key(key) for key in keys]
        with self._lock:
            dropped = [self._drop(key) for key in dict.fromkeys(wanted) if key in self._slots]
            self._count(removed=len(dropped))
        return len(dropped)

    def clear(self) -> None:
        """Drop all entries. Counters stay, counted uses don't."""
        with self._lock:
            dropped, self._slots = self._slots, {}
            self._policy.clear()
            self._count(removed=len(dropped))

    def prune(self, now: float | None = None) -> int:
        """Drop what is expired at unix time `now` (None: at present); returns how much."""
        moment = time.time() if now is None else now
        with self._lock:
            late = [key for key, slot in self._slots.items() if slot.entry.expired(moment)]
            dropped = [self._drop(key) for key in late]
            self._count(expired=len(dropped))
        return len(dropped)

    def keys_with(self, labels: Collection[str]) -> list[str]:
        """Keys of the entries that carry any of these labels."""
        wanted = set(labels)
        with self._lock:
            slots = list(self._slots.items())
        return [key for key, slot in slots if not wanted.isdisjoint(slot.entry.labels)]

    def close(self) -> None:
        """Let everything go and take in nothing more."""
        with self._lock:
            self._closed = True
        self.clear()

    def __contains__(self, key: str) -> bool:
        check_key(key)
        with self._lock:
            slot = self._slots.get(key)
        return slot is not None and not slot.entry.expired(time.time())

    def __len__(self) -> int:
        return len(self._slots)

    def stats(self) -> TierStats:
        """Counters since the tier was made, and what it holds now."""
        with self._lock:
            return replace(self._stats, entries=len(self._slots), bytes=self._policy.nbytes)

    def _slot(self, stored: Stored, entry: Entry) -> _Slot:
        window = entry.window
        nbytes = block_bytes(stored.tensors) + _OBJECT_BYTES + _TENSOR_BYTES * len(stored.tensors)
        # An int of CPython takes 28 bytes, in steps of 16.
        nbytes += sys.getsizeof(window.ids) + 32 * len(window.ids)
        nbytes += sum(sys.getsizeof(label) for label in entry.labels)
        if self._codec.exact:
            decoded = self._codec.decode(stored, window.ids, window.start)
            return _Slot(replace(entry, window=decoded), None, nbytes)
        return _Slot(replace(entry, window=replace(window, keys=(), values=())), stored, nbytes)

    def _read(self, slot: _Slot) -> Entry:
        if slot.stored is None:
            return slot.entry
        window = slot.entry.window
        decoded = self._codec.decode(slot.stored, window.ids, window.start)
        return replace(slot.entry, window=decoded)

    def _drop(self, key: str) -> _Slot:
        self._policy.forget(key)
        return self._slots.pop(key)

    def _count(self, **amounts: int) -> None:
        self._stats = replace(
            self._stats, **{name: getattr(self._stats, name) + n for name, n in amounts.items()}
        )


def _indexed(device: torch.device) -> torch.device:
    """Tensors on "cuda" say "cuda:0"; only the latter compares equal."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
