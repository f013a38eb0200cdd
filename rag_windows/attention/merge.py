"""The merge: answers over parts of what a token reads become attention over all of it.

A backend answers a segment with an output ``o_s`` and the log-sum-exp ``l_s`` of its logits.
Attention over the union of segments is exactly ``sum_s w_s o_s`` with ``w = softmax(l)``. All
methods differ only in what becomes of the context's and the query's ``l`` before that softmax, and
its weights are the attention weights from which citations are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

LOWEST = -1e30
"""Stands for ``-inf`` where that would be taken from itself."""

Role = Literal["prefix", "context", "query"]

Number = float | torch.Tensor
"""The same for all tokens of a pass, or (tokens, 1) fp32."""


class Rescaling(NamedTuple):
    """What a method makes of log-sum-exps before the merge.

    The context's is multiplied by ``slope`` and moved by ``shift``; ``query_bias`` is added to the
    query's.
    """

    slope: Number = 1.0
    shift: Number = 0.0
    query_bias: Number = 0.0


NO_RESCALING = Rescaling()


class Results:
    """Where the results of segments of one role belong among the tokens of a pass.

    ``readers`` are, for each segment, the tokens that read it, (n,) int64 on the CPU; None for all
    ``tokens`` of the pass, in order. ``first`` is how many results stand before these.

    Attributes:
        sizes: number of results of each segment: one for every token that reads it.
        place: of these results among those of all roles.
        columns: the most results that a token has.
        column: (results,) int64, which of its token's results each one is; None if they are those
            of all tokens, in order, column after column.
        aligned: whether the results are one for each token, in order.
    """

    def __init__(
        self, role: Role, readers: Sequence[torch.Tensor | None], tokens: int, first: int
    ) -> None:
        self.role = role
        self.sizes = [tokens if one is None else len(one) for one in readers]
        self.place = slice(first, first + sum(self.sizes))
        self._readers = tuple(readers)
        self._tokens = tokens
        self._places: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self.columns, self.column = 1, None
        if len(readers) > 1 or readers[0] is not None:
            self.columns, self.column = _columns(self.index, tokens)
        self.aligned = self.columns == 1 and self.column is None

    @property
    def index(self) -> torch.Tensor:
        """(results,) int64, on the CPU: the token of each result."""
        every = torch.arange(self._tokens)
        return torch.cat([every if one is None else one for one in self._readers])

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Column and token of each result, on a device; None where they lie in order."""
        if self.column is None:
            return None
        if device not in self._places:
            self._places[device] = self.column.to(device), self.index.to(device)
        return self._places[device]


class Attended(NamedTuple):
    """What the segments of one role give to the tokens of a pass.

    Attributes:
        output: (results, heads, value dim) in the query's dtype or fp32, 0 where no key is seen.
        lse: (results, heads), fp32 (fp64 for fp64), ``-inf`` there.
        parts: if they are wanted, for each segment (parts, results, heads): the log-sum-exps of the
            keys of each part by themselves; None for a single part, whose log-sum-exp is ``lse``.
    """

    results: Results
    output: torch.Tensor
    lse: torch.Tensor
    parts: list[torch.Tensor | None] | None


class Weights(NamedTuple):
    """The attention weights of a layer; ``shares`` (columns, tokens, heads) are of whole roles."""

    attended: Sequence[Attended]
    shares: torch.Tensor

    def on(self, device: torch.device) -> Weights:
        """The same on a device, but for the outputs."""
        attended = [
            one._replace(
                lse=one.lse.to(device),
                parts=[None if part is None else part.to(device) for part in one.parts or ()],
            )
            for one in self.attended
        ]
        return Weights(attended, self.shares.to(device))


