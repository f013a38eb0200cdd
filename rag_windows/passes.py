"""Forward passes that are run for the keys and values of windows alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedModel

from rag_windows.attention.capture import AllCaptured, Capture
from rag_windows.attention.layout import Layout, use_layout
from rag_windows.attention.packed import PackedRows
from rag_windows.attention.rope import check_tables
from rag_windows.device import input_device
from rag_windows.windows import RowWindows, Window, pack


class Passes:
    """Runs a model's decoder; holds no state of a call.

    No logits are computed, and of the last layer nothing behind its keys and values.

    Args:
        twin: the model with our attention.
        reach: of each layer, see `rag_windows.attention.layout.Layout`.
        table: positions of rotary tables that don't grow, or None; see `table_limit`.
    """

    def __init__(
        self, twin: PreTrainedModel, reach: tuple[int | None, ...], table: int | None
    ) -> None:
        self._twin = twin
        self._decoder: torch.nn.Module = twin.base_model
        self._reach = reach
        self._table = table
        # Where accelerate moves weights, it takes them back when a module returns.
        moved = any(hasattr(module, "_hf_hook") for module in twin.modules())
        self._last = None if moved else len(reach) - 1

    def packed(
        self, windows: Sequence[Sequence[int]], starts: Sequence[int], prefix: Window | None
    ) -> list[Window]:
        """One forward pass over windows, one behind the other without padding.

        Args:
            windows: token ids of each, at least one token each; those of equal length side by side.
            starts: position of each one's first token.
            prefix: what every window sees before itself, or None.

        Returns:
            Their keys and values: views of the pass's own.
        """
        rows = PackedRows([len(ids) for ids in windows], starts, prefix)
        ids = torch.tensor([[token for window in windows for token in window]])
        capture = self._run(ids, rows.positions.unsqueeze(0), min(starts), override=rows)
        layers = range(len(self._reach))
        made = []
        first = 0
        for window, start in zip(windows, starts, strict=True):
            place = slice(first, first + len(window))
            made.append(
                Window(
                    ids=tuple(window),
                    start=start,
                    keys=tuple(capture.keys[layer][0, :, place] for layer in layers),
                    values=tuple(capture.values[layer][0, :, place] for layer in layers),
                )
            )
            first = place.stop
        return made

    def padded(
        self,
        batch: Sequence[Sequence[int]],
        starts: Sequence[int],
        prefix: Window | None,
        beside: RowWindows,
    ) -> Capture:
        """One forward pass over windows as rows of a batch, padded on the right to the longest.

        Args:
            batch: token ids of each row, at least one token each.
            starts: position of each row's first token.
            prefix: what every row sees before itself, or None.
            beside: what each row sees beside that, one window a row.

        Returns:
            Keys and values, padding included.
        """
        lengths = [len(ids) for ids in batch]
        first, longest = min(starts), max(lengths)
        rows = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, ids in enumerate(batch):
            rows[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        ends = torch.tensor([start + n for start, n in zip(starts, lengths, strict=True)])
        positions = torch.tensor(list(starts)).unsqueeze(-1) + torch.arange(longest)
        # Padding must not ask for a position that a learned table does not have.
        positions = positions.minimum(ends.unsqueeze(-1) - 1)
        return self._run(
            rows,
            positions,
            first,
            row_offsets=tuple(start - first for start in starts) if first < max(starts) else None,
            windows=None
            if prefix is None
            else pack([prefix], torch.zeros(len(prefix.ids), dtype=torch.int64), 1),
            beside=beside,
        )

    @torch.no_grad()
    def _run(
        self, ids: torch.Tensor, positions: torch.Tensor, first: int, **layout: Any
    ) -> Capture:
        check_tables(self._table, int(positions.max()) + 1)
        device = input_device(self._twin)
        capture = Capture(self._last)
        what = Layout(
            prefix_length=0, query_start=first, reach=self._reach, capture=capture, **layout
        )
        with use_layout(what), suppress(AllCaptured):
            self._decoder(ids.to(device), position_ids=positions.to(device), use_cache=False)
        return capture
