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
from itertools import accumulate, groupby
from typing import Any, Literal, NamedTuple

import torch

from rag_windows.attention import cuda
from rag_windows.attention.backends import AttentionRequest, attend, names
from rag_windows.attention.items import Item, Part
from rag_windows.attention.native import kernel as native

Role = Literal["prefix", "context", "query"]

Number = float | torch.Tensor
"""The same for all tokens of a pass, or (tokens, 1) fp32."""

MAX_MASK = 2**25
"""Rows x keys of one kernel call with a mask: bounds the mask and, on a CPU, its bias."""


@dataclass(eq=False, slots=True)
class Segment:
    """Keys that some tokens read together; or, with G groups, G such blocks of one size.

    Group ``g`` of the keys is read by M tokens, ``tokens[g * M : (g + 1) * M]``.

    Attributes:
        first: smallest position of a key; ``last`` is the largest.
        tokens: (G * M,) int64, on the CPU: places in the pass; None for all of them, in order.
        starts: position of the first key of each part, in which positions count up; None where
            they count up through all parts from ``first``.
        positions: (G or 1, keys) int64, of keys that do not count up so; or None.
        seen: which keys a token sees: None for all, "causal" if the i-th of a group's tokens sees
            the first i + 1 keys (M keys), or (G * M,) int64, the number of first keys; a group's
            only token then stands right behind the others that it sees.
        temperature: divides the logits.
        layers: by layer, the keys and values. They may lie in several places (parts) where there
            is one group; their lengths add up to that of the segment.
    """

    role: Role
    first: int
    last: int
    tokens: torch.Tensor | None = None
    starts: Sequence[int] | None = None
    positions: torch.Tensor | None = None
    seen: Literal["causal"] | torch.Tensor | None = None
    temperature: float = 1.0
    layers: Mapping[int, Sequence[Part]] = field(default_factory=dict, repr=False)

    def readers(self, tokens: int) -> int:
        """How many tokens of a pass of so many read it, those of all groups."""
        return tokens if self.tokens is None else len(self.tokens)

    def starts_of(self, lengths: Sequence[int]) -> Sequence[int]:
        """Position of the first key of each part, of these lengths."""
        return self.starts or list(accumulate(lengths[:-1], initial=self.first))


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

    def position_of(self, segment: Segment) -> int | None:
        """The position of all readers of a segment, if they share one."""
        if self.lowest == self.highest:
            return self.lowest
        if segment.tokens is None:
            return None
        low, high = self.positions[segment.tokens].aminmax()
        return int(low) if low == high else None


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


class Results:
    """Where the results of segments of one role belong among the tokens of a pass.

    Attributes:
        segments: in order; each gives a result for every token that reads it.
        place: of these results among those of all `Segments`.
        columns: the most results that a token has.
        column: (results,) int64, which of its token's results each one is; None if they are those
            of all tokens, in order, column after column.
        aligned: whether the results are one for each token, in order.
    """

    def __init__(self, role: Role, segments: Sequence[Segment], tokens: int, first: int) -> None:
        self.role = role
        self.segments = tuple(segments)
        self.sizes = [segment.readers(tokens) for segment in segments]
        self.place = slice(first, first + sum(self.sizes))
        self._tokens = tokens
        self._places: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self.columns, self.column = 1, None
        if len(segments) > 1 or segments[0].tokens is not None:
            self.columns, self.column = _columns(self.index, tokens)
        self.aligned = self.columns == 1 and self.column is None

    @property
    def index(self) -> torch.Tensor:
        """(results,) int64, on the CPU: the token of each result."""
        every = torch.arange(self._tokens)
        return torch.cat([every if one.tokens is None else one.tokens for one in self.segments])

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