def merge(
    attended: Sequence[Attended],
    query: torch.Tensor,
    rescaling: Rescaling,
    sinks: torch.Tensor | None = None,
    *,
    weights: bool = False,
) -> tuple[torch.Tensor, Weights | None]:
    """Attention of every token of a query (tokens, heads, head dim) over all that it reads.

    Every token has one result at least. ``sinks`` (heads,) are the logits of attention sinks, where
    there are any.

    Returns:
        (tokens, heads, value dim) in the query's dtype; and the attention weights, if they are
        wanted: a sink is no text and counts for nothing.
    """
    if len(attended) == 1 and attended[0].results.aligned and sinks is None:
        (one,) = attended
        shares = (one.lse > -torch.inf).to(one.lse.dtype).unsqueeze(0)
        return one.output.to(query.dtype), Weights(attended, shares) if weights else None
    tables = [_rescaled(rescaling, one, _table(one, len(query))) for one in attended]
    table = torch.cat(tables)
    shares = _softmax(table, sinks)
    if all(one.results.aligned for one in attended):
        outputs = torch.stack([one.output.to(shares.dtype) for one in attended])
        mixed = (outputs * shares.unsqueeze(-1)).sum(dim=0).to(query.dtype)
    else:
        mixed = _mixed(attended, shares).to(query.dtype)
    if not weights:
        return mixed, None
    return mixed, Weights(attended, shares if sinks is None else _softmax(table, None))


def _table(one: Attended, tokens: int) -> torch.Tensor:
    """The log-sum-exps (results, heads) as (columns, tokens, heads), ``-inf`` where none is."""
    lse, results = one.lse, one.results
    place = results.on(lse.device)
    if place is None:
        return lse.unflatten(0, (results.columns, tokens))
    return lse.new_full((results.columns, tokens, lse.shape[1]), -torch.inf).index_put(place, lse)


def _rescaled(rescaling: Rescaling, one: Attended, table: torch.Tensor) -> torch.Tensor:
    """Log-sum-exps as the merge takes them: the context's and the query's by the method."""
    slope, shift, bias = rescaling
    role = one.results.role
    if role == "query":
        return table if _is(bias, 0.0) else table + _on(bias, table)
    if role == "prefix" or (_is(slope, 1.0) and _is(shift, 0.0)):
        return table
    slope, shift = _on(slope, table), _on(shift, table)
    if one.results.columns == 1:
        scaled = table * slope
        return scaled if _is(shift, 0.0) else scaled + shift
    whole = table.logsumexp(dim=0)
    return table + whole.masked_fill(whole == -torch.inf, 0.0) * (slope - 1.0) + shift


def _softmax(table: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Weights of all columns (columns, tokens, heads), those of sinks left out at the end."""
    if sinks is not None:
        sink = sinks.to(table.dtype).expand(1, *table.shape[1:])
        return torch.cat([table, sink]).softmax(dim=0)[:-1]
    # A token that sees nothing at all gets nothing; NaN and infinity of a model stay to be seen.
    return table.softmax(dim=0).masked_fill(table == -torch.inf, 0.0)


def _mixed(made: Sequence[Attended], shares: torch.Tensor) -> torch.Tensor:
    """The outputs (tokens, heads, value dim), fp32, mixed by weights (columns, tokens, heads)."""
    mixed = shares.new_zeros(*shares.shape[1:], made[0].output.shape[-1])
    sizes = [one.results.columns for one in made]
    for (results, output, _, _), share in zip(made, shares.split(sizes), strict=True):
        place = results.on(output.device)
        if place is not None:
            mixed.index_add_(0, place[1], output * share[place].unsqueeze(-1))
        elif results.columns == 1:
            mixed.addcmul_(output.to(mixed.dtype), share[0].unsqueeze(-1))
        else:
            by_column = output.unflatten(0, (results.columns, -1))
            mixed += (by_column * share.unsqueeze(-1)).sum(dim=0)
    return mixed


def _columns(index: torch.Tensor, tokens: int) -> tuple[int, torch.Tensor | None]:
    """Most results of a token, and which of its token's each one is; see `Results`."""
    columns = -(-len(index) // tokens)
    if torch.equal(index, torch.arange(tokens).repeat(columns)):
        return columns, None
    order = torch.argsort(index, stable=True)
    counts = torch.bincount(index, minlength=tokens)
    firsts = counts.cumsum(0) - counts
    column = torch.empty_like(index)
    column[order] = torch.arange(len(index)) - firsts[index[order]]
    return int(counts.max()), column


def _is(number: Number, value: float) -> bool:
    return isinstance(number, int | float) and number == value


def _on(number: Number, like: torch.Tensor) -> Number:
    return number.to(like) if isinstance(number, torch.Tensor) else number
