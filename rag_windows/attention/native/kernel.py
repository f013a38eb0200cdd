"""The C kernel for attention on CPUs: what it is asked, and when it serves."""

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

from rag_windows.attention.items import Answered, Item, Part, agrees, sound
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


def kernel(dtype: torch.dtype, dim: int, value_dim: int) -> Kernel | None:
    """The kernel for one dtype, head dim and value dim, built by the first call; for any thread.

    None where it is switched off (`build.VARIABLE`), is not made for such sizes, can't be built on
    this machine, or answers otherwise than the reference.
    """
    return None if build.switched_off() else _kernels((dtype, dim, value_dim))


def _checked(asked: tuple[torch.dtype, int, int]) -> Kernel | None:
    dtype, dim, value_dim = asked
    fitting = all(0 < size <= MAX_DIM and size % 16 == 0 for size in (dim, value_dim))
    if dtype not in build.ELEMENTS or not fitting:
        return None
    loaded = build.library("attend.c", ELEMENT=build.ELEMENTS[dtype], DIM=dim, VALUE_DIM=value_dim)
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

    def answer(items: list[Item], query: torch.Tensor) -> Answered:
        return call(Items(items, made), query, per_part=True)

    sizes, device = (dim, value_dim), torch.device("cpu")
    if not all(agrees(answer, device, dtype, sizes, softcap=cap) for cap in (None, 3.0)):
        logger.warning("The CPU kernel for %s differs from the reference.", dtype)
        return None
    return made


_kernels = build.SingleFlight(_checked)


def takes(item: Item, query: torch.Tensor) -> bool:
    """Whether the kernel answers for an item and its query (tokens, heads, head dim)."""
    if query.device.type != "cpu" or query.stride(2) != 1 or not sound(item, query):
        return False
    if not all(key.stride(3) == value.stride(3) == 1 for key, value in item.parts):
        return False
    (_, kv_heads, _, dim), value_dim = item.parts[0][0].shape, item.parts[0][1].shape[3]
    made = kernel(query.dtype, dim, value_dim)
    rows = len(item.tokens) // item.groups * (query.shape[1] // kv_heads)
    return made is not None and (made.many or (not item.causal and rows <= MOST_ROWS))


def pays(items: Sequence[Item]) -> bool:
    """Whether a call is worth its cost: it has enough keys, or several groups share it."""
    if not items:
        return False
    if all(one.causal for one in items):
        return sum(len(one.tokens) for one in items) >= LEAST_TOKENS
    groups = sum(one.groups for one in items)
    return groups > 1 or sum(key.shape[2] for key, _ in items[0].parts) >= LEAST_KEYS