class Segments:
    """Segments answered together, those of a role side by side. Not for several threads at once.

    Where they are ``static``, segments, tokens and every layer's keys stay what they are for all
    passes, so a kernel's arguments are made once per layer.
    """

    def __init__(self, segments: Sequence[Segment], tokens: int, *, static: bool = False) -> None:
        self.segments = tuple(segments)
        self._static = static
        self._for_layers: dict[tuple[int, Any], tuple[list[int], list[int], Any]] = {}
        self.results: list[Results] = []
        first = 0
        for role, run in groupby(segments, key=lambda segment: segment.role):
            self.results.append(Results(role, [*run], tokens, first))
            first = self.results[-1].place.stop

    def attend(self, asked: Queries, *, per_part: bool = False) -> list[Attended]:
        """Attention of each result's token over its segment, by role."""
        kernel = _kernel(asked)
        taken, items = self._for_kernel(asked, kernel)
        by_kernel: dict[int, SegmentOutput] = {}
        if items is not None:
            output, lse, parts = kernel.call(items, asked.query, per_part=per_part)
            if len(taken) == len(self.segments):
                return self._by_role(output, lse, parts)
            sizes = [self.segments[i].readers(len(asked.query)) for i in taken]
            outputs, lses = output.split(sizes), lse.split(sizes)
            for at, i in enumerate(taken):
                by_kernel[i] = outputs[at], lses[at], parts[at] if parts else None
        made = [
            by_kernel[i] if i in by_kernel else _read(one, asked, per_part=per_part)
            for i, one in enumerate(self.segments)
        ]
        own = [part for _, _, part in made] if per_part else None
        if len(made) == 1:
            return self._by_role(*made[0][:2], own)
        output, lse = torch.cat([one for one, _, _ in made]), torch.cat([one for _, one, _ in made])
        return self._by_role(output, lse, own)

    def _by_role(
        self, output: torch.Tensor, lse: torch.Tensor, parts: list[torch.Tensor | None] | None
    ) -> list[Attended]:
        if len(self.results) == 1:
            return [Attended(self.results[0], output, lse, parts)]
        made, first = [], 0
        for one in self.results:
            last = first + len(one.segments)
            own = None if parts is None else parts[first:last]
            made.append(Attended(one, output[one.place], lse[one.place], own))
            first = last
        return made

    def _for_kernel(self, asked: Queries, kernel: Any) -> tuple[list[int], Any]:
        """The segments that one call of the device's kernel answers, and its `Items`."""
        if kernel is None:
            return [], None
        held = self._for_layers.get((asked.layer, kernel))
        near, rows = asked.sliding_window, asked.rows
        if held is not None and near is None:
            return held[1:]
        single = not self._static and len(self.segments) == 1
        if single and kernel is native and _is_small(self.segments[0], asked.layer):
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
            one = self.segments[i]
            if (item := _item(one, asked, one.layers[asked.layer], kernel)) is not None:
                taken.append(i)
                asks.append(item)
        # What is made once costs little, however few keys there are.
        items = kernel.Items(asks) if asks and (self._static or kernel.pays(asks)) else None
        if self._static:
            self._for_layers[asked.layer, kernel] = offered, taken, items
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
        within = torch.exp(parts - lse.clamp_min(_LOWEST))
        return within * self.shares


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


_LOWEST = -1e30
"""Stands for ``-inf`` where that would be taken from itself."""


def read(
    reading: Reading, asked: Queries, sinks: torch.Tensor | None = None, *, weights: bool = False
) -> tuple[torch.Tensor, Weights | None]:
    """Attention of every token of a pass over all that it reads.

    ``sinks`` (heads,) are the logits of attention sinks, where there are any.

    Returns:
        (tokens, heads, value dim) in the query's dtype; and the attention weights, if they are
        wanted: a sink is no text and counts for nothing.
    """
    query, tokens = asked.query, len(asked.query)
    made = [
        one for segments in reading.segments for one in segments.attend(asked, per_part=weights)
    ]
    if len(made) == 1 and made[0].results.aligned and sinks is None:
        shares = (made[0].lse > -torch.inf).to(made[0].lse.dtype).unsqueeze(0)
        return made[0].output.to(query.dtype), Weights(made, shares) if weights else None
    table = torch.cat([_rescaled(reading, one, _table(one, tokens)) for one in made])
    shares = _softmax(table, sinks)
    if all(one.results.aligned for one in made):
        outputs = torch.stack([one.output.to(shares.dtype) for one in made])
        mixed = (outputs * shares.unsqueeze(-1)).sum(dim=0).to(query.dtype)
    else:
        mixed = _mixed(made, shares).to(query.dtype)
    if not weights:
        return mixed, None
    return mixed, Weights(made, shares if sinks is None else _softmax(table, None))


