"""Encoding: the prefix once, the windows together, each behind that prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers import PreTrainedModel

from rag_windows.attention.capture import Capture
from rag_windows.attention.layout import Layout, use_layout
from rag_windows.attention.reach import layer_reach
from rag_windows.attention.rope import check_tables, table_limit
from rag_windows.batching import bucket_by_length
from rag_windows.device import input_device
from rag_windows.rescaling import Method
from rag_windows.windows import Window, pack

OnEncoded = Callable[[int, int], None]
"""Told how many windows are encoded, of how many."""

MAX_BATCH_TOKENS = 8192
"""Tokens, padding included, that one forward pass of windows holds at most."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a window was made from.

    Attributes:
        name: how errors call it.
        labels: ids of the passage and its document, by which a cache can be told to forget it.
    """

    name: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Encoded:
    """Prefix and windows of one request.

    Attributes:
        prefix: None if it is empty.
        windows: in the order given.
        cached_tokens: those of all tokens that were not computed for this request.
    """

    prefix: Window | None
    windows: list[Window] = field(repr=False)
    cached_tokens: int = 0


class WindowEncoder(Protocol):
    """What turns prefix and windows into keys and values: an `Encoder`, or a cache before one."""

    def encode(
        self,
        prefix_ids: Sequence[int],
        windows: Sequence[Sequence[int]],
        method: Method,
        sources: Sequence[Source] = (),
        on_encoded: OnEncoded | None = None,
    ) -> Encoded:
        """See `Encoder.encode`."""


class Encoder:
    """Runs the model over prefix and windows and keeps each layer's keys and values.

    It holds no state of a call, so threads may share one.

    Args:
        twin: the model with our attention.
        max_batch_tokens: bound on one forward pass; a single longer window still runs alone.
    """

    def __init__(self, twin: PreTrainedModel, max_batch_tokens: int = MAX_BATCH_TOKENS) -> None:
        self._twin = twin
        self._decoder: torch.nn.Module = twin.base_model
        self._max_batch_tokens = max_batch_tokens
        config = twin.config.get_text_config(decoder=True)
        self.reach = layer_reach(config)
        self._table_limit = table_limit(config)

    @property
    def model(self) -> PreTrainedModel:
        """The model that encodes."""
        return self._twin

    def encode(
        self,
        prefix_ids: Sequence[int],
        windows: Sequence[Sequence[int]],
        method: Method,
        sources: Sequence[Source] = (),
        on_encoded: OnEncoded | None = None,
    ) -> Encoded:
        """Encode what one request reads.

        Args:
            prefix_ids: may be empty.
            windows: token ids, each of at least one token.
            method: how they will be read.
            sources: of each window, for who stores them.
            on_encoded: see `encode_windows`.
        """
        prefix = self.encode_prefix(prefix_ids)
        return Encoded(prefix, self.encode_windows(prefix, windows, on_encoded))

    def encode_prefix(self, ids: Sequence[int]) -> Window | None:
        """Encode the prefix at positions 0..p-1; None if it is empty."""
        if not ids:
            return None
        return self._forward([tuple(ids)], None)[0]

    def encode_windows(
        self,
        prefix: Window | None,
        windows: Sequence[Sequence[int]],
        on_encoded: OnEncoded | None = None,
    ) -> list[Window]:
        """Encode each window behind the prefix, at positions p, p+1, ...

        Windows of like length share a forward pass: they are padded on the right, where no token
        can see the padding, and the padding's keys are dropped.

        Args:
            prefix: from `encode_prefix`.
            windows: token ids, each of at least one token, of any lengths.
            on_encoded: called after each forward pass with the windows done and all of them.

        Returns:
            One window each, in the order given.
        """
        encoded: dict[int, Window] = {}
        for batch in self.encode_batches(prefix, windows):
            encoded |= batch
            if on_encoded is not None:
                on_encoded(len(encoded), len(windows))
        return [encoded[index] for index in range(len(windows))]

    def encode_batches(
        self, prefix: Window | None, windows: Sequence[Sequence[int]]
    ) -> Iterator[dict[int, Window]]:
        """Like `encode_windows`, one forward pass after the other: windows by their index."""
        lengths = [len(ids) for ids in windows]
        for bucket in bucket_by_length(lengths, self._max_batch_tokens):
            batch = [tuple(windows[index]) for index in bucket]
            yield dict(zip(bucket, self._forward(batch, prefix), strict=True))

    @torch.no_grad()
    def _forward(self, batch: list[tuple[int, ...]], prefix: Window | None) -> list[Window]:
        start = 0 if prefix is None else len(prefix.ids)
        longest = max(len(ids) for ids in batch)
        check_tables(self._table_limit, start + longest)
        device = input_device(self._twin)
        rows = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, ids in enumerate(batch):
            rows[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        positions = torch.arange(start, start + longest, device=device).expand(len(batch), -1)
        capture = Capture()
        layout = Layout(
            prefix_length=0,
            query_start=start,
            reach=self.reach,
            windows=None
            if prefix is None
            else pack([prefix], torch.zeros(start, dtype=torch.int64), 1),
            capture=capture,
        )
        with use_layout(layout):
            self._decoder(rows.to(device), position_ids=positions, use_cache=False)
        layers = range(len(self.reach))
        return [
            Window(
                ids=ids,
                start=start,
                keys=tuple(capture.keys[layer][row, :, : len(ids)] for layer in layers),
                values=tuple(capture.values[layer][row, :, : len(ids)] for layer in layers),
            )
            for row, ids in enumerate(batch)
        ]