class Items:
    """Items of one layer that `takes` accepts, in the kernel's form, prepared for many calls.

    Attributes:
        table: (groups of all, 8) int64: each one's first segment, their number, their chunks, its
            first result, their number, whether it is causal; results times chunks, and results
            times segments, of the groups before it.
        segments: (segments, 7) int64: addresses, keys and strides.
        settings: (groups of all, 3) float: scale, soft cap (0 for none) and 1 / temperature.
        order: (results,) int64, the token of each result.
        shares: into which a group's keys may be cut.
    """

    def __init__(self, items: Sequence[Item], made: Kernel | None = None) -> None:
        self._parts = [part for item in items for part in item.parts]
        key, value = self._parts[0]
        self.dtype, self.kv_heads, self.dim = key.dtype, key.shape[1], key.shape[3]
        self.value_dim = value.shape[3]
        if any(one.shape[3] != self.value_dim for _, one in self._parts):
            raise RagWindowsError(
                "The CPU kernel got values of several sizes. This is a bug in "
                "rag-windows: please report it."
            )
        self.made = made or cast(Kernel, kernel(self.dtype, self.dim, self.value_dim))
        self._shapes = [(item.groups, len(item.parts), len(item.tokens)) for item in items]
        tables, segments, settings = [], [], []
        first = result = 0
        for item, (groups, parts, tokens) in zip(items, self._shapes, strict=True):
            rows = _segments(item)
            segments.append(rows.reshape(-1, 7))
            readers = tokens // groups
            table = np.empty((groups, 8), dtype=np.int64)
            index = np.arange(groups)
            table[:, 0] = first + index * parts
            table[:, 1] = parts
            table[:, 2] = ((rows[:, :, 2] + CHUNK - 1) // CHUNK).sum(axis=1)
            table[:, 3] = result + index * readers
            table[:, 4:6] = readers, item.causal
            tables.append(table)
            one = item.scale, item.softcap or 0.0, 1.0 / item.temperature
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
        self.order = np.concatenate([item.tokens.numpy() for item in items])
        arrays = self.table, self.settings, self.segments, self.order
        self.addresses = [array.ctypes.data for array in arrays]
        self.tokens = int(self.order.max()) + 1
        self._causal = any(item.causal for item in items)
        # What a text gives itself may not depend on how many stand beside it.
        self.shares = 1 if self._causal else int(self.table[:, 2].max())

    def lse_buffers(self, query: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Buffers for the log-sum-exps of chunks and of parts.

        The latter is None where each part is a chunk; both are where each item is a part.
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

    def per_part(self, rows: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Rows of parts (results times parts, heads) as (parts, tokens, heads) for each item."""
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


def _segments(item: Item) -> np.ndarray:
    """(groups, parts, 7) int64: addresses, keys and strides of an item's parts."""
    if item.groups == 1 and item.between is None:
        # Windows may be hundreds, and each layer has its own.
        rows = [
            (
                key.data_ptr(),
                value.data_ptr(),
                key.shape[2],
                *key.stride()[1:3],
                *value.stride()[1:3],
            )
            for key, value in item.parts
        ]
        return np.array([rows], dtype=np.int64)
    made = np.empty((item.groups, len(item.parts), 7), dtype=np.int64)
    for place, part in enumerate(item.parts):
        _fill(made[:, place], part, item.between)
    return made


def _fill(rows: np.ndarray, part: Part, between: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    """Write a part's addresses, keys and strides into (groups, 7) rows of the segments' table."""
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


def call(items: Items, query: torch.Tensor, *, per_part: bool = False) -> Answered:
    """Attention of a query's tokens (tokens, heads, head dim) over the items.

    With ``per_part`` the log-sum-exps of each part are returned as well.
    """
    tokens, heads, dim = query.shape
    fits = query.dtype == items.dtype and dim == items.dim and query.stride(2) == 1
    if not fits or tokens < items.tokens or heads % items.kv_heads:
        raise RagWindowsError(
            "The CPU kernel got another query than it was made for. This is a bug in "
            "rag-windows: please report it."
        )
    results, groups, threads = len(items.order), len(items.table), torch.get_num_threads()
    splits = min(-(-threads * _SHARES // (groups * items.kv_heads)), items.shares)
    output = query.new_empty(results, heads, items.value_dim, dtype=torch.float32)
    lse = query.new_empty(results, heads, dtype=torch.float32)
    work = query.new_empty(results * heads * splits * (items.value_dim + 2), dtype=torch.float32)
    chunks, parts = items.lse_buffers(query) if per_part else (None, None)
    table, settings, segments, order = items.addresses
    # To be seen by a profiler takes longer than what else is done here in Python.
    with record_function(NAME) if _profiler_enabled() else nullcontext():
        items.made.run(
            table,
            settings,
            groups,
            segments,
            order,
            results,
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            items.kv_heads,
            heads // items.kv_heads,
            output.data_ptr(),
            lse.data_ptr(),
            work.data_ptr(),
            splits,
            *(None if buffer is None else buffer.data_ptr() for buffer in (chunks, parts)),
            threads,
        )
    if not per_part:
        return Answered(output, lse, None)
    # Where each part is one chunk, the chunks' log-sum-exps are those of the parts.
    return Answered(output, lse, items.per_part(chunks if parts is None else parts))
