"""Forward passes that are run for the keys and values of windows alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from transformers import PreTrainedModel

from rag_windows.attention.layout import AllCaptured, Capture, TextsLayout, use_layout
from rag_windows.attention.rope import check_tables
from rag_windows.device import input_device
from rag_windows.kv import Window


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

    @torch.no_grad()
    def run(
        self,
        windows: Sequence[Sequence[int]],
        starts: Sequence[int],
        prefix: Window | None,
        before: Sequence[Window] = (),
    ) -> list[Window]:
        """One forward pass over windows, one behind the other without padding.

        Args:
            windows: token ids of each, at least one token each; those of equal length side by side.
            starts: position of each one's first token.
            prefix: what every window sees before itself, or None.
            before: a window for each, all of which its tokens see, too; or none.

        Returns:
            Their keys and values: views of the pass's own.
        """
        capture = Capture(self._last)
        lengths = [len(ids) for ids in windows]
        layout = TextsLayout(self._reach, lengths, starts, prefix, before, capture)
        check_tables(self._table, int(layout.positions.max()) + 1)
        device = input_device(self._twin)
        ids = torch.tensor([[token for window in windows for token in window]], device=device)
        with use_layout(layout), suppress(AllCaptured):
            self._decoder(
                ids, position_ids=layout.positions.unsqueeze(0).to(device), use_cache=False
            )
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
