"""An encoded context: what a query is asked against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import DynamicCache

from rag_windows.encoding import Encoder, OnEncoded
from rag_windows.errors import InputError
from rag_windows.rescaling import Method
from rag_windows.windows import PackedWindows, Window, pack


@dataclass(frozen=True, slots=True)
class EncodedContext:
    """Prefix and windows, encoded; immutable, so any number of queries and threads may share it.

    Attributes:
        prefix_ids: tokens of the prefix.
        prefix: its keys and values, or None without a prefix or without windows.
        windows: all windows, packed, or None: then the context is an ordinary prompt.
        method: how queries read the windows.
        query_start: position of the query's first token: prefix plus the longest window.
        window_tokens: tokens in all windows together.
    """

    prefix_ids: tuple[int, ...]
    prefix: Window | None
    windows: PackedWindows | None
    method: Method
    query_start: int
    window_tokens: int

    def new_tail(self, rows: int = 1) -> DynamicCache:
        """A fresh HF cache that holds the prefix, for ``rows`` batch rows.

        It has no config on purpose: with one, sliding layers would forget the prefix by counting
        tokens instead of positions.
        """
        tail = DynamicCache()
        if self.prefix is not None:
            pairs = zip(self.prefix.keys, self.prefix.values, strict=True)
            for layer, (key, value) in enumerate(pairs):
                tail.update(
                    key.unsqueeze(0).expand(rows, -1, -1, -1),
                    value.unsqueeze(0).expand(rows, -1, -1, -1),
                    layer,
                )
        return tail


def encode_context(
    encoder: Encoder,
    prefix_ids: Sequence[int],
    windows: Sequence[Sequence[int]],
    method: Method,
    groups: Sequence[int] | None = None,
    on_encoded: OnEncoded | None = None,
) -> EncodedContext:
    """Encode prefix and windows for one method.

    Args:
        encoder: of the model.
        prefix_ids: may be empty.
        windows: token ids; a method that is not windowed gets them as one long window.
        method: how queries will read them.
        groups: citation group of each window; by default each window is its own.
        on_encoded: see `Encoder.encode_windows`.

    Raises:
        InputError: a window without tokens.
    """
    lengths = [len(ids) for ids in windows]
    if 0 in lengths:
        raise InputError(f"Window {lengths.index(0)} has no tokens; leave it out.")
    numbers = list(range(len(windows))) if groups is None else list(groups)
    n_groups = max(numbers, default=-1) + 1
    token_groups = [[number] * length for number, length in zip(numbers, lengths, strict=True)]
    if not method.windowed and windows:
        windows = [[token for ids in windows for token in ids]]
        token_groups = [[number for row in token_groups for number in row]]
    start = len(prefix_ids)
    prefix = encoder.encode_prefix(prefix_ids) if windows else None
    packed = None
    if windows:
        encoded = encoder.encode_windows(prefix, windows, on_encoded)
        packed = pack(encoded, token_groups, n_groups)
    return EncodedContext(
        prefix_ids=tuple(prefix_ids),
        prefix=prefix,
        windows=packed,
        method=method,
        query_start=start + max((len(ids) for ids in windows), default=0),
        window_tokens=sum(lengths),
    )
