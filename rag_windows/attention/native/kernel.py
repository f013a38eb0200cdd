"""The C kernel for attention on CPUs: a backend that answers many requests by one call."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from rag_windows.attention.backends import (
    AttentionAnswer,
    AttentionRequest,
    Backend,
    Part,
    PreparedCall,
    agrees,
    sound,
)
from rag_windows.attention.native import build
from rag_windows.errors import RagWindowsError

logger = logging.getLogger(__name__)

NAME = "rag_windows::attend"
"""What a profiler shows it as."""

CHUNK = 256
"""Keys that it reads at a time."""

MAX_DIM = 512
"""Largest head and value dim, which a thread's stack can hold. They are multiples of 16."""

MOST_ROWS = 16
"""Tokens times query heads of a kv head, where the kernel is made for few; with more, PyTorch's is
as fast or faster."""

LEAST_KEYS = 1024
LEAST_TOKENS = 128
"""Keys, or tokens of texts that see themselves, below which a call costs more than it saves."""

_SHARES = 2
"""Tasks a thread is given at least, where the keys suffice: threads do not end at once."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """``rag_windows_attend`` of ``attend.c`` for one dtype and head size.

    ``many`` says whether this processor has what makes it fast for many rows, too.
    """

    run: Callable[..., None]
    many: bool


def kernel(dtype: torch.dtype, dim: int, value_dim: int, packed: bool = False) -> Kernel | None:
    """The kernel for one dtype, head dim and value dim, built by the first call; for any thread.

    With ``packed``, keys and values are in 8 bits a number.

    None where it is switched off (`build.VARIABLE`), is not made for such sizes, can't be built on
    this machine, or answers otherwise than the reference.
    """
    return None if build.switched_off() else _kernels((dtype, dim, value_dim, packed))


def _checked(asked: tuple[torch.dtype, int, int, bool]) -> Kernel | None:
    dtype, dim, value_dim, packed = asked
    fitting = all(0 < size <= MAX_DIM and size % 16 == 0 for size in (dim, value_dim))
    if dtype not in build.ELEMENTS or not fitting:
        return None
    loaded = build.library(
        "attend.c",
        ELEMENT=build.ELEMENTS[dtype],
        DIM=dim,
        VALUE_DIM=value_dim,
        PACKED=int(packed),
    )
    if loaded is None:
        return None
    entry: Any = loaded.rag_windows_attend
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    entry.restype = None
    entry.argtypes = [
        *(pointer, pointer, number),
        *(pointer, pointer, number),
        *(pointer, number, number, number, number),
        *(pointer, pointer, pointer, number, pointer, pointer, ctypes.c_int),
    ]
    made = Kernel(entry, bool(ctypes.c_int.in_dll(loaded, "rag_windows_many").value))

    def answer(requests: list[AttentionRequest], query: torch.Tensor) -> AttentionAnswer:
        return NativeCall(requests, query, made)(query, per_part=True)

    sizes, device = (dim, value_dim), torch.device("cpu")
    about = dtype, sizes
    if not all(agrees(answer, device, *about, softcap=cap, packed=packed) for cap in (None, 3.0)):
        logger.warning("The CPU kernel for %s differs from the reference.", dtype)
        return None
    return made


_kernels = build.SingleFlight(_checked)


class NativeBackend(Backend):
    """The kernel as a backend."""

    def serves(self, request: AttentionRequest, query: torch.Tensor) -> bool:
        """See `Backend.serves`; it takes no mask."""
        if query.device.type != "cpu" or query.stride(2) != 1 or request.mask is not None:
            return False
        if not sound(request, query):
            return False
        if not all(key.stride(3) == value.stride(3) == 1 for key, value in request.parts):
            return False
        key, value = request.parts[0]
        made = kernel(query.dtype, key.shape[3], value.shape[3], request.peaks is not None)
        tokens = len(query) if request.tokens is None else len(request.tokens)
        rows = tokens // request.groups * (query.shape[1] // key.shape[1])
        return made is not None and (made.many or (not request.causal and rows <= MOST_ROWS))

    def pays(self, requests: Sequence[AttentionRequest]) -> bool:
        """Whether there are enough keys, or several groups share the call's cost."""
        texts = [one for one in requests if one.causal]
        if len(texts) == len(requests):
            # As many tokens as keys see themselves.
            return sum([one.groups * one.keys for one in texts]) >= LEAST_TOKENS
        return len(requests) > 1 or requests[0].groups > 1 or requests[0].keys >= LEAST_KEYS

    def prepare(self, requests: Sequence[AttentionRequest], query: torch.Tensor) -> PreparedCall:
        """See `Backend.prepare`."""
        return NativeCall(requests, query)


