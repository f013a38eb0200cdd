"""The tier in memory, the host's or an accelerator's, and how windows get there and back."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from operator import attrgetter

import torch

from rag_windows.cache.codec import EXACT, Entry, Stored, decode, encode
from rag_windows.cache.keys import check_key
from rag_windows.cache.tier import Outcome, Tier
from rag_windows.kv import Window

ALIGNMENT = 64
"""Bytes on whose multiples tensors start within a block; what CPU kernels like best."""

HOST = torch.device("cpu")

_SLACK = 1.25  # a storage holds at most so many times its tensors' own bytes, or it is no block
_OBJECT_BYTES = 1024  # of an entry without tensors and ids: the objects, the policy's bookkeeping
_TENSOR_BYTES = 512  # of one tensor's object


class MemoryTier(Tier):
    """Entries in memory; the limit counts tensors and an estimate of the objects around them.

    What `get_many` returns is shared between all who ask and must never be written to.
    """

    def __init__(self, limit_bytes: int, store: str = EXACT, device: torch.device = HOST) -> None:
        # With its window if that is read as it is stored, else beside that form, without keys.
        self._held: dict[str, tuple[Entry, Stored | None]] = {}
        self._device = device
        self._pin = device.type == "cpu" and torch.cuda.is_available()
        self._closed = False
        super().__init__(limit_bytes, store)

    def after_fork(self) -> None:
        """Keep what is held, unless a thread was changing it just then."""
        policy, torn = self._policy, self._lock.locked()
        super().after_fork()
        if torn:
            self._held = {}
        else:
            self._policy = policy

    def _look(self, keys: Sequence[str]) -> dict[str, Entry]:
        now = time.time()
        with self._lock:
            there = {key: self._held[key] for key in keys if key in self._held}
        late = [key for key, (entry, _) in there.items() if entry.expired(now)]
        self._count(expired=self._drop(late))
        return {key: self._decoded(*there[key]) for key in there if key not in late}

    def _decoded(self, entry: Entry, stored: Stored | None) -> Entry:
        if stored is None:
            return entry
        window = decode(entry.form(self._store), stored, entry.window.ids, entry.window.start)
        return replace(entry, window=window)

    def _put(self, key: str, entry: Entry) -> Outcome:
        window, form = entry.window, entry.form(self._store)
        stored = encode(form, window)
        if sum(tensor.nbytes for tensor in stored.tensors) > self._limit_bytes:
            return "refused"  # spares the copy
        try:
            tensors = _in_one_block(stored.tensors, self._device, pin=self._pin)
        except MemoryError:
            return "failed"
        stored = Stored(tensors, stored.description)
        size = _block_bytes(tensors) + _OBJECT_BYTES + _TENSOR_BYTES * len(tensors)
        # An int of CPython takes 28 bytes, in steps of 16.
        size += sys.getsizeof(window.ids) + 32 * len(window.ids)
        size += sum(sys.getsizeof(label) for label in entry.labels)
        held: tuple[Entry, Stored | None] = self._decoded(entry, stored), None
        if form != EXACT and held[0].window.packed is None:
            held = replace(entry, window=replace(window, keys=(), values=(), states=())), stored
        with self._lock:
            victims = None if self._closed else self._policy.admit(key, size, entry.cost_s)
            if victims is None:
                return "refused"
            dropped = [self._held.pop(victim) for victim in victims]  # freed after the lock is
            dropped += [self._held[key]] if key in self._held else []
            self._held[key] = held
            self._counts.update(evictions=len(victims))
        return "stored"

    def add_labels(self, key: str, labels: Collection[str]) -> None:
        """Give an entry these labels beside its own."""
        with self._lock:
            if key in self._held:
                entry, stored = self._held[key]
                merged = tuple(dict.fromkeys((*entry.labels, *labels)))
                self._held[key] = replace(entry, labels=merged), stored

    def keys_with(self, labels: Collection[str]) -> list[str]:
        """Keys of the entries that carry any of the labels."""
        with self._lock:
            there = list(self._held.items())
        return [key for key, (entry, _) in there if not set(labels).isdisjoint(entry.labels)]

    def first_labels(self) -> set[str]:
        """The first label of each entry that has any."""
        with self._lock:
            there = list(self._held.values())
        return {entry.labels[0] for entry, _ in there if entry.labels}

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            dropped, self._held = self._held, {}
            self._policy.clear()
            self._counts.update(removed=len(dropped))

    def close(self) -> None:
        """Drop everything and store nothing more."""
        with self._lock:
            self._closed = True
        self.clear()

    def __contains__(self, key: str) -> bool:
        return self._entry(key) is not None

    def as_read(self, key: str) -> bool:
        """Whether an entry is there, and takes no further memory when it is read."""
        held = self._entry(key)
        return held is not None and held[1] is None

    def _entry(self, key: str) -> tuple[Entry, Stored | None] | None:
        check_key(key)
        with self._lock:
            held = self._held.get(key)
        return None if held is None or held[0].expired(time.time()) else held

    def _late(self, now: float) -> list[str]:
        with self._lock:
            return [key for key, (entry, _) in self._held.items() if entry.expired(now)]

    def _holds(self) -> tuple[int, int]:
        with self._lock:
            return len(self._held), self._policy.nbytes

    def _drop(self, keys: Sequence[str]) -> int:
        with self._lock:
            dropped = [self._held.pop(key) for key in keys if self._policy.forget(key)]
        return len(dropped)


def _in_one_block(
    tensors: Sequence[torch.Tensor], device: torch.device, *, pin: bool = False
) -> tuple[torch.Tensor, ...]:
    """The tensors as views of one block on a device, or MemoryError.

    A slice keeps the whole batch that it was cut from alive; these don't. Tensors that share such a
    block already are returned as they are, or copied with it as a whole.
    """
    whole = _block_of(tensors)
    if whole is not None and whole.device == device and (not pin or tensors[0].is_pinned()):
        return tuple(tensor.detach() for tensor in tensors)
    if whole is not None:
        starts = [tensor.storage_offset() * tensor.element_size() for tensor in tensors]
        end = len(whole)
    else:
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    try:
        block = torch.empty(end, dtype=torch.uint8, device=device, pin_memory=pin)
    except RuntimeError as error:  # what torch's allocators raise
        raise MemoryError(f"no {end} bytes on {device}") from error
    views = tuple(
        block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(tensors, starts, strict=True)
    )
    pairs = [(block, whole)] if whole is not None else zip(views, tensors, strict=True)
    for copy, tensor in pairs:
        # What comes to an accelerator is read behind its copy; the host must wait for its own.
        copy.copy_(tensor.detach(), non_blocking=device.type == "cuda")
    return views


def _block_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The bytes of the one storage that these tensors fill, or None if there is none."""
    own = sum(tensor.nbytes for tensor in tensors)
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(storages) != 1 or not all(tensor.is_contiguous() for tensor in tensors):
        return None
    storage = tensors[0].untyped_storage()
    if storage.nbytes() > own * _SLACK + ALIGNMENT * len(tensors):
        return None
    return torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(storage)


