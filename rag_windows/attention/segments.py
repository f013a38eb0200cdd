"""Attention over segments: the one function by which every token of every pass reads keys.

A segment is a block of keys and values that some tokens of a forward pass read together: the
prefix, a window, the query so far. A backend answers it with an output and the log-sum-exp of its
logits, and attention over the union of segments is ``sum_s w_s o_s`` with ``w = softmax(l)``. All
methods and all kinds of passes differ only in which tokens read which segments, and in what becomes
of the context's ``l`` before that softmax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from rag_windows.attention.backends import KERNEL, Request, attend, names
from rag_windows.attention.native import kernel as native
from rag_windows.attention.native.kernel import Part

Role = Literal["prefix", "context", "query"]

Number = float | torch.Tensor
"""The same for all tokens of a pass, or (tokens, 1) fp32."""

MAX_MASK = 2**25
"""Rows x keys of one kernel call that needs a mask: what that, and on a CPU its bias, may take."""


@dataclass(eq=False, slots=True)
class Segment:
    """Keys that some tokens read together; or, with G groups, G such blocks of one size.

    Group ``g`` of the keys is read by M tokens, ``tokens[g * M : (g + 1) * M]``.

    Attributes:
        first: smallest position of a key; ``last`` is the largest.
        tokens: (G * M,) int64, on the CPU: places in the pass; None for all of them, in order.
        positions: (keys,) or (G, keys) int64, of the keys; None where they count up from ``first``.
        seen: which keys a token sees: None for all, "causal" if the i-th of a group's tokens sees
            the first i + 1 keys (M keys), or (G * M,) int64, the number of first keys; a group's
            only token then stands right behind the others that it sees.
        temperature: divides the logits.
        layers: by layer, the keys and values. They may lie in several places (parts) where there
            is one group; their lengths add up to that of the segment.
    """

    first: int
    last: int
    tokens: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    seen: Literal["causal"] | torch.Tensor | None = None
    temperature: float = 1.0
    layers: Mapping[int, Sequence[Part]] = field(default_factory=dict, repr=False)

    def readers(self, tokens: int) -> int:
        """How many tokens of a pass of so many read it, those of all groups."""
        return tokens if self.tokens is None else len(self.tokens)


class Rows:
    """Where the tokens of a pass stand, and what its layers work out once for all of them.

    ``positions`` (tokens,) int64 are on the CPU; ``masks`` are of segments in layers with a sliding
    window of that size; ``furthest`` is the largest position of a segment's readers.
    """

    __slots__ = ("furthest", "highest", "lowest", "masks", "positions")

    def __init__(self, positions: torch.Tensor) -> None:
        self.positions = positions
        first, last = positions.aminmax() if len(positions) > 1 else (positions, positions)
        self.lowest, self.highest = int(first), int(last)
        self.masks: dict[tuple[Segment, int | None], torch.Tensor] = {}
        self.furthest: dict[Segment, int] = {}

    def within(self, segment: Segment, sliding_window: int | None) -> bool:
        """Whether a sliding window hides none of a segment's keys from any token."""
        if sliding_window is None or self.highest - segment.first < sliding_window:
            return True
        if segment.tokens is None:
            return False
        if segment not in self.furthest:
            self.furthest[segment] = int(self.positions[segment.tokens].max())
        return self.furthest[segment] - segment.first < sliding_window


@dataclass(slots=True)
class Queries:
    """What the tokens of a pass, which stand at ``rows``, ask in one layer.

    ``query`` is (tokens, heads, head dim). The logits are multiplied by ``scale`` and capped by
    ``softcap``; a token sees ``sliding_window`` positions, or all for None.
    """

    layer: int
    query: torch.Tensor
    rows: Rows
    scale: float
    softcap: float | None = None
    sliding_window: int | None = None


