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
from rag_windows.limits import position_limit
from rag_windows.refinement.room import check_room
from rag_windows.rescaling import Method, Refinement, window_starts
from rag_windows.windows import RowWindows, Window, pack

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
        found: indices of windows that were not.
    """

    prefix: Window | None
    windows: list[Window] = field(repr=False)
    cached_tokens: int = 0
    found: tuple[int, ...] = ()


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

    @property
    def runner(self) -> Encoder:
        """What runs the model."""


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
        self._position_limit = position_limit(twin.config)

    @property
    def runner(self) -> Encoder:
        """Itself."""
        return self

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
        starts = window_starts(method.alignment, len(prefix_ids), [len(ids) for ids in windows])
        made = self.encode_windows(prefix, windows, on_encoded, starts, method.refinement)
        return Encoded(prefix, made)

    def encode_prefix(self, ids: Sequence[int]) -> Window | None:
        """Encode the prefix at positions 0..p-1; None if it is empty."""
        if not ids:
            return None
        return self.run([ids], [0], None)[0]

    def encode_windows(
        self,
        prefix: Window | None,
        windows: Sequence[Sequence[int]],
        on_encoded: OnEncoded | None = None,
        starts: Sequence[int] | None = None,
        refinement: Refinement | None = None,
    ) -> list[Window]:
        """Encode each window behind the prefix.

        Windows of like length share a forward pass: they are padded on the right, where no token
        can see the padding, and the padding's keys are dropped.

        Args:
            prefix: from `encode_prefix`.
            windows: token ids, each of at least one token, of any lengths.
            on_encoded: called after each forward pass with the windows done and all of them.
            starts: position of each window's first token; right behind the prefix by default.
            refinement: what changes the windows of each batch.

        Returns:
            One window each, in the order given.
        """
        encoded: dict[int, Window] = {}
        for batch in self.encode_batches(prefix, windows, starts, refinement):
            encoded |= batch
            if on_encoded is not None:
                on_encoded(len(encoded), len(windows))
        return [encoded[index] for index in range(len(windows))]

    def encode_batches(
        self,
        prefix: Window | None,
        windows: Sequence[Sequence[int]],
        starts: Sequence[int] | None = None,
        refinement: Refinement | None = None,
    ) -> Iterator[dict[int, Window]]:
        """Like `encode_windows`, one forward pass after the other: windows by their index."""
        lengths = [len(ids) for ids in windows]
        if starts is None:
            starts = [0 if prefix is None else len(prefix.ids)] * len(windows)
        if refinement is not None:
            check_room(refinement, starts, lengths, self._position_limit, "Window {}".format)
        for bucket in bucket_by_length(lengths, self._max_batch_tokens):
            made = self.run([windows[i] for i in bucket], [starts[i] for i in bucket], prefix)
            if refinement is not None:
                made = refinement.refine(self, made, prefix)
            yield dict(zip(bucket, made, strict=True))

    def run(
        self,
        batch: Sequence[Sequence[int]],
        starts: Sequence[int],
        prefix: Window | None,
        beside: RowWindows | None = None,
    ) -> list[Window]:
        """One forward pass over rows of tokens, each row causal in itself.

        Args:
            batch: token ids of each row, at least one token each.
            starts: position of each row's first token.
            prefix: what every row sees before itself, or None.
            beside: what each row sees beside that, one window a row, or None.

        Returns:
            The keys and values that the pass gave, one window a row.
        """
        capture = self.run_padded(batch, starts, prefix, beside)
        layers = range(len(self.reach))
        return [
            Window(
                ids=tuple(ids),
                start=start,
                keys=tuple(capture.keys[layer][row, :, : len(ids)] for layer in layers),
                values=tuple(capture.values[layer][row, :, : len(ids)] for layer in layers),
            )
            for row, (ids, start) in enumerate(zip(batch, starts, strict=True))
        ]

    @torch.no_grad()
    def run_padded(
        self,
        batch: Sequence[Sequence[int]],
        starts: Sequence[int],
        prefix: Window | None,
        beside: RowWindows | None = None,
    ) -> Capture:
        """Like `run`, with the rows padded on the right to the longest, a tensor a layer."""
        lengths = [len(ids) for ids in batch]
        first, longest = min(starts), max(lengths)
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        check_tables(self._table_limit, max(ends))
        device = input_device(self._twin)
        rows = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, ids in enumerate(batch):
            rows[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        positions = torch.tensor(list(starts)).unsqueeze(-1) + torch.arange(longest)
        # Padding must not ask for a position that a learned table does not have.
        positions = positions.minimum(torch.tensor(ends).unsqueeze(-1) - 1).to(device)
        capture = Capture()
        layout = Layout(
            prefix_length=0,
            query_start=first,
            reach=self.reach,
            row_offsets=tuple(start - first for start in starts) if first < max(starts) else None,
            windows=None
            if prefix is None
            else pack([prefix], torch.zeros(len(prefix.ids), dtype=torch.int64), 1),
            beside=beside,
            capture=capture,
        )
        with use_layout(layout):
            self._decoder(rows.to(device), position_ids=positions, use_cache=False)
        return capture
