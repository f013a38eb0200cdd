"""The tier in memory, the host's or an accelerator's, and how windows get there and back."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from rag_windows.cache.codec import EXACT, Entry, Stored, check_store, decode, encode
from rag_windows.cache.counters import TierStats
from rag_windows.cache.keys import check_key
from rag_windows.cache.policy import Policy
from rag_windows.kv import Window
from rag_windows.loading import input_device
from rag_windows.threads import in_children

ALIGNMENT = 64
"""Bytes on whose multiples tensors start within a block; what CPU kernels like best."""

_SLACK = 1.25  # a storage holds at most so many times its tensors' own bytes, or it is no block
_OBJECT_BYTES = 1024  # of an entry without tensors and ids: the objects, the policy's bookkeeping
_TENSOR_BYTES = 512  # of one tensor's object


@dataclass(frozen=True, slots=True)
class _Held:
    """An entry: with its window if decoding costs nothing, else without keys beside `stored`."""

    entry: Entry
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
        store: name of the stored form.
        device: where the tensors are kept; in host memory they are page-locked if there is a CUDA
            device.
    """

    def __init__(
        self,
        limit_bytes: int,
        store: str = EXACT,
        device: torch.device = torch.device("cpu"),  # noqa: B008 - it is immutable
    ) -> None:
        self._store = check_store(store)
        self._device = device
        self._pin = device.type == "cpu" and torch.cuda.is_available()
        self._policy = Policy(limit_bytes)
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._counts: Counter[str] = Counter()
        self._closed = False
        in_children(self)

    def after_fork(self) -> None:
        """Keep what is held, unless a thread was changing it just then."""
        if self._lock.locked():
            self._policy = Policy(self._policy.limit_bytes)
            self._held = {}
        # Even if it says that it is free: a thread that is about to get it has not said so yet.
        self._lock = threading.Lock()

    def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        """Return the entries that are there; every key counts once, however often it is named."""
        wanted = dict.fromkeys(map(check_key, keys))
        now = time.time()
        found: dict[str, _Held] = {}
        with self._lock:
            for key in wanted:
                self._policy.touch(key)
            there = {key: self._held[key] for key in wanted if key in self._held}
            late = self._drop([key for key, held in there.items() if held.entry.expired(now)])
            found = {key: held for key, held in there.items() if key in self._held}
            missing = len(wanted) - len(found)
            self._counts.update(hits=len(found), misses=missing, expired=len(late))
        return {key: self._read(held) for key, held in found.items()}

    def put(self, key: str, entry: Entry) -> bool:
        """Keep an entry; False if it was refused."""
        check_key(key)
        stored = encode(self._store, entry.window)
        victims: list[str] | None = None
        dropped: list[_Held] = []  # freed after the lock is
        outcome = "refused"
        if sum(tensor.nbytes for tensor in stored.tensors) <= self._policy.limit_bytes:
            try:
                tensors = in_one_block(stored.tensors, self._device, pin=self._pin)
            except MemoryError:
                outcome = "failed"
            else:
                held = self._holding(Stored(tensors, stored.description), entry)
                with self._lock:
                    if not self._closed:
                        victims = self._policy.admit(key, held.nbytes, entry.cost_s)
                    if victims is not None:
                        dropped = [self._held.pop(victim) for victim in victims]
                        dropped += [self._held[key]] if key in self._held else []
                        self._held[key] = held
                        outcome = "stored"
        with self._lock:
            self._counts.update({outcome: 1, "evictions": len(victims or ())})
        return outcome == "stored"

    def add_labels(self, key: str, labels: Iterable[str]) -> None:
        """Give an entry these labels beside its own."""
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                merged = tuple(dict.fromkeys((*held.entry.labels, *labels)))
                self._held[key] = replace(held, entry=replace(held.entry, labels=merged))

    def remove(self, keys: Iterable[str]) -> int:
        """Drop entries; returns how many there were."""
        wanted = list(dict.fromkeys(map(check_key, keys)))
        with self._lock:
            dropped = self._drop(wanted)
            self._counts.update(removed=len(dropped))
        return len(dropped)

    def clear(self) -> None:
        """Drop all entries. Counters stay, counted uses don't."""
        with self._lock:
            dropped, self._held = self._held, {}
            self._policy.clear()
            self._counts.update(removed=len(dropped))

    def prune(self, now: float) -> int:
        """Drop what is expired at unix time `now`; returns how much."""
        with self._lock:
            late = [key for key, held in self._held.items() if held.entry.expired(now)]
            dropped = self._drop(late)
            self._counts.update(expired=len(dropped))
        return len(dropped)

    def keys_with(self, labels: Collection[str]) -> list[str]:
        """Keys of the entries that carry any of these labels."""
        wanted = set(labels)
        with self._lock:
            there = list(self._held.items())
        return [key for key, held in there if not wanted.isdisjoint(held.entry.labels)]

    def close(self) -> None:
        """Let everything go and take in nothing more."""
        with self._lock:
            self._closed = True
        self.clear()

    def __contains__(self, key: str) -> bool:
        check_key(key)
        with self._lock:
            held = self._held.get(key)
        return held is not None and not held.entry.expired(time.time())

    def stats(self) -> TierStats:
        """Counters since the tier was made, and what it holds now."""
        with self._lock:
            limit, size = self._policy.limit_bytes, self._policy.nbytes
            return TierStats(len(self._held), size, limit, **self._counts)

    def _holding(self, stored: Stored, entry: Entry) -> _Held:
        window = entry.window
        nbytes = block_bytes(stored.tensors) + _OBJECT_BYTES + _TENSOR_BYTES * len(stored.tensors)
        # An int of CPython takes 28 bytes, in steps of 16.
        nbytes += sys.getsizeof(window.ids) + 32 * len(window.ids)
        nbytes += sum(sys.getsizeof(label) for label in entry.labels)
        if self._store == EXACT:
            decoded = decode(EXACT, stored, window.ids, window.start)
            return _Held(replace(entry, window=decoded), None, nbytes)
        return _Held(replace(entry, window=replace(window, keys=(), values=())), stored, nbytes)

    def _read(self, held: _Held) -> Entry:
        if held.stored is None:
            return held.entry
        window = held.entry.window
        decoded = decode(self._store, held.stored, window.ids, window.start)
        return replace(held.entry, window=decoded)

    def _drop(self, keys: Iterable[str]) -> list[_Held]:
        return [self._held.pop(key) for key in keys if self._policy.forget(key)]


