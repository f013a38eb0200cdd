"""The C kernel for attention on CPUs: what it is asked, how it is called, when it serves."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch.profiler import record_function

from rag_windows.attention.backends import reference
from rag_windows.attention.backends.request import Request, names
from rag_windows.attention.native.building import ELEMENTS, kernel
from rag_windows.errors import RagWindowsError

CHUNK = 256
"""Keys that it reads at a time."""

STEP = 16
"""Head and value dims are multiples of it."""

MAX_DIM = 512
"""Of either: what a thread's stack has room for."""

MAX_STEP = 2**26
"""Elements from one key to the next: it counts the bytes between 16 keys in 32 bits."""


@dataclass(frozen=True, slots=True)
class Item:
    """Tokens that read the same keys: one question of a call.

    Attributes:
        segments: keys (kv heads, n, head dim) and values (kv heads, n, value dim), n >= 1 for each
            of them; together they are one segment of the attention. At least one.
        tokens: places in the query.
        scale: multiplies the logits.
        softcap: caps them, or None.
        temperature: divides them, after the soft cap.
        causal: the i-th of the tokens sees the first i + 1 keys alone.
    """

    segments: Sequence[tuple[torch.Tensor, torch.Tensor]]
    tokens: Sequence[int]
    scale: float
    softcap: float | None
    temperature: float
    causal: bool = False


def sizes_fit(dim: int, value_dim: int) -> bool:
    """Whether the kernel can be made for a head dim and a value dim."""
    return 0 < dim <= MAX_DIM and 0 < value_dim <= MAX_DIM and dim % STEP == value_dim % STEP == 0


