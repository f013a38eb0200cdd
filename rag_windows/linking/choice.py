"""Which tokens of a request's windows are linked."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rag_windows.encoding import Encoder
from rag_windows.kv import Window
from rag_windows.linking.deviation import LAYER, key_deviation
from rag_windows.linking.plan import LinkPlan


def chosen(
    encoder: Encoder, windows: Sequence[Window], prefix: Window | None, plan: LinkPlan
) -> torch.Tensor:
    """Indices among all windows' tokens of those to encode again.

    Tokens of the first window are never among them: nothing stands before it but the prefix, which
    it has seen.

    Args:
        encoder: of the model.
        windows: at least one, encoded one behind the other.
        prefix: what stands before the windows, or None.
        plan: how many, and by which rule.

    Returns:
        (n,) int64, ascending, on the CPU.
    """
    lengths = [len(window.ids) for window in windows]
    counts = plan.counts(lengths)
    behind = lengths[0]
    if plan.choose == "deviation" and len(encoder.reach) > LAYER and len(windows) > 1:
        deviation = key_deviation(encoder, windows, prefix)[behind:]
        # A stable order makes the choice the same on every run where tokens tie.
        order = torch.sort(deviation, descending=True, stable=True).indices
        return torch.sort(order[: sum(counts[1:])]).values + behind
    parts = [torch.empty(0, dtype=torch.int64)]
    start = behind
    for length, count in zip(lengths[1:], counts[1:], strict=True):
        parts.append(torch.arange(start, start + count))
        start += length
    return torch.cat(parts)