def _block_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the blocks that tensors keep alive; torch rounds page-locked ones up."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        size = tensor.untyped_storage().nbytes()
        if size and tensor.device.type == "cpu" and torch.cuda.is_available():
            size = 1 << (size - 1).bit_length() if tensor.is_pinned() else size
        sizes[tensor.untyped_storage().data_ptr()] = size
    return sum(sizes.values())


_device_of = attrgetter("device")


def placed(window: Window, devices: Sequence[torch.device]) -> Window:
    """A window whose layers are on these devices, one a layer of the model; itself if they are."""
    wanted = window.placed_on(devices)
    if window.packed is not None and all(device.type == "cpu" for device in wanted):
        return window
    return window if [*map(_device_of, window.tensors)] == wanted else _in_blocks(window, wanted)


def _in_blocks(window: Window, wanted: Sequence[torch.device], *, pin: bool = False) -> Window:
    """The same with its tensors on these devices."""
    made = [*window.tensors]
    for device in dict.fromkeys(wanted):
        pairs = enumerate(zip(made, wanted, strict=True))
        places = [index for index, (_, other) in pairs if other == device]
        block = _in_one_block([made[index] for index in places], device, pin=pin)
        for index, tensor in zip(places, block, strict=True):
            made[index] = tensor
    return window.holding(made)


def compact(window: Window) -> Window:
    """The same window in one block of its own (one a device), so that it keeps no batch alive."""
    return _in_blocks(window, [tensor.device for tensor in window.tensors])


def to_host(window: Window) -> Window:
    """A compact window in host memory, by a stream of its own into pinned memory from CUDA."""
    if window.packed is not None:
        return window
    device, host = window.tensors[0].device, [HOST] * len(window.tensors)
    if device.type != "cuda":
        on_host = all(tensor.device == HOST for tensor in window.tensors)
        return window if on_host else _in_blocks(window, host)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        return _in_blocks(window, host, pin=True)