def weights_of_keys(weights: Weights, asked: Queries, role: Role, first: int = 0) -> torch.Tensor:
    """The attention weights that each key of a role's segment gets in a layer.

    There is one such segment, read by all tokens of the pass.

    Returns:
        (keys,) fp32 (fp64 for fp64): summed over heads and over the tokens from ``first`` on.
    """
    by_role = weights.shares.split([one.results.columns for one in weights.attended])
    found = zip(weights.attended, by_role, strict=True)
    own, shares = next((one, share[0]) for one, share in found if one.results.role == role)
    (segment,) = own.results.segments
    query, lengths = asked.query, [key.shape[2] for key, _ in segment.layers[asked.layer]]
    total = shares.new_zeros(sum(lengths))
    parts, places, mask = _visible(segment, asked)
    if not parts:
        return total
    keys = torch.cat([key[0] for key, _ in parts], dim=1).to(total.dtype)
    # (kv heads, query heads of each, tokens, ...), as keys are shared
    grouped = query.transpose(0, 1).unflatten(0, (len(keys), -1)).to(total.dtype)
    ours, whole = (
        one.transpose(0, 1).unflatten(0, (len(keys), -1)).unsqueeze(-1) for one in (shares, own.lse)
    )
    seen = total.new_zeros(keys.shape[1])
    for at in range(first, len(query), step := max(1, MAX_MASK // (query.shape[1] * len(seen)))):
        rows = slice(at, at + step)
        logits = grouped[:, :, rows] @ keys.unsqueeze(1).mT * asked.scale
        if asked.softcap is not None:
            logits = torch.tanh(logits / asked.softcap) * asked.softcap
        logits = logits / segment.temperature
        if mask is not None:
            logits = logits.masked_fill(~mask[0, :, rows], -torch.inf)
        # A token that sees nothing of the segment has no share of it.
        within = torch.exp(logits - whole[:, :, rows].clamp_min(_LOWEST))
        seen += (within * ours[:, :, rows]).sum(dim=(0, 1, 2))
    for place, own_keys in zip(
        range(len(lengths)) if places is None else places,
        seen.split([key.shape[2] for key, _ in parts]),
        strict=True,
    ):
        # What a sliding window hides is cut off in front.
        end = sum(lengths[: place + 1])
        total[end - len(own_keys) : end] = own_keys
    return total


def _table(one: Attended, tokens: int) -> torch.Tensor:
    """The log-sum-exps (results, heads) as (columns, tokens, heads), ``-inf`` where none is."""
    lse, results = one.lse, one.results
    place = results.on(lse.device)
    if place is None:
        return lse.unflatten(0, (results.columns, tokens))
    return lse.new_full((results.columns, tokens, lse.shape[1]), -torch.inf).index_put(place, lse)


def _rescaled(reading: Reading, one: Attended, table: torch.Tensor) -> torch.Tensor:
    """Log-sum-exps as the merge takes them: the context's and the query's by the method."""
    slope, shift, bias = reading.slope, reading.shift, reading.query_bias
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
    """Whether it has too few keys to be worth a call of the CPU kernel, as one step's query has."""
    parts = segment.layers[layer]
    few = sum(key.shape[2] for key, _ in parts) < native.LEAST_KEYS
    return few and segment.seen is None and len(parts[0][0]) == 1


def _kernel(asked: Queries) -> Any:
    """The kernel that answers several segments at once on a query's device, or None."""
    kernels = {"native": native, "cuda": cuda}
    return next((kernels[name] for name in names(asked.query.device.type) if name in kernels), None)


def _item(segment: Segment, asked: Queries, parts: Sequence[Part], kernel: Any) -> Item | None:
    """A kernel's item for parts of a segment; None if the kernel does not take it."""
    tokens = torch.arange(len(asked.query)) if segment.tokens is None else segment.tokens
    between, near = None, asked.sliding_window
    if isinstance(segment.seen, torch.Tensor):
        if len(tokens) > len(parts[0][0]) or not bool(segment.seen.all()):
            return None
        first = segment.seen * 0 if near is None else (segment.seen - near).clamp_min(0)
        between = first, segment.seen
    causal, heat = segment.seen == "causal", segment.temperature
    item = Item(parts, tokens, asked.scale, asked.softcap, heat, causal, between)
    return item if kernel.takes(item, asked.query) else None


def _cut_item(segment: Segment, parts: Sequence[Part], asked: Queries, kernel: Any) -> Item | None:
    """A kernel's item for the visible rest of a segment, if that is worth a call."""
    if not parts or kernel is None:
        return None
    item = _item(segment, asked, parts, kernel)
    return item if item is not None and kernel.pays([item]) else None


SegmentOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Output, log-sum-exp and, if wanted, parts of one segment; as in `Attended`."""


def _read(segment: Segment, asked: Queries, *, per_part: bool) -> SegmentOutput:
    """One segment by the fastest backend that serves it."""
    query, count = asked.query, len(segment.layers[asked.layer])
    (parts, places, mask), kernel = _visible(segment, asked), _kernel(asked)
    if places is not None and (item := _cut_item(segment, parts, asked, kernel)) is not None:
        output, lse, own = kernel.call(kernel.Items([item]), query, per_part=per_part)
        if not own or count == 1:
            return output, lse, None
        parts_lse = lse.unsqueeze(0) if own[0] is None else own[0]
        return output, lse, _spread(parts_lse, places, count)
    groups = len(segment.layers[asked.layer][0][0])
    of_tokens = query if segment.tokens is None else query[segment.tokens.to(query.device)]
    of_tokens = of_tokens.unflatten(0, (groups, -1)).transpose(1, 2)
    causal = mask is None and segment.seen == "causal"
    lengths = [key.shape[2] for key, _ in parts]
    masks = [None] * len(parts) if mask is None else mask.split(lengths, dim=-1)
    # Parts are read where they stand: joining them would copy every key, every time.
    made = []
    for (key, value), own in zip(parts, masks, strict=True):
        heat, cap = segment.temperature, asked.softcap
        made.append(
            _in_steps(AttentionRequest(of_tokens, key, value, asked.scale, heat, cap, causal, own))
        )
    if len(made) == 1:
        output, lse = made[0]
        lses = lse.unsqueeze(0)
    elif made:
        lses = torch.stack([one for _, one in made])
        lse = lses.logsumexp(dim=0)
        shares = torch.exp(lses - lse.clamp_min(_LOWEST)).unsqueeze(-1)
        mixed = sum(one * share for (one, _), share in zip(made, shares, strict=True))
        output = torch.as_tensor(mixed).to(query.dtype)
    else:
        shape, dim = of_tokens.shape[:3], segment.layers[asked.layer][0][1].shape[-1]
        exact = torch.promote_types(query.dtype, torch.float32)
        output = query.new_zeros(*shape, dim)
        lses = query.new_empty(0, *shape, dtype=exact)
        lse = lses.new_full(shape, -torch.inf)
    output, lse = output.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
    if not per_part or count == 1:
        return output, lse, None
    return output, lse, _spread(lses.transpose(2, 3).flatten(1, 2), places, count)


def _visible(
    segment: Segment, asked: Queries
) -> tuple[Sequence[Part], Sequence[int] | None, torch.Tensor | None]:
    """The parts of which a token sees something; their indices, if not all; and a mask.

    If all readers share a position, what a sliding window hides is cut off; else a mask hides it.
    """
    rows, near, parts = asked.rows, asked.sliding_window, segment.layers[asked.layer]
    if parts[0][0].dtype != asked.query.dtype:
        # Where one of both was computed under autocast.
        dtype = asked.query.dtype
        parts = [(key.to(dtype), value.to(dtype)) for key, value in parts]
    lengths = [key.shape[2] for key, _ in parts]
    hidden = [0] * len(parts)
    if near is not None and rows.lowest - segment.last >= near:
        hidden = lengths
    elif near is not None and not rows.within(segment, near):
        at = rows.position_of(segment)
        if at is None or segment.seen is not None or segment.positions is not None:
            return parts, None, _mask(segment, asked)
        hidden = [
            min(max(0, at - near + 1 - start), length)
            for start, length in zip(segment.starts_of(lengths), lengths, strict=True)
        ]
    elif isinstance(segment.seen, torch.Tensor) or (segment.seen is not None and len(parts) > 1):
        return parts, None, _mask(segment, asked)
    if not any(hidden) and all(lengths):
        return parts, None, None
    places = [i for i, length in enumerate(lengths) if length > hidden[i]]
    cut = [(parts[i][0][:, :, hidden[i] :], parts[i][1][:, :, hidden[i] :]) for i in places]
    return cut, places, None


def _spread(lses: torch.Tensor, places: Sequence[int] | None, count: int) -> torch.Tensor:
    """Log-sum-exps (parts, results, heads) of all ``count`` parts, from those of some."""
    if places is None:
        return lses
    whole = lses.new_full((count, *lses.shape[1:]), -torch.inf)
    whole[list(places)] = lses
    return whole


def _in_steps(request: AttentionRequest) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer a request with a mask in steps of rows, which bound the size of the mask."""
    groups, heads, rows, _ = request.query.shape
    step = max(1, MAX_MASK // (request.key.shape[2] * heads * groups))
    # Rows of a causal request see more keys the further behind they stand, so it stays whole.
    if request.mask is None or step >= rows:
        return attend(request)
    made = []
    for at in range(0, rows, step):
        place = slice(at, at + step)
        mask = None if request.mask is None else request.mask[:, :, place]
        made.append(attend(replace(request, query=request.query[:, :, place], mask=mask)))
    return torch.cat([one[0] for one in made], dim=2), torch.cat([one[1] for one in made], dim=2)


def _mask(segment: Segment, asked: Queries) -> torch.Tensor:
    """Bool (groups, 1, readers, keys): what each token sees."""
    rows, seen, near = asked.rows, segment.seen, asked.sliding_window
    if rows.within(segment, near):
        near = None
    if (segment, near) in rows.masks:
        return rows.masks[segment, near]
    parts = segment.layers[asked.layer]
    groups, lengths = len(parts[0][0]), [key.shape[2] for key, _ in parts]
    readers = segment.readers(len(asked.query)) // groups
    index = torch.arange(sum(lengths))
    mask = torch.ones(groups, readers, len(index), dtype=torch.bool)
    if isinstance(seen, torch.Tensor):
        mask = index < seen.view(groups, readers, 1)
    elif seen == "causal":
        mask = (index <= torch.arange(readers).unsqueeze(-1)).expand(groups, -1, -1)
    if near is not None:
        at = rows.positions if segment.tokens is None else rows.positions[segment.tokens]
        of_keys = segment.positions
        if of_keys is None:
            starts = zip(segment.starts_of(lengths), lengths, strict=True)
            of_keys = torch.cat([torch.arange(start, start + n) for start, n in starts])
        mask = mask & (at.view(groups, readers, 1) - of_keys.view(-1, 1, len(index)) < near)
    rows.masks[segment, near] = mask.unsqueeze(1).to(asked.query.device)
    return rows.masks[segment, near]
