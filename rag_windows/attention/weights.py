"""Attention weights: those of segments and their parts, and the recorder of an answer's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from rag_windows.attention.merge import LOWEST, Role, Weights
from rag_windows.attention.segments import Segment, Segments


class SegmentWeights(NamedTuple):
    """The attention weights of one segment's results; a token's weights sum to one in a layer.

    Attributes:
        shares: (layers, results, heads), fp32: of the segment.
        lse: of each layer (results, heads), and ``parts`` of each layer (parts, results, heads):
            how they divide among its parts; empty where there is one part.
    """

    role: Role
    shares: torch.Tensor
    lse: Sequence[torch.Tensor] = ()
    parts: Sequence[torch.Tensor] = ()

    def at(self, rows: torch.Tensor) -> SegmentWeights:
        """Those of some of the results."""
        rows = rows.to(self.shares.device)
        lse, parts = [one[rows] for one in self.lse], [one[:, rows] for one in self.parts]
        return SegmentWeights(self.role, self.shares[:, rows], lse, parts)

    def summed(self) -> torch.Tensor:
        """Weights of the parts (parts, results), averaged over heads and summed over layers."""
        return self.of_parts().mean(dim=-1).sum(dim=1)

    def of_parts(self) -> torch.Tensor:
        """Weights of the parts (parts, layers, results, heads)."""
        if not self.parts:
            return self.shares.unsqueeze(0)
        lse, parts = torch.stack(list(self.lse)), torch.stack(list(self.parts), dim=1)
        # A token that sees nothing of a segment has no share of it.
        within = torch.exp(parts - lse.clamp_min(LOWEST))
        return within * self.shares


def segment_weights(layers: Sequence[Weights]) -> list[SegmentWeights]:
    """The weights of some layers of one pass, segment by segment."""
    device, made = layers[0].shares.device, []
    if any(one.shares.device != device for one in layers):
        # Of a model whose layers are on several devices.
        layers = [one.on(device) for one in layers]
    shares = torch.stack([one.shares for one in layers], dim=1)
    columns = [one.results.columns for one in layers[0].attended]
    for index, own in enumerate(shares.split(columns)):
        attended = [one.attended[index] for one in layers]
        results, lse = attended[0].results, [one.lse for one in attended]
        place = results.on(device)
        # (layers, results, heads)
        own = own.transpose(0, 1).flatten(1, 2) if place is None else own.transpose(0, 1)[:, *place]
        first = 0
        for number, size in enumerate(results.sizes):
            rows = slice(first, first + size)
            parts = [one.parts[number] for one in attended if one.parts]
            per_part = [one for one in parts if one is not None]
            if not per_part:
                made.append(SegmentWeights(results.role, own[:, rows]))
            elif len(results.sizes) == 1:
                made.append(SegmentWeights(results.role, own, lse, per_part))
            else:
                made.append(
                    SegmentWeights(results.role, own[:, rows], [one[rows] for one in lse], per_part)
                )
            first += size
    return made


class RecordedTokens:
    """The tokens of a pass whose attention weights are recorded, and where each weight goes.

    Weights go to a table (recorded tokens, spans + 2): of each span that the token reads, then of
    the prefix, then of the query. It holds for all passes that read the same segments.

    Args:
        segments: what the pass reads.
        wanted: (n,) int64, on the CPU: the recorded tokens, at least one, in the table's order.
        tokens: number of all tokens of the pass.
        spans: the most spans that a recorded token reads.
        own_spans: for segments of the context whose parts are not the spans of their tokens in
            order: (parts, recorded results) int64, which of its token's spans each part is.
    """

    def __init__(
        self,
        segments: Sequence[Segments],
        wanted: torch.Tensor,
        tokens: int,
        spans: int,
        own_spans: Mapping[Segment, torch.Tensor] | None = None,
    ) -> None:
        self.few = len(wanted) < tokens
        self._shape = len(wanted), spans + 2
        entry = torch.full((tokens,), -1)
        entry[wanted] = torch.arange(len(wanted))
        # For each segment, which of its results are recorded, None for all; where weights go.
        self._results: list[torch.Tensor | None] = []
        index = []
        for segment in (one for each in segments for one in each.segments):
            rows = entry if segment.tokens is None else entry[segment.tokens]
            found = torch.nonzero(rows >= 0).flatten()
            self._results.append(None if len(found) == len(rows) else found)
            column = torch.tensor(spans if segment.role == "prefix" else spans + 1)
            if segment.role == "context":
                column = torch.arange(segment.n_parts).unsqueeze(-1)
                if own_spans is not None:
                    column = own_spans[segment]
            index.append((rows[found] * (spans + 2) + column).flatten())
        self._index = torch.cat(index)

    def table(self, layers: Sequence[Weights]) -> torch.Tensor:
        """The weights (recorded tokens, spans + 2) of some layers: summed up, mean over heads."""
        each = zip(segment_weights(layers), self._results, strict=True)
        recorded = [one if results is None else one.at(results) for one, results in each]
        weights = torch.cat([one.summed().flatten() for one in recorded])
        self._index = self._index.to(weights.device)
        rows, width = self._shape
        table = weights.new_zeros(rows * width).index_add_(0, self._index, weights)
        return table.view(rows, width)


@dataclass(slots=True)
class WeightRecorder:
    """Records the attention of the tokens that predict answer tokens, averaged over heads.

    ``sums`` hold, by position, what batch rows' tokens there attend to: (rows, spans + 2), fp32,
    summed over layers: each span, then the prefix, then the query. They stay on the device until
    they are asked for. A token computed again (a rejected draft in assisted decoding) replaces what
    stood there. Only shares mean something.

    Attributes:
        first_position: from here on tokens are recorded: that of the query's last token.
        span_groups: (spans, groups): for which citation groups the spans count; None where each
            span is a group.
    """

    first_position: int = 0
    span_groups: torch.Tensor | None = None
    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    _positions: range = field(default=range(0), init=False)
    _recorded: RecordedTokens | None = field(default=None, init=False)
    _layers: list[Weights] = field(default_factory=list, init=False)
    _table: torch.Tensor | None = field(default=None, init=False)

    @property
    def recording(self) -> bool:
        """Whether tokens of the pass that was begun last are recorded."""
        return self._recorded is not None

    def begin(self, positions: range, recorded: RecordedTokens | None) -> None:
        """Begin a pass, of which tokens at these positions are recorded; None for none.

        They are in the table position after position, and of each position row after row.
        """
        self.settle()
        self._positions, self._recorded = positions, recorded

    def add(self, weights: Weights) -> None:
        """Take a layer's weights; those of all layers are added up once the pass is done."""
        if self._recorded is None or not self._recorded.few:
            self._layers.append(weights)
            return
        # Of a pass of many tokens, only the weights of a few are stored.
        table, before = self._recorded.table([weights]), self._table
        self._table = table if before is None else table.to(before.device) + before

    def settle(self) -> None:
        """End a pass: what it recorded counts."""
        table = self._table
        if self._layers and self._recorded is not None:
            table = self._recorded.table(self._layers)
        self.discard()
        if table is not None:
            by_position = table.unflatten(0, (len(self._positions), -1))
            self.sums |= zip(self._positions, by_position, strict=True)

    def discard(self) -> None:
        """Forget the pass that was begun."""
        self._layers, self._table = [], None

    def average(self, positions: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        """Mean over layers and (position, row) pairs: (groups + 2,) fp32, summing to 1."""
        mean = self.of_tokens(positions, rows).mean(dim=0)
        return mean / mean.sum()

    def of_tokens(self, positions: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        """Sums over layers of (position, row) pairs: (pairs, groups + 2) fp32, on the CPU."""
        self.settle()
        pairs = zip(positions, rows, strict=True)
        return of_groups(torch.stack([self.sums[at][row] for at, row in pairs]), self.span_groups)


def of_groups(sums: torch.Tensor, span_groups: torch.Tensor | None) -> torch.Tensor:
    """Weights (tokens, spans + 2) by citation group: (tokens, groups + 2) fp32, on the CPU."""
    sums = sums.float().cpu()
    if span_groups is None:
        return sums
    return torch.cat([sums[:, :-2] @ span_groups, sums[:, -2:]], dim=1)
