"""What the kernel is asked: which tokens read which keys."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from rag_windows.attention.native.building import ELEMENTS
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
class Reading:
    """Some tokens that read the same keys.

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
    """Readings as the kernel takes them; made once, asked as often as there are queries.

    Attributes:
        readings: their number.
        table: (readings, 6) int64: its first segment, their number, their chunks, its first
            result, their number, whether it is causal.
        segments: (segments, 7) int64: addresses, keys and strides.
        settings: (readings, 3) float: scale, soft cap (0 for none) and 1 / temperature.
        order: (results,) int64, the token of each result.
        kv_heads: of the keys.
        value_dim: of the values.
        shares: into which a reading may be cut.

    Args:
        readings: at least one. Their tensors are kept, since the tables hold their addresses.

    Raises:
        RagWindowsError: they do not fit each other or the kernel, which trusts the tables.
    """

    __slots__ = (
        "_dim",
        "_dtype",
        "_kept",
        "_last_token",
        "kv_heads",
        "order",
        "readings",
        "segments",
        "settings",
        "shares",
        "table",
        "value_dim",
    )

    def __init__(self, readings: Sequence[Reading]) -> None:
        _check(readings)
        self._kept = [segment for reading in readings for segment in reading.segments]
        chunks = [
            sum(-(-key.shape[1] // CHUNK) for key, _ in reading.segments) for reading in readings
        ]
        segments = [len(reading.segments) for reading in readings]
        results = [len(reading.tokens) for reading in readings]
        ends = zip(accumulate(segments), accumulate(results), strict=True)
        causal = [int(reading.causal) for reading in readings]
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
        for one in readings:
            self.settings.extend((one.scale, one.softcap or 0.0, 1.0 / one.temperature))
        self.order = array("q", [token for reading in readings for token in reading.tokens])
        self.readings = len(readings)
        key, value = self._kept[0]
        self.kv_heads, _, self._dim = key.shape
        self._dtype = key.dtype
        self._last_token = max(max(reading.tokens) for reading in readings)
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


def _check(readings: Sequence[Reading]) -> None:
    if not (readings and readings[0].segments):
        raise RagWindowsError("The CPU kernel needs a reading, and keys in it.")
    first, values = readings[0].segments[0]
    kv_heads, _, dim = first.shape
    value_dim = values.shape[-1]
    if first.dtype not in ELEMENTS or not sizes_fit(dim, value_dim):
        raise RagWindowsError(
            f"There is no CPU kernel for {first.dtype}, head dim {dim} and value dim {value_dim}."
        )
    for reading in readings:
        if not (reading.segments and len(reading.tokens) > 0 and min(reading.tokens) >= 0):
            raise RagWindowsError("The CPU kernel needs tokens and keys in each reading.")
        for key, value in reading.segments:
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
