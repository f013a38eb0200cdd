"""An encoded context: what a query is asked against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from rag_windows.encoding import Encoded, OnEncoded, Source, WindowEncoder
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
        cached_tokens: those of prefix and windows that were not computed for this context.
    """

    prefix_ids: tuple[int, ...]
    prefix: Window | None
    windows: PackedWindows | None
    method: Method
    query_start: int
    window_tokens: int
    cached_tokens: int = 0

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
    encoder: WindowEncoder,
    prefix_ids: Sequence[int],
    windows: Sequence[Sequence[int]],
    method: Method,
    groups: Sequence[int] | None = None,
    on_encoded: OnEncoded | None = None,
    sources: Sequence[Source] = (),
) -> EncodedContext:
    """Encode prefix and windows for one method.

    Args:
        encoder: of the model.
        prefix_ids: may be empty.
        windows: token ids; a method that is not windowed gets them as one long window.
        method: how queries will read them.
        groups: citation group of each window; by default each window is its own.
        on_encoded: see `Encoder.encode_windows`.
        sources: of each window, see `Encoder.encode`.

    Raises:
        InputError: a window without tokens.
    """
    lengths = [len(ids) for ids in windows]
    if 0 in lengths:
        raise InputError(f"Window {lengths.index(0)} has no tokens; leave it out.")
    numbers = list(range(len(windows))) if groups is None else list(groups)
    n_groups = max(numbers, default=-1) + 1
    token_groups = torch.tensor(numbers, dtype=torch.int64).repeat_interleave(
        torch.tensor(lengths, dtype=torch.int64)
    )
    if not method.windowed and windows:
        windows = [[token for ids in windows for token in ids]]
    start = len(prefix_ids)
    encoded = Encoded(None, [])
    packed = None
    if windows:
        encoded = encoder.encode(prefix_ids, windows, method, sources, on_encoded)
        packed = pack(encoded.windows, token_groups, n_groups)
    return EncodedContext(
        prefix_ids=tuple(prefix_ids),
        prefix=encoded.prefix,
        windows=packed,
        method=method,
        query_start=start + max((len(ids) for ids in windows), default=0),
        window_tokens=sum(lengths),
        cached_tokens=encoded.cached_tokens,
    )
