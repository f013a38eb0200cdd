"""The tier on an accelerator: windows in memory that is taken once, where kernels read them.

A kernel for ragged sequences (torch.nn.attention.varlen) answers all windows of a question at once,
one sequence a window, if the keys of a layer have one storage and equal strides, and the values
too. So a layer's keys have one storage for all windows, (tokens, heads, dim), and its values
another, and a window stands at the same tokens in each.
"""

from __future__ import annotations

import logging
import weakref
from bisect import bisect
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch.utils.dlpack import from_dlpack

from rag_windows.cache.codec import EXACT, Entry, settle
from rag_windows.cache.memory import MemoryTier, placed
from rag_windows.cache.policy import Policy
from rag_windows.cache.tier import Outcome
from rag_windows.kv import Window

logger = logging.getLogger(__name__)

ALIGNMENT = 512
"""Bytes on whose multiples storages begin, as those of CUDA's own allocator do."""

HOLES = 0.1
"""Share of the arena that the policy leaves free.

Windows of many lengths never fill it without holes, and those that were evicted while a request
reads them need space as well.
"""


class Ranges:
    """Which of `size` tokens are free. Not thread-safe.

    The smallest free range that is long enough is taken: with two traces of benchmarks/cache.py and
    `HOLES` free, 0 to 1.3% of the windows found none, and 1 to 30% where the first that is long
    enough was taken.
    """

    def __init__(self, size: int) -> None:
        self.size = self.free = size
        self._free = [(0, size)] if size else []

    def take(self, length: int) -> int | None:
        """The start of so many tokens (at least one), or None if no free range is as long."""
        fitting = [
            (end - start, index)
            for index, (start, end) in enumerate(self._free)
            if end - start >= length
        ]
        if not fitting:
            return None
        index = min(fitting)[1]
        start, end = self._free.pop(index)
        if start + length < end:
            self._free.insert(index, (start + length, end))
        self.free -= length
        return start

    def give(self, start: int, length: int) -> None:
        """Give back what was taken; it is joined with its free neighbours."""
        end = start + length
        index = bisect(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end))
        self.free += length


@dataclass(frozen=True, slots=True)
class Lease:
    """A range of an arena: where it begins, and its own tensors over all keys and values."""

    start: int
    planes: tuple[torch.Tensor, ...]

    def filled(self, window: Window) -> Window:
        """A copy, in this range, of a window of this device; it holds the range."""
        places, end = [], self.start + len(window.ids)
        for plane, one in zip(self.planes, (*window.keys, *window.values), strict=True):
            # DLPack says nothing of the strides of a single head, so planes are flat till here.
            tokens = plane.view(-1, one.shape[0], one.shape[2])[self.start : end]
            places.append(tokens.transpose(0, 1).copy_(one.detach()))
        layers = len(window.keys)
        return replace(window, keys=tuple(places[:layers]), values=tuple(places[layers:]))