class Segments:
    """Segments of one role, answered together. Not for several threads at once.

    The *results* are one a segment, group and token, in that order. Static segments' keys stay
    where they are, so that what a kernel is asked is made once a layer.

    Attributes:
        columns: the most results that a token has.
        column: (results,) int64, which of its token's results each one is; None if they are those
            of all tokens, in order, column after column.
        aligned: whether the results are one for each token, in order.
    """

    def __init__(
        self, role: Role, segments: Sequence[Segment], tokens: int, *, static: bool = False
    ) -> None:
        self.role: Role = role
        self.segments = tuple(segments)
        self._static = static
        self._for_layers: dict[int, tuple[list[int], list[int], native.Items | None]] = {}
        self._places: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._tokens = tokens
        self.columns, self.column = 1, None
        if len(segments) > 1 or segments[0].tokens is not None:
            self.columns, self.column = _columns(self.index, tokens)
        self.aligned = self.columns == 1 and self.column is None

    @property
    def index(self) -> torch.Tensor:
        """(results,) int64, on the CPU: the token of each result."""
        every = torch.arange(self._tokens)
        return torch.cat([every if one.tokens is None else one.tokens for one in self.segments])

    def place(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Column and token of each result, on a device; None where they lie in order."""
        if self.column is None:
            return None
        if device not in self._places:
            self._places[device] = self.column.to(device), self.index.to(device)
        return self._places[device]

    def attend(self, asked: Queries) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of each result's token over its segment.

        Returns:
            Output (results, heads, value dim) in the query's dtype, zero where a token sees no key;
            lse (results, heads), fp32 (fp64 for fp64), ``-inf`` there.
        """
        taken, items = self._for_kernel(asked)
        if items is None:
            made = [_read(one, asked) for one in self.segments]
        else:
            output, lse = native.call(items, asked.query)
            if len(taken) == len(self.segments):
                return output, lse
            sizes = [self.segments[i].readers(len(asked.query)) for i in taken]
            answers = zip(output.split(sizes), lse.split(sizes), strict=True)
            by_kernel = dict(zip(taken, answers, strict=True))
            made = [by_kernel.get(i) or _read(one, asked) for i, one in enumerate(self.segments)]
        if len(made) == 1:
            return made[0]
        return torch.cat([one[0] for one in made]), torch.cat([one[1] for one in made])

    def _for_kernel(self, asked: Queries) -> tuple[list[int], native.Items | None]:
        """The segments that one call of the CPU kernel answers, and what it is asked."""
        if asked.query.device.type != "cpu" or KERNEL not in names("cpu"):
            return [], None
        held = self._for_layers.get(asked.layer)
        near, rows = asked.sliding_window, asked.rows
        if held is not None and near is None:
            return held[1:]
        if (
            not self._static
            and len(self.segments) == 1
            and _is_small(self.segments[0], asked.layer)
        ):
            return [], None
        offered = [
            i
            for i, one in enumerate(self.segments)
            if isinstance(one.seen, torch.Tensor) or rows.within(one, near)
        ]
        if held is not None and held[0] == offered:
            return held[1:]
        taken, asks = [], []
        for i in offered:
            if (item := _item(self.segments[i], asked)) is not None:
                taken.append(i)
                asks.append(item)
        # What is made once costs little, however few keys there are.
        items = native.Items(asks) if asks and (self._static or native.pays(asks)) else None
        if self._static:
            self._for_layers[asked.layer] = offered, taken, items
        return taken, items


@dataclass(frozen=True, slots=True)
class Reading:
    """What the tokens of a pass, which stand at ``rows``, read in one layer.

    Every token has a result in one of the segments at least. The method's slope and shift are of
    the context's log-sum-exp, its bias is added to the query's.
    """

    rows: Rows
    segments: Sequence[Segments]
    slope: Number = 1.0
    shift: Number = 0.0
    query_bias: Number = 0.0


def read(
    reading: Reading,
    asked: Queries,
    sinks: torch.Tensor | None = None,
    *,
    weights: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    """Attention of every token of a pass over all that it reads.

    ``sinks`` (heads,) are the logits of attention sinks, where there are any.

    Returns:
        (tokens, heads, value dim) in the query's dtype; and, if they are wanted, for each of
        ``reading.segments`` the weights (results, heads) of its results, fp32, which sum to one
        over a token's: a sink is no text and counts for nothing.
    """
    query = asked.query
    every, tokens = reading.segments, len(query)
    outputs, lses = zip(*(segments.attend(asked) for segments in every), strict=True)
    plain = sinks is None and not weights and all(segments.aligned for segments in every)
    if plain and len(outputs) == 1:
        return outputs[0], None
    if plain and len(outputs) == 2:
        # The newest token always sees itself, so no token sees nothing in both.
        one, other = (_rescaled(reading, *both) for both in zip(every, lses, strict=True))
        share = torch.sigmoid(one - other).unsqueeze(-1)
        mixed = torch.lerp(outputs[1].to(share.dtype), outputs[0].to(share.dtype), share)
        return mixed.to(query.dtype), None
    tables = [
        _rescaled(reading, segments, _table(segments, lse, tokens))
        for segments, lse in zip(every, lses, strict=True)
    ]
    return _merged(every, outputs, tables, sinks, weights=weights)


def _table(segments: Segments, lse: torch.Tensor, tokens: int) -> torch.Tensor:
    """The log-sum-exps (results, heads) as (columns, tokens, heads), ``-inf`` where none is."""
    place = segments.place(lse.device)
    if place is None:
        return lse.unflatten(0, (segments.columns, tokens))
    return lse.new_full((segments.columns, tokens, lse.shape[1]), -torch.inf).index_put(place, lse)


def _rescaled(reading: Reading, segments: Segments, table: torch.Tensor) -> torch.Tensor:
    """Log-sum-exps as the merge takes them: the context's and the query's by the method."""
    slope, shift, bias = reading.slope, reading.shift, reading.query_bias
    if segments.role == "query":
        return table if _is(bias, 0.0) else table + _on(bias, table)
    if segments.role == "prefix" or (_is(slope, 1.0) and _is(shift, 0.0)):
        return table
    slope, shift = _on(slope, table), _on(shift, table)
    if segments.columns == 1:
        scaled = table * slope
        return scaled if _is(shift, 0.0) else scaled + shift
    whole = table.logsumexp(dim=0)
    return table + whole.masked_fill(whole == -torch.inf, 0.0) * (slope - 1.0) + shift


def _merged(
    every: Sequence[Segments],
    outputs: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor],
    sinks: torch.Tensor | None,
    *,
    weights: bool,
) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    """The softmax over the segments of each token, and what it mixes; see `read`."""
    lse = torch.cat(list(tables))
    peak = lse.amax(dim=0)
    if sinks is not None:
        sinks = sinks.to(lse.dtype)
        peak = torch.maximum(peak, sinks)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    shares = torch.exp(lse - peak)
    text = shares.sum(dim=0)
    total = text if sinks is None else text + torch.exp(sinks - peak)
    tiny = torch.finfo(text.dtype).tiny
    sizes = [segments.columns for segments in every]
    mixing = (shares / total.clamp_min(tiny)).split(sizes)
    mixed = mixing[0].new_zeros(*text.shape, outputs[0].shape[-1])
    for segments, output, share in zip(every, outputs, mixing, strict=True):
        place = segments.place(output.device)
        if place is not None:
            mixed.index_add_(0, place[1], output * share[place].unsqueeze(-1))
        elif segments.columns == 1:
            mixed.addcmul_(output.to(mixed.dtype), share[0].unsqueeze(-1))
        else:
            by_column = output.unflatten(0, (segments.columns, -1))
            mixed += (by_column * share.unsqueeze(-1)).sum(dim=0)
    mixed = mixed.to(outputs[0].dtype)
    if not weights:
        return mixed, None
    recorded = []
    for segments, share in zip(every, (shares / text.clamp_min(tiny)).split(sizes), strict=True):
        place = segments.place(share.device)
        recorded.append(share.flatten(0, 1) if place is None else share[place])
    return mixed, recorded


def _columns(index: torch.Tensor, tokens: int) -> tuple[int, torch.Tensor | None]:
    """Most results of a token, and which of its token's each one is; see `Segments.column`."""
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


def _is_small(segment: Segment, layer: int) -> bool:
    """Whether it has too few keys to be worth a call of the CPU kernel, as a lone step's query."""
    parts = segment.layers[layer]
    few = sum(key.shape[2] for key, _ in parts) < native.LEAST_KEYS
    return few and segment.seen is None and len(parts[0][0]) == 1


def _item(segment: Segment, asked: Queries) -> native.Item | None:
    """A segment as the CPU kernel is asked for it; None if it can't be."""
    parts = segment.layers[asked.layer]
    tokens = torch.arange(len(asked.query)) if segment.tokens is None else segment.tokens
    between, near = None, asked.sliding_window
    if isinstance(segment.seen, torch.Tensor):
        if len(tokens) > len(parts[0][0]) or not bool(segment.seen.all()):
            return None
        first = segment.seen * 0 if near is None else (segment.seen - near).clamp_min(0)
        between = first, segment.seen
    causal, heat = segment.seen == "causal", segment.temperature
    item = native.Item(parts, tokens, asked.scale, asked.softcap, heat, causal, between)
    return item if native.takes(item, asked.query) else None


def _read(segment: Segment, asked: Queries) -> tuple[torch.Tensor, torch.Tensor]:
    """One segment by the fastest backend that serves it; as `Segments.attend` gives it."""
    query, rows, near = asked.query, asked.rows, asked.sliding_window
    parts = segment.layers[asked.layer]
    if parts[0][0].dtype != query.dtype:
        # Where one of both was computed under autocast.
        parts = [(key.to(query.dtype), value.to(query.dtype)) for key, value in parts]
    groups, keys = len(parts[0][0]), sum(key.shape[2] for key, _ in parts)
    readers = segment.readers(len(query)) // groups
    if keys == 0 or (near is not None and rows.lowest - segment.last >= near):
        shape = groups * readers, query.shape[1]
        exact = torch.promote_types(query.dtype, torch.float32)
        output = query.new_zeros(*shape, parts[0][1].shape[-1])
        return output, query.new_full(shape, -torch.inf, dtype=exact)
    mask = _mask(segment, asked, groups, readers, keys)
    of_tokens = query if segment.tokens is None else query[segment.tokens.to(query.device)]
    of_tokens = of_tokens.unflatten(0, (groups, readers)).transpose(1, 2)
    causal = mask is None and segment.seen == "causal"
    if len(parts) > 1 and (causal or mask is not None):
        parts = [(torch.cat([k for k, _ in parts], 2), torch.cat([v for _, v in parts], 2))]
    # Parts are read where they stand: joining them would copy every key, every time.
    made = []
    for part in parts:
        request = Request(
            of_tokens, *part, asked.scale, segment.temperature, asked.softcap, causal, mask
        )
        made.append(attend(request) if mask is None else _in_steps(request))
    output, lse = made[0]
    if len(made) > 1:
        lses = torch.stack([one[1] for one in made])
        lse = lses.logsumexp(dim=0)
        shares = torch.exp(lses - lse).unsqueeze(-1)
        mixed = sum(one[0] * share for one, share in zip(made, shares, strict=True))
        output = torch.as_tensor(mixed).to(query.dtype)
    return output.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def _in_steps(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """A request with a mask, so many rows at a time that what is as large stays within bounds."""
    groups, heads, rows, _ = request.query.shape
    step = max(1, MAX_MASK // (request.key.shape[2] * heads * groups))
    if step >= rows:
        return attend(request)
    made = []
    for at in range(0, rows, step):
        place = slice(at, at + step)
        mask = None if request.mask is None else request.mask[:, :, place]
        made.append(attend(replace(request, query=request.query[:, :, place], mask=mask)))
    return torch.cat([one[0] for one in made], dim=2), torch.cat([one[1] for one in made], dim=2)


def _mask(
    segment: Segment, asked: Queries, groups: int, readers: int, keys: int
) -> torch.Tensor | None:
    """Bool (groups, 1, readers, keys): what each token sees; None where no kernel needs a mask."""
    rows, seen, near = asked.rows, segment.seen, asked.sliding_window
    if rows.within(segment, near):
        near = None
        if not isinstance(seen, torch.Tensor):
            return None
    if (segment, near) in rows.masks:
        return rows.masks[segment, near]
    index = torch.arange(keys)
    mask = torch.ones(groups, readers, keys, dtype=torch.bool)
    if isinstance(seen, torch.Tensor):
        mask = index < seen.view(groups, readers, 1)
    elif seen == "causal":
        mask = (index <= torch.arange(readers).unsqueeze(-1)).expand(groups, -1, -1)
    if near is not None:
        at = rows.positions if segment.tokens is None else rows.positions[segment.tokens]
        of_keys = segment.first + index if segment.positions is None else segment.positions
        mask = mask & (at.view(groups, readers, 1) - of_keys.view(-1, 1, keys) < near)
    rows.masks[segment, near] = mask.unsqueeze(1).to(asked.query.device)
    return rows.masks[segment, near]