class Items:
    """Items as the kernel takes them; made once, asked as often as there are queries.

    Attributes:
        count: their number.
        table: (items, 6) int64: its first segment, their number, their chunks, its first
            result, their number, whether it is causal.
        segments: (segments, 7) int64: addresses, keys and strides.
        settings: (items, 3) float: scale, soft cap (0 for none) and 1 / temperature.
        order: (results,) int64, the token of each result.
        kv_heads: of the keys.
        value_dim: of the values.
        shares: into which an item may be cut.

    Args:
        items: at least one. Their tensors are kept, since the tables hold their addresses.

    Raises:
        RagWindowsError: they do not fit each other or the kernel, which trusts the tables.
    """

    __slots__ = (
        "_dim",
        "_dtype",
        "_kept",
        "_last_token",
        "count",
        "kv_heads",
        "order",
        "segments",
        "settings",
        "shares",
        "table",
        "value_dim",
    )

    def __init__(self, items: Sequence[Item]) -> None:
        _check(items)
        self._kept = [segment for item in items for segment in item.segments]
        chunks = [sum(-(-key.shape[1] // CHUNK) for key, _ in item.segments) for item in items]
        segments = [len(item.segments) for item in items]
        results = [len(item.tokens) for item in items]
        ends = zip(accumulate(segments), accumulate(results), strict=True)
        causal = [int(item.causal) for item in items]
        rows = zip(ends, segments, chunks, results, causal, strict=True)
        # Plain arrays: making a tensor of a few numbers takes as long as reading hundreds of keys.
        self.table = array("q")
        for (last, end), count, length, tokens, masked in rows:
            self.table.extend((last - count, count, length, end - tokens, tokens, masked))
        self.segments = array("q")
        for key, value in self._kept:
            addresses = key.data_ptr(), value.data_ptr()
            strides = *key.stride()[:2], *value.stride()[:2]
            self.segments.extend((*addresses, key.shape[1], *strides))
        self.settings = array("f")
        for one in items:
            self.settings.extend((one.scale, one.softcap or 0.0, 1.0 / one.temperature))
        self.order = array("q", [token for item in items for token in item.tokens])
        self.count = len(items)
        key, value = self._kept[0]
        self.kv_heads, _, self._dim = key.shape
        self._dtype = key.dtype
        self._last_token = max(max(item.tokens) for item in items)
        self.value_dim = value.shape[2]
        # What a text gives itself may not depend on how many stand beside it.
        self.shares = 1 if any(causal) else max(chunks)

    def fit(self, query: torch.Tensor) -> bool:
        """Whether the kernel can read such a query (tokens, heads, head dim) for these."""
        tokens, heads, dim = query.shape
        return (
            query.dtype == self._dtype
            and query.device.type == "cpu"
            and query.stride(2) == 1
            and dim == self._dim
            and tokens > self._last_token
            and heads % self.kv_heads == 0
            and heads > 0
        )


def _check(items: Sequence[Item]) -> None:
    if not (items and items[0].segments):
        raise RagWindowsError("The CPU kernel needs an item, and keys in it.")
    first, values = items[0].segments[0]
    kv_heads, _, dim = first.shape
    value_dim = values.shape[-1]
    if first.dtype not in ELEMENTS or not sizes_fit(dim, value_dim):
        raise RagWindowsError(
            f"There is no CPU kernel for {first.dtype}, head dim {dim} and value dim {value_dim}."
        )
    for item in items:
        if not (item.segments and len(item.tokens) > 0 and min(item.tokens) >= 0):
            raise RagWindowsError("The CPU kernel needs tokens and keys in each item.")
        for key, value in item.segments:
            length = key.shape[1]
            if not (
                length > 0
                and key.shape == (kv_heads, length, dim)
                and value.shape == (kv_heads, length, value_dim)
                and key.dtype == value.dtype == first.dtype
                and key.stride(2) == value.stride(2) == 1
                and key.stride(1) <= MAX_STEP
                and key.device.type == value.device.type == "cpu"
            ):
                raise RagWindowsError(
                    "The CPU kernel reads keys and values on the CPU, of one dtype and one size, "
                    "dense in their last dimension and near each other, at least one of each."
                )


NAME = "rag_windows::attend"
"""What a profiler shows it as."""

_SHARES = 2
"""Tasks a thread is given at least, where the keys suffice: threads do not end at once."""


def call(items: Items, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a query's tokens over what the items say.

    Args:
        items: whose keys have the query's dtype.
        query: (tokens, heads, head dim) on the CPU, the last dimension contiguous.

    Returns:
        Output (results, heads, value dim) in the query's dtype and lse (results, heads), fp32; a
        result for each token of each item, in their order.

    Raises:
        RagWindowsError: there is no kernel (`rag_windows.attention.native.kernel` says when),
            or the items do not fit the query.
    """
    if not items.fit(query):
        raise RagWindowsError(
            "The CPU kernel takes a query of the items' dtype and head dim, with all their tokens."
        )
    _, heads, dim = query.shape
    value_dim = items.value_dim
    made = kernel(query.dtype, dim, value_dim)
    if made is None:
        raise RagWindowsError("There is no CPU kernel for this; ask `serves` first.")
    results, threads = len(items.order), torch.get_num_threads()
    tasks = items.count * items.kv_heads
    splits = min(-(-threads * _SHARES // tasks), items.shares)
    output = query.new_empty(results, heads, value_dim)
    lse = query.new_empty(results, heads, dtype=torch.float32)
    work = query.new_empty(results * heads * splits * (value_dim + 2), dtype=torch.float32)
    with record_function(NAME):
        made.run(
            items.table.buffer_info()[0],
            items.settings.buffer_info()[0],
            items.count,
            items.segments.buffer_info()[0],
            items.order.buffer_info()[0],
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
            threads,
        )
    return output, lse


logger = logging.getLogger(__name__)

MOST_ROWS = 16
"""Tokens times query heads of a kv head, where the kernel is made for few; with more, PyTorch's is
as fast or faster."""

LEAST_KEYS = 1024
"""Below, what a call costs by itself outweighs what the kernel saves."""

LEAST_TOKENS = 128
"""The same, of texts that see themselves alone: tokens of all."""

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_LSE_TOLERANCE = 1e-4


def active() -> bool:
    """Whether it is asked in this thread or task."""
    return "native" in names("cpu")


def reads(dtype: torch.dtype, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernel reads such keys (kv heads, keys, head dim) and values."""
    return (
        key.device.type == "cpu"
        and dtype == key.dtype == value.dtype
        and key.stride(-1) == value.stride(-1) == 1
        and key.shape[1] > 0
        and available(dtype, key.shape[-1], value.shape[-1])
    )


def available(dtype: torch.dtype, dim: int, value_dim: int) -> bool:
    """Whether there is a kernel of these sizes, and agrees with the reference."""
    return (
        dtype in ELEMENTS
        and sizes_fit(dim, value_dim)
        and kernel(dtype, dim, value_dim) is not None
        and _agrees(dtype, dim, value_dim)
    )


def most_rows(dtype: torch.dtype, dim: int, value_dim: int) -> float:
    """Tokens times query heads of a kv head for which it is the fastest; ``inf`` for any number."""
    made = kernel(dtype, dim, value_dim)
    return math.inf if made is not None and made.many else MOST_ROWS


def takes(
    query: torch.Tensor,
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    rows: int,
    *,
    causal: bool,
) -> bool:
    """Whether the kernel answers for a segment, and rightly on this machine.

    Args:
        query: (tokens, heads, head dim).
        parts: keys (groups, kv heads, keys, head dim) and values of the segment.
        rows: tokens of a group times query heads of a kv head.
        causal: whether the i-th token of a group sees the first i + 1 keys alone.
    """
    key, value = parts[0]
    if not all(len(k) > 0 and reads(query.dtype, k[0], v[0]) for k, v in parts):
        return False
    most = most_rows(query.dtype, key.shape[-1], value.shape[-1])
    return (
        rows <= most
        and (not causal or most == math.inf)
        and query.stride(-1) == 1
        and not (torch.is_grad_enabled() and _differentiated(query, key, value))
    )


def pays(items: Sequence[Item]) -> bool:
    """Whether a call is worth what it costs by itself, or several items share it."""
    if not items:
        return False
    if all(one.causal for one in items):
        return sum(len(one.tokens) for one in items) >= LEAST_TOKENS
    return len(items) > 1 or sum(k.shape[1] for k, _ in items[0].segments) >= LEAST_KEYS


def _differentiated(*tensors: torch.Tensor) -> bool:
    """Whether gradients are asked for, which the kernel does not give."""
    return any(tensor.requires_grad for tensor in tensors)


@cache
def _agrees(dtype: torch.dtype, dim: int, value_dim: int) -> bool:
    """Ask the kernel small questions and compare with the reference.

    Where it answers otherwise it is left out: a backend may never change what comes out.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    questions = []
    # A row of each kv head, then more than one tile of rows, then a text that sees itself.
    for rows, keys, softcap, causal in (
        (1, 700, None, False),
        (1, 700, 3.0, False),
        (50, 700, None, False),
        (50, 700, 3.0, False),
        (300, 300, None, True),
    ):
        query, key, value = (
            draw(1, 6, rows, dim),
            draw(1, 2, keys, dim),
            draw(1, 2, keys, value_dim),
        )
        heat = 1.0 if causal else 0.7
        request = Request(query, key, value, dim**-0.5, heat, softcap, causal)
        item = Item([(key[0], value[0])], range(rows), dim**-0.5, softcap, heat, causal)
        output, lse = call(Items([item]), query[0].transpose(0, 1))
        own = output.transpose(0, 1).unsqueeze(0), lse.transpose(0, 1).unsqueeze(0)
        questions.append((own, reference.attend(request)))
    for (output, lse), (expected, expected_lse) in questions:
        if not (
            torch.allclose(output.float(), expected.float(), atol=_TOLERANCE[dtype])
            and torch.allclose(lse, expected_lse, atol=_LSE_TOLERANCE)
        ):
            logger.warning("The CPU kernel for %s differs from the reference.", dtype)
            return False
    return True
