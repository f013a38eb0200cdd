"""Windows that read themselves again: forward passes that move their keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from rag_windows.refinement.velocity import Velocity
from rag_windows.windows import RowWindows, Window, rows_of

if TYPE_CHECKING:
    from rag_windows.encoding import Encoder

Positions = Literal["continue", "reuse"]


@dataclass(frozen=True, slots=True)
class IterativeRefinement:
    """``KV_t = KV_{t-1} + eta * m_t``, ``m_t = (G_t - KV_{t-1}) + momentum * m_{t-1}``.

    For the meaning of the numbers and for what a pass ``G_t`` sees, see `DeepThinking`. The update
    is summed up in fp32 (in fp64 for fp64 models); each pass reads it rounded to the model's dtype,
    and so is what comes out.

    Attributes:
        steps: passes after the plain encoding, at least 1.
        eta: step size.
        momentum: share of the last pass's movement that goes on.
        at: where the tokens of a pass stand.
    """

    steps: int
    eta: float
    momentum: float
    at: Positions

    def positions(self, tokens: int) -> int:
        """How many positions from its start on a window of so many tokens takes."""
        return 2 * tokens if self.at == "continue" else tokens

    @torch.no_grad()
    def refine(
        self, encoder: Encoder, windows: Sequence[Window], prefix: Window | None
    ) -> list[Window]:
        """Refine each window of a batch by itself; see `rag_windows.rescaling.Refinement`."""
        ids = [window.ids for window in windows]
        starts = [
            window.start + (len(window.ids) if self.at == "continue" else 0) for window in windows
        ]
        rows = rows_of(windows)
        dtypes = [(k.dtype, v.dtype) for k, v in zip(rows.keys, rows.values, strict=True)]
        keys = [Velocity(tensor, self.eta, self.momentum) for tensor in rows.keys]
        values = [Velocity(tensor, self.eta, self.momentum) for tensor in rows.values]
        for _ in range(self.steps):
            made = encoder.run_padded(ids, starts, prefix, beside=rows)
            for layer in range(len(keys)):
                keys[layer].follow(made.keys[layer])
                values[layer].follow(made.values[layer])
            rows = replace(
                rows,
                keys=tuple(k.place.to(t) for k, (t, _) in zip(keys, dtypes, strict=True)),
                values=tuple(v.place.to(t) for v, (_, t) in zip(values, dtypes, strict=True)),
            )
        return [_row(window, rows, row) for row, window in enumerate(windows)]


def _row(window: Window, rows: RowWindows, row: int) -> Window:
    """A window with its row's keys and values, without the padding."""
    tokens = len(window.ids)
    return replace(
        window,
        keys=tuple(key[row, :, :tokens] for key in rows.keys),
        values=tuple(value[row, :, :tokens] for value in rows.values),
    )