class Arena:
    """Memory for windows, lent in ranges of tokens. Its owner's lock is held for every call.

    A range comes back when no tensor shares its memory any more, whoever made it. For that, a lease
    has storages of its own over the memory that all share (by DLPack), and their end gives the
    range back. Whoever makes one tensor over several windows must so hold on to all of them.

    Any thread may end a storage, at any moment, also while it holds the lock; so that only notes
    the range. Work that waits on a CUDA stream is no reference. What is copied into the range
    later waits behind it, for all threads of this package compute on one stream; where another one
    reads (`to_host`), the host waits for it before it lets go.

    Args:
        nbytes: memory to take, at once.
        device: where.

    Raises:
        RuntimeError: torch's, if the device has too little memory.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device = device
        self._whole = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._shape: tuple[tuple[int, int, torch.dtype], ...] = ()
        self._planes: list[torch.Tensor] = []
        self._token_bytes = 0
        self._ranges = Ranges(0)
        self._ended: deque[tuple[int, int]] = deque()
        self._ends: Counter[int] = Counter()

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges; none before `suits` was asked of a first window."""
        return self._ranges.size * self._token_bytes

    @property
    def lent(self) -> int:
        """Bytes of the ranges that somebody can still read."""
        self._collect()
        return (self._ranges.size - self._ranges.free) * self._token_bytes

    def suits(self, window: Window) -> bool:
        """Whether a window has the shape and dtype of those stored here; any has if none is.

        None of the model's own cache has: its states are no tokens.
        """
        if window.layers:
            return False
        tensors = *window.keys, *window.values
        shape = tuple((one.shape[0], one.shape[2], one.dtype) for one in tensors)
        if shape != self._shape and not self.lent:
            widths = [heads * dim * dtype.itemsize for heads, dim, dtype in shape]
            self._token_bytes = sum(widths)
            free = max(0, self._whole.nbytes - ALIGNMENT * len(shape))
            length = free // max(1, self._token_bytes)
            self._shape, self._planes, at = shape, [], 0
            for (_, _, dtype), width in zip(shape, widths, strict=True):
                self._planes.append(self._whole[at : at + length * width].view(dtype))
                at += -(-length * width // ALIGNMENT) * ALIGNMENT
            self._ranges = Ranges(length)
        return shape == self._shape

    def bytes_of(self, window: Window) -> int:
        """Bytes that a window which suits takes here."""
        return self._length(window) * self._token_bytes

    def take(self, window: Window) -> Lease | None:
        """A range for a window which suits, or None if no free range is as long."""
        self._collect()
        length = self._length(window)
        start = self._ranges.take(length)
        if start is None:
            return None
        lease = Lease(start, tuple(from_dlpack(plane) for plane in self._planes))
        for plane in lease.planes:
            ended = weakref.finalize(plane.untyped_storage(), self._ended.append, (start, length))
            ended.atexit = False
        return lease

    @staticmethod
    def _length(window: Window) -> int:
        return max(1, len(window.ids))

    def _collect(self) -> None:
        """Free the ranges whose storages have all ended."""
        while self._ended:
            start, length = self._ended.popleft()
            self._ends[start] += 1
            if self._ends[start] == len(self._planes):
                del self._ends[start]
                self._ranges.give(start, length)


class ArenaTier(MemoryTier):
    """A `MemoryTier` whose windows stand in one arena, as they were computed.

    All of the limit is taken when the tier is made, in one piece: each further piece would be a
    further call of a kernel for every layer and token, and a device that is too small shows at the
    first request, not amid a later one. Where the device has not so much, a warning says so and
    the tier keeps nothing. Windows of another model's shape are refused, with a warning, while one
    of the first model's is there.

    Args:
        limit_bytes: of the arena.
        device: where it is. The CPU will do as well, which is how tests see all of this.
    """

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        super().__init__(limit_bytes, EXACT, device)
        self._arena: Arena | None = None
        self._warned = False
        try:
            self._arena = Arena(limit_bytes, device)
        except RuntimeError as error:
            logger.warning(
                "No windows are kept on %s, because it has no %d bytes free for them. Give "
                "PassageCache a smaller device_bytes= (%s).",
                *(device, limit_bytes, str(error).partition("\n")[0]),
            )
        else:
            self._policy = Policy(int(limit_bytes * (1 - HOLES)))

    def after_fork(self) -> None:
        """Keep what is held, unless a thread was changing it just then: then keep nothing more."""
        torn = self._lock.locked()
        super().after_fork()
        if torn:
            self._arena = None

    def close(self) -> None:
        """Drop everything and store nothing more; the memory is freed with its last reader."""
        with self._lock:
            self._arena = None
        super().close()

    def peek(self, keys: Collection[str]) -> dict[str, Entry]:
        """Entries as they stand here, without counting that as a use."""
        with self._lock:
            return {key: self._held[key][0] for key in keys if key in self._held}

    def _holds(self) -> tuple[int, int]:
        with self._lock:
            return len(self._held), 0 if self._arena is None else self._arena.lent

    def _put(self, key: str, entry: Entry) -> Outcome:
        window = settle(EXACT, entry.window)  # with tensors of the lengths that it says
        entry = replace(entry, window=window)
        with self._lock:
            if self._arena is None:
                return "refused" if self._closed else "failed"
            lease = self._lease(self._arena, key, entry)
            if lease is None:
                return "refused"
            # Others may find it, and drop or replace it, before its copy is here.
            self._held[key] = entry, None
        copy: Window | None = None
        try:
            copy = lease.filled(placed(window, [self._device] * len(window.keys)))
        except (MemoryError, RuntimeError) as error:
            # Not the error itself: whoever keeps the record would keep the lease.
            logger.warning("A window is not kept on %s: %s", self._device, str(error))
        with self._lock:
            now = self._held.get(key)
            if now is not None and now[0].window is window:
                if copy is not None:
                    self._held[key] = replace(now[0], window=copy), None
                else:
                    del self._held[key]
                    self._policy.forget(key)
        return "failed" if copy is None else "stored"

    def _lease(self, arena: Arena, key: str, entry: Entry) -> Lease | None:
        """A range for an entry, which the policy then counts as held; or None."""
        if not arena.suits(entry.window):
            if not self._warned:
                logger.warning(
                    "This model's windows are not kept on %s, because another model's windows "
                    "there have another shape. Give each model a PassageCache of its own.",
                    self._device,
                )
            self._warned = True
            return None
        size = arena.bytes_of(entry.window)
        # Evicted windows that are still read take memory that the policy can't give.
        orphans = arena.lent - self._policy.nbytes
        asked = size + max(0, orphans - (arena.nbytes - self._policy.limit_bytes))
        victims = self._policy.admit(key, asked, entry.cost_s)
        if victims is None:
            return None
        if asked > size:
            self._policy.admit(key, size, entry.cost_s)
        for one in (*victims, key):
            self._held.pop(one, None)
        self._counts.update(evictions=len(victims))
        lease = arena.take(entry.window)
        if lease is None:
            self._policy.forget(key)
        return lease
