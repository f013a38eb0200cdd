"""Whether the windows that an answer looks at would each say something else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rag_windows.context import EncodedContext
from rag_windows.decoding import Decoder
from rag_windows.guard.divergence import jensen_shannon
from rag_windows.kv import PackedWindows


@dataclass(frozen=True, slots=True)
class Span:
    """One window among the packed tokens of a context.

    Attributes:
        start: its first token.
        end: behind its last one.
        weight: attention mass.
    """

    start: int
    end: int
    weight: float


def spans_of(lengths: Sequence[int], groups: Sequence[int], masses: Sequence[float]) -> list[Span]:
    """The windows of a context, in order.

    Args:
        lengths: tokens of each window.
        groups: citation group of each window.
        masses: attention mass of each group; a group's windows share it alike.
    """
    counts = [groups.count(group) for group in groups]
    spans = []
    start = 0
    for length, group, count in zip(lengths, groups, counts, strict=True):
        spans.append(Span(start, start + length, masses[group] / count))
        start += length
    return spans


def disagreement(
    decoder: Decoder,
    context: EncodedContext,
    packed: PackedWindows,
    query_ids: Sequence[int],
    spans: Sequence[Span],
    asked: int,
) -> float:
    """Divergence of the first answer token among the most-attended windows, each asked alone.

    Weighted by the square of the attention mass: a window that the answer hardly looks at may say
    what it likes, and most windows say "not stated" where one holds the answer. One pass of the
    query for each window asked.

    Args:
        decoder: of the model.
        context: with all windows.
        packed: those windows.
        query_ids: the query.
        spans: of the windows.
        asked: how many of them are asked, most-attended first.

    Returns:
        Nats, see `jensen_shannon`; 0 with fewer than two windows that have any mass.
    """
    best = sorted((span for span in spans if span.weight > 0), key=lambda span: -span.weight)
    best = best[:asked]
    if len(best) < 2:
        return 0.0
    ids = torch.tensor([list(query_ids)], dtype=torch.int64)
    rows = []
    for span in best:
        logits = decoder.forward(_alone(context, packed, span), ids, last=1)[0, -1]
        rows.append(logits.float().log_softmax(dim=-1).cpu())
    return jensen_shannon(torch.stack(rows), torch.tensor([span.weight**2 for span in best]))


def _alone(context: EncodedContext, packed: PackedWindows, span: Span) -> EncodedContext:
    part = slice(span.start, span.end)
    positions = packed.positions[part]
    first = int(positions[0])
    window = replace(
        packed,
        keys=tuple(key[:, part] for key in packed.keys),
        values=tuple(value[:, part] for value in packed.values),
        positions=positions,
        count=1,
        spans=(span.end - span.start,),
        shares=packed.shares[:1],
    )
    return replace(
        context,
        windows=window,
        query_start=first + span.end - span.start,
        window_tokens=span.end - span.start,
        singles=(),
        groups=(),
        scores=(),
    )