class NativeCall:
    """Requests of one layer, in the kernel's form, answered for one query after the other.

    Attributes:
        table: (groups of all, 8) int64: each one's first segment, their number, their chunks, its
            first result, their number, whether it is causal; results times chunks, and results
            times segments, of the groups before it.
        segments: (segments, 9) int64: addresses, keys, strides, and addresses of peaks or 0.
        settings: (groups of all, 3) float: scale, soft cap (0 for none) and 1 / temperature.
        order: (results,) int64, the token of each result.
        shares: into which a group's keys may be cut.
    """

    def __init__(
        self, requests: Sequence[AttentionRequest], query: torch.Tensor, made: Kernel | None = None
    ) -> None:
        self._parts = [part for one in requests for part in one.parts]
        self._peaks = [peaks for one in requests for peaks in one.peaks or ()]
        key, value = self._parts[0]
        self.dtype, self.kv_heads, self.dim = query.dtype, key.shape[1], key.shape[3]
        self.value_dim = value.shape[3]
        if any(one.shape[3] != self.value_dim for _, one in self._parts):
            raise RagWindowsError(
                "The CPU kernel got values of several sizes. This is a bug in "
                "rag-windows: please report it."
            )
        sizes_of = self.dtype, self.dim, self.value_dim, bool(self._peaks)
        self.made = made or cast(Kernel, kernel(*sizes_of))
        places = [one.places(query) for one in requests]
        sizes = zip(requests, map(len, places), strict=True)
        self._shapes = [(one.groups, len(one.parts), tokens) for one, tokens in sizes]
        tables, segments, settings = [], [], []
        first = result = 0
        for request, (groups, parts, tokens) in zip(requests, self._shapes, strict=True):
            rows = _segments(request)
            segments.append(rows.reshape(-1, 9))
            readers = tokens // groups
            table = np.empty((groups, 8), dtype=np.int64)
            index = np.arange(groups)
            table[:, 0] = first + index * parts
            table[:, 1] = parts
            table[:, 2] = ((rows[:, :, 2] + CHUNK - 1) // CHUNK).sum(axis=1)
            table[:, 3] = result + index * readers
            table[:, 4:6] = readers, request.causal
            tables.append(table)
            one = request.scale, request.softcap or 0.0, 1.0 / request.temperature
            settings.append(np.full((groups, 3), one, dtype=np.float32))
            first += groups * parts
            result += tokens
        self.table, self.segments = np.concatenate(tables), np.concatenate(segments)
        for column, counted in ((6, 2), (7, 1)):
            rows = self.table[:, 4] * self.table[:, counted]
            self.table[:, column] = np.cumsum(rows) - rows
        self._chunk_rows = int((self.table[:, 4] * self.table[:, 2]).sum())
        self._part_rows = int((self.table[:, 4] * self.table[:, 1]).sum())
        self.settings = np.concatenate(settings)
        self.order = np.concatenate([one.numpy() for one in places])
        arrays = self.table, self.settings, self.segments, self.order
        self.addresses = [array.ctypes.data for array in arrays]
        self.tokens = int(self.order.max()) + 1
        self._causal = any(one.causal for one in requests)
        # What a text gives itself may not depend on how many stand beside it.
        self.shares = 1 if self._causal else int(self.table[:, 2].max())

    def __call__(self, query: torch.Tensor, *, per_part: bool = False) -> AttentionAnswer:
        """See `PreparedCall`."""
        tokens, heads, dim = query.shape
        fits = query.dtype == self.dtype and dim == self.dim and query.stride(2) == 1
        if not fits or tokens < self.tokens or heads % self.kv_heads:
            raise RagWindowsError(
                "The CPU kernel got another query than it was made for. This is a bug in "
                "rag-windows: please report it."
            )
        results, groups, threads = len(self.order), len(self.table), torch.get_num_threads()
        splits = min(-(-threads * _SHARES // (groups * self.kv_heads)), self.shares)
        output = query.new_empty(results, heads, self.value_dim, dtype=torch.float32)
        lse = query.new_empty(results, heads, dtype=torch.float32)
        work = query.new_empty(results * heads * splits * (self.value_dim + 2), dtype=torch.float32)
        chunks, parts = self._lse_buffers(query) if per_part else (None, None)
        table, settings, segments, order = self.addresses
        # To be seen by a profiler takes longer than what else is done here in Python.
        with record_function(NAME) if _profiler_enabled() else nullcontext():
            self.made.run(
                table,
                settings,
                groups,
                segments,
                order,
                results,
                query.data_ptr(),
                query.stride(0),
                query.stride(1),
                self.kv_heads,
                heads // self.kv_heads,
                output.data_ptr(),
                lse.data_ptr(),
                work.data_ptr(),
                splits,
                *(None if buffer is None else buffer.data_ptr() for buffer in (chunks, parts)),
                threads,
            )
        if not per_part:
            return AttentionAnswer(output, lse, None)
        # Where each part is one chunk, the chunks' log-sum-exps are those of the parts.
        return AttentionAnswer(output, lse, self._per_part(chunks if parts is None else parts))

    def _lse_buffers(self, query: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Buffers for the log-sum-exps of chunks and of parts.

        The latter is None where each part is a chunk; both are where each request is a part.
        """
        if all(parts == 1 for _, parts, _ in self._shapes):
            return None, None
        heads = query.shape[1]
        rows = [self._chunk_rows]
        if self._chunk_rows != self._part_rows:
            rows.append(self._part_rows)
        made = [query.new_empty((n, heads), dtype=torch.float32) for n in rows]
        if self._causal:
            # Of chunks that a tile of rows does not see, nothing is written.
            made = [buffer.fill_(-torch.inf) for buffer in made]
        return made[0], made[1] if len(made) > 1 else None

    def _per_part(self, rows: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Rows of parts (results times parts, heads) as (parts, tokens, heads) for each request."""
        made: list[torch.Tensor | None] = []
        first = 0
        for groups, parts, tokens in self._shapes:
            last = first + parts * tokens
            if rows is None or parts == 1:
                made.append(None)
            elif groups == 1:
                made.append(rows[first:last].unflatten(0, (parts, tokens)))
            else:
                own = rows[first:last].unflatten(0, (groups, parts, tokens // groups))
                made.append(own.transpose(0, 1).flatten(1, 2))
            first = last
        return made


def _segments(request: AttentionRequest) -> np.ndarray:
    """(groups, parts, 9) int64: addresses, keys, strides and peaks of a request's parts."""
    if request.groups == 1 and request.between is None:
        # Windows may be hundreds, and each layer has its own.
        peaks = ((0, 0) for _ in request.parts)
        if request.peaks is not None:
            peaks = ((key.data_ptr(), value.data_ptr()) for key, value in request.peaks)
        rows = [
            (
                key.data_ptr(),
                value.data_ptr(),
                key.shape[2],
                *key.stride()[1:3],
                *value.stride()[1:3],
                *of_part,
            )
            for (key, value), of_part in zip(request.parts, peaks, strict=True)
        ]
        return np.array([rows], dtype=np.int64)
    made = np.zeros((request.groups, len(request.parts), 9), dtype=np.int64)
    for place, part in enumerate(request.parts):
        _fill(made[:, place], part, request.between)
    return made


def _fill(rows: np.ndarray, part: Part, between: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    """Write a part's addresses, keys and strides into (groups, 9) rows of the segments' table."""
    first: Any = 0
    keys: Any = part[0].shape[2]
    if between is not None:
        first = between[0].numpy()
        keys = between[1].numpy() - first
    for column, tensor in enumerate(part):
        group, head, token, _ = tensor.stride()
        offsets = np.arange(len(tensor)) * group + first * token
        rows[:, column] = tensor.data_ptr() + offsets * tensor.element_size()
        rows[:, 3 + 2 * column : 5 + 2 * column] = head, token
    rows[:, 2] = keys