# Blocks of memory


def in_one_block(
    tensors: Sequence[torch.Tensor], device: torch.device, *, pin: bool = False
) -> tuple[torch.Tensor, ...]:
    """The tensors as contiguous views of one block on a device that holds just them.

    A slice keeps the whole batch that it was cut from alive; these don't. Tensors that share such a
    block already are returned as they are.

    Args:
        tensors: of any shapes and dtypes, on any devices.
        device: where the block is to be.
        pin: in page-locked host memory, from which copies to an accelerator run beside its other
            work.

    Raises:
        MemoryError: there is no room for the block.
    """
    block = _block_of(tensors)
    if block is not None and block.device == device and (not pin or tensors[0].is_pinned()):
        return tuple(tensor.detach() for tensor in tensors)
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    try:
        block = torch.empty(end, dtype=torch.uint8, device=device, pin_memory=pin)
    except RuntimeError as error:  # what torch's allocators raise
        raise MemoryError(f"no {end} bytes on {device}") from error
    copies = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        copy = block[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(copy.copy_(tensor.detach(), non_blocking=pin))
    if pin:
        torch.cuda.synchronize()
    return tuple(copies)


def block_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes that tensors keep alive: those of their blocks, each counted once.

    Page-locked blocks count as torch allocates them, rounded up to a power of two.
    """
    sizes: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size and tensor.device.type == "cpu" and torch.cuda.is_available():
            size = 1 << (size - 1).bit_length() if tensor.is_pinned() else size
        sizes[storage.data_ptr()] = size
    return sum(sizes.values())


def compact(window: Window) -> Window:
    """The same window in one block of its own (one a device), so that it keeps no batch alive."""
    made = [*window.keys, *window.values]
    for device in dict.fromkeys(tensor.device for tensor in made):
        places = [index for index, tensor in enumerate(made) if tensor.device == device]
        block = in_one_block([made[index] for index in places], device)
        for index, tensor in zip(places, block, strict=True):
            made[index] = tensor
    return _rebuilt(window, made)


def to_host(window: Window) -> Window:
    """A compact window in host memory, pinned if it comes from CUDA; waits for the copy.

    For a thread of its own: it uses a stream of its own, so that the model's is not held up.
    """
    tensors = (*window.keys, *window.values)
    block = _block_of(tensors)
    if tensors[0].device.type != "cuda" or block is None:
        return compact(_rebuilt(window, [tensor.cpu() for tensor in tensors]))
    host = torch.empty(block.shape, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream(block.device)
    with torch.cuda.stream(stream):
        host.copy_(block, non_blocking=True)
    stream.synchronize()
    return _rebuilt(window, [_same_part(host, tensor) for tensor in tensors])


def ready(devices: Iterable[torch.device]) -> Callable[[], None]:
    """Mark what the current streams have been given; the result waits until that is done."""
    events = [
        torch.cuda.current_stream(device).record_event()
        for device in dict.fromkeys(devices)
        if device.type == "cuda"
    ]

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait


class Mover:
    """Brings windows to where a model's layers are, given as the device of each layer.

    On CUDA the copies run on a stream of their own: between `start` and `finish` the model can
    encode other windows. Pinned host memory is copied without the processor's help.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = (*devices, *devices)  # of keys, of values
        cuda = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        self._streams = {device: torch.cuda.Stream(device) for device in cuda}
        self._used: list[torch.Tensor] = []

    def start(self, window: Window) -> Window:
        """Begin to copy a window; its tensors may be read after `finish`."""
        tensors = (*window.keys, *window.values)
        wanted = dict(enumerate(self._devices))
        if all(tensor.device == wanted[index] for index, tensor in enumerate(tensors)):
            return window
        block = _block_of(tensors)
        if block is not None and len(set(self._devices)) == 1:
            moved = self._copy(block, wanted[0])
            return _rebuilt(window, [_same_part(moved, tensor) for tensor in tensors])
        return _rebuilt(window, [self._copy(t, wanted[index]) for index, t in enumerate(tensors)])

    def finish(self) -> None:
        """Make the current streams wait for the copies."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        for tensor in self._used:
            # The allocator must not hand this memory out while the current stream reads it.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        self._used.clear()

    def _copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        stream = self._streams.get(device)
        if stream is None:
            return tensor.to(device)
        if tensor.device.type == "cuda":
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            moved = tensor.to(device, non_blocking=True)
        self._used.append(moved)
        return moved


def layer_devices(model: PreTrainedModel, layers: int) -> tuple[torch.device, ...]:
    """Where each layer's attention is computed."""
    found = [input_device(model)] * layers
    for module in model.modules():
        index = module.__dict__.get("layer_idx")
        weight = next(module.parameters(), None)
        if not isinstance(index, int) or not 0 <= index < layers or weight is None:
            continue
        placed = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if weight.device.type != "meta":
            found[index] = weight.device
        elif placed is not None:
            found[index] = torch.device("cuda", placed) if isinstance(placed, int) else placed
    return tuple(found)


def _block_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The bytes of the one storage that these tensors fill, or None if there is no such one."""
    if not tensors:
        return None
    storage = tensors[0].untyped_storage()
    own = 0
    for tensor in tensors:
        if tensor.untyped_storage().data_ptr() != storage.data_ptr() or not tensor.is_contiguous():
            return None
        own += tensor.nbytes
    if storage.nbytes() > own * _SLACK + ALIGNMENT * len(tensors):
        return None
    return torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(storage)


def _same_part(block: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The part of `block` that `tensor` is of its own storage."""
    start = tensor.storage_offset() * tensor.element_size()
    return block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _rebuilt(window: Window, tensors: Sequence[torch.Tensor]) -> Window:
    layers = len(window.keys)
    return Window(window.ids, window.start, tuple(tensors[:layers]), tuple(tensors[layers:]))
