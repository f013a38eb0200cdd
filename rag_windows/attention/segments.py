"""Attention over segments: the one function by which every token of every pass reads keys.

A segment is a block of keys and values that some tokens of a forward pass read together: the
prefix, a window, the query so far. A backend answers it with an output and the log-sum-exp of its
logits, and attention over the union of segments is ``sum_s w_s o_s`` with ``w = softmax(l)``. All
methods and all kinds of passes differ only in which tokens read which segments, and in what becomes
of the context's ``l`` before that softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from rag_windows.attention.backends import Request, attend
from rag_windows.attention.native import kernel as native

Role = Literal["prefix", "context", "query"]
Part = tuple[torch.Tensor, torch.Tensor]
"""Keys (groups, kv heads, keys, head dim) and values (groups, kv heads, keys, value dim)."""


class Layers(Protocol):
    """Something that has the parts of each layer, by the layer's number."""

    def __getitem__(self, layer: int, /) -> Sequence[Part]:
        """The parts of a layer."""


Number = float | torch.Tensor
"""The same for all tokens of a pass, or (tokens, 1) fp32."""

MAX_MASK = 2**25
"""Rows x keys of one kernel call that needs a mask: what that, and on a CPU its bias, may take."""


@dataclass(eq=False, slots=True)
class Segment:
    """Keys that some tokens read together; or, with G groups, G such blocks of one size.

    Group ``g`` of the keys is read by M tokens, ``tokens[g * M : (g + 1) * M]``.

    Attributes:
        first: smallest position of a key.
        last: largest position of a key.
        tokens: (G * M,) int64, on the CPU: places in the pass; None for all of them, in order.
        positions: (keys,) or (G, keys) int64, of the keys; None where they are ``first``,
            ``first + 1``, ...
        seen: which keys a token sees: None for all, "causal" if the i-th of a group's tokens sees
            the first i + 1 keys (M keys), or (G * M,) int64, the number of first keys.
        newest: whether, with numbers in `seen`, each group has one token, which stands right behind
            the others that it sees.
        temperature: divides the logits.
        layers: by layer, the keys and values. They may lie in several places (parts) where there
            is one group; their lengths add up to that of the segment.
    """

    first: int
    last: int
    tokens: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    seen: Literal["causal"] | torch.Tensor | None = None
    newest: bool = False
    temperature: float = 1.0
    layers: Layers = field(default_factory=dict[int, Sequence[Part]], repr=False)

    def readers(self, tokens: int) -> int:
        """How many tokens of a pass of so many read it, those of all groups."""
        return tokens if self.tokens is None else len(self.tokens)


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the tokens of a pass stand.

    Attributes:
        positions: (tokens,) int64, on the CPU.
        lowest: the smallest.
        highest: the largest.
        masks: of segments in layers that see so far, made once for all layers of the pass.
        furthest: largest position of a segment's readers, too.
    """

    positions: torch.Tensor
    lowest: int
    highest: int
    masks: dict[tuple[int, int | None], torch.Tensor | None] = field(default_factory=dict)
    furthest: dict[int, int] = field(default_factory=dict)

    @classmethod
    def at(cls, positions: torch.Tensor) -> Rows:
        """Rows at positions (tokens,) int64, on the CPU; at least one."""
        return cls(positions, int(positions.min()), int(positions.max()))

    def __len__(self) -> int:
        return len(self.positions)


class Segments:
    """Segments of one role, answered together. Not for several threads at once.

    The *results* are one a segment, group and token, in that order.

    Attributes:
        role: of all of them.
        segments: at least one.
        index: (results,) int64, on the CPU: the token of each result; None if the results are one
            for each token of the pass, in order.

    Args:
        role: see there.
        segments: see there.
        tokens: of the pass.
        static: whether the segments' keys stay where they are, so that what a kernel is asked is
            made once a layer.
    """

    __slots__ = ("_index", "_items", "_static", "index", "role", "segments")

    def __init__(
        self, role: Role, segments: Sequence[Segment], tokens: int, *, static: bool = False
    ) -> None:
        self.role: Role = role
        self.segments = tuple(segments)
        self.index = _index(self.segments, tokens)
        self._static = static
        self._items: dict[int, tuple[list[int], native.Items]] = {}
        self._index: dict[torch.device, torch.Tensor] = {}

    def index_on(self, device: torch.device) -> torch.Tensor | None:
        """`index` on a device."""
        if self.index is None:
            return None
        if device not in self._index:
            self._index[device] = self.index.to(device)
        return self._index[device]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        rows: Rows,
        scale: float,
        softcap: float | None,
        reach: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of each result's token over its segment.

        Args:
            layer: whose keys.
            query: (tokens, heads, head dim).
            rows: where the tokens stand.
            scale: multiplies the logits.
            softcap: caps them, or None.
            reach: positions that a token sees in this layer, or None for all.

        Returns:
            Output (results, heads, value dim) in the query's dtype, zero where a token sees no key;
            lse (results, heads), fp32 (fp64 for fp64), ``-inf`` there.
        """
        chosen, items = self._for_kernel(layer, query, rows, scale, softcap, reach)
        if items is None:
            made = [_read(one, layer, query, rows, scale, softcap, reach) for one in self.segments]
        else:
            output, lse = native.call(items, query)
            if len(chosen) == len(self.segments):
                return output, lse
            sizes = [self.segments[i].readers(len(query)) for i in chosen]
            pieces = dict(
                zip(chosen, zip(output.split(sizes), lse.split(sizes), strict=True), strict=True)
            )
            made = [
                pieces[i] if i in pieces else _read(one, layer, query, rows, scale, softcap, reach)
                for i, one in enumerate(self.segments)
            ]
        if len(made) == 1:
            return made[0]
        return torch.cat([one[0] for one in made]), torch.cat([one[1] for one in made])

    def _for_kernel(
        self,
        layer: int,
        query: torch.Tensor,
        rows: Rows,
        scale: float,
        softcap: float | None,
        reach: int | None,
    ) -> tuple[list[int], native.Items | None]:
        """The segments that one call of the CPU kernel answers, and what it is asked."""
        if query.device.type != "cpu" or not native.active():
            return [], None
        if self._static and reach is None and layer in self._items:
            return self._items[layer]
        chosen = [
            index
            for index, one in enumerate(self.segments)
            if _countable(one) or (_within(one, rows, reach) and not _counted(one))
        ]
        held = self._items.get(layer)
        if held is not None and held[0] == chosen:
            return held
        readings: list[native.Reading] = []
        taken: list[int] = []
        for index in chosen:
            made = _readings(self.segments[index], layer, query, scale, softcap, reach)
            if made:
                taken.append(index)
                readings += made
        if not native.pays(readings):
            return [], None
        items = native.Items(readings)
        if self._static and taken == chosen:
            self._items[layer] = taken, items
        return taken, items


@dataclass(frozen=True, slots=True)
class Reading:
    """What the tokens of a pass read in one layer, and how the method rescales it.

    Attributes:
        rows: where the tokens stand.
        segments: by role; every token has a result in one of them at least.
        slope: of the context's log-sum-exp.
        shift: added to it then.
        query_bias: added to the query's log-sum-exp.
    """

    rows: Rows
    segments: Sequence[Segments]
    slope: Number = 1.0
    shift: Number = 0.0
    query_bias: Number = 0.0


def read(
    reading: Reading,
    layer: int,
    query: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    reach: int | None,
    sinks: torch.Tensor | None,
    weights: bool,
) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    """Attention of every token of a pass over all that it reads.

    Args:
        reading: what that is.
        layer: number of the layer.
        query: (tokens, heads, head dim).
        scale: multiplies the logits.
        softcap: caps them, or None.
        reach: positions that a token sees in this layer, or None for all.
        sinks: (heads,) logits of attention sinks, or None.
        weights: whether the attention weights of segments are wanted.

    Returns:
        (tokens, heads, value dim) in the query's dtype; and for each of ``reading.segments`` the
        weights (results, heads) of its results, fp32, which sum to one over a token's: a sink is no
        text and counts for nothing. None if they are not wanted.
    """
    outputs, lses = [], []
    for segments in reading.segments:
        output, lse = segments.attend(layer, query, reading.rows, scale, softcap, reach)
        outputs.append(output)
        lses.append(lse)
    sink = None if sinks is None else sinks.to(lses[0].dtype)
    alone = [segments.index is None for segments in reading.segments]
    if all(alone):
        lses = _rescaled(reading, lses)
        if sink is None and not weights:
            if len(outputs) == 1:
                return outputs[0], None
            if len(outputs) == 2:
                # The newest token always sees itself, so no token sees nothing in both.
                share = torch.sigmoid(lses[0] - lses[1]).unsqueeze(-1)
                exact = share.dtype
                mixed = torch.lerp(outputs[1].to(exact), outputs[0].to(exact), share)
                return mixed.to(query.dtype), None
        return _merged(outputs, lses, sink, weights)
    if len(query) == 1:
        return _merged_for_one(reading, outputs, lses, sink, weights)
    return _merged_by_token(reading, outputs, lses, sink, len(query), weights)


def _rescaled(reading: Reading, lses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each role's log-sum-exp as the merge takes it, where each is of all tokens."""
    made = []
    several = sum(one.role == "context" for one in reading.segments) > 1
    if several:
        raise ValueError("A pass has its whole context in one place.")
    for segments, lse in zip(reading.segments, lses, strict=True):
        if segments.role == "context" and not _unchanged(reading):
            lse = lse * _on(reading.slope, lse) + _on(reading.shift, lse)
        elif segments.role == "query" and not _is(reading.query_bias, 0.0):
            lse = lse + _on(reading.query_bias, lse)
        made.append(lse)
    return made


def _merged(
    outputs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    sink: torch.Tensor | None,
    weights: bool,
) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    """Merge segments that all tokens read."""
    stacked = torch.stack(tuple(lses))
    peak = stacked.amax(dim=0)
    if sink is not None:
        peak = torch.maximum(peak, sink)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    shares = torch.exp(stacked - peak)
    text = shares.sum(dim=0)
    tiny = torch.finfo(text.dtype).tiny
    total = text if sink is None else text + torch.exp(sink - peak)
    mixing = shares / total.clamp_min(tiny)
    mixed = sum(
        output.to(share.dtype) * share.unsqueeze(-1)
        for output, share in zip(outputs, mixing, strict=True)
    )
    told = list(shares / text.clamp_min(tiny)) if weights else None
    return torch.as_tensor(mixed).to(outputs[0].dtype), told


def _merged_for_one(
    reading: Reading,
    outputs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    sink: torch.Tensor | None,
    weights: bool,
) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    """`_merged_by_token` for a pass of one token, as a decode step is, in fewer operations."""
    roles = [segments.role for segments in reading.segments]
    made = list(lses)
    if "context" in roles and not _unchanged(reading):
        at = roles.index("context")
        whole = torch.logsumexp(made[at], dim=0, keepdim=True)
        finite = whole.masked_fill(whole == -torch.inf, 0.0)
        made[at] = made[at] + finite * (reading.slope - 1.0) + reading.shift
    if not _is(reading.query_bias, 0.0):
        made = [
            lse + reading.query_bias if role == "query" else lse
            for role, lse in zip(roles, made, strict=True)
        ]
    joined = torch.cat(made)
    peak = joined.amax(dim=0, keepdim=True)
    if sink is not None:
        peak = torch.maximum(peak, sink)
    shares = torch.exp(joined - peak.masked_fill(peak == -torch.inf, 0.0))
    text = shares.sum(dim=0, keepdim=True)
    tiny = torch.finfo(text.dtype).tiny
    total = text if sink is None else text + torch.exp(sink - peak)
    mixing = (shares / total.clamp_min(tiny)).unsqueeze(-1)
    mixed = (torch.cat(list(outputs)) * mixing).sum(dim=0, keepdim=True)
    told = None
    if weights:
        told = list((shares / text.clamp_min(tiny)).split([len(lse) for lse in lses]))
    return mixed.to(outputs[0].dtype), told


def _merged_by_token(
    reading: Reading,
    outputs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    sink: torch.Tensor | None,
    tokens: int,
    weights: bool,
) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    """Merge segments of which a token may read any number."""
    device, heads = lses[0].device, lses[0].shape[1]
    every = torch.arange(tokens, device=device)
    indices = [
        every if index is None else index
        for index in (segments.index_on(device) for segments in reading.segments)
    ]
    made = []
    context = [i for i, one in enumerate(reading.segments) if one.role == "context"]
    change: torch.Tensor | None = None
    if context and not _unchanged(reading):
        whole = _logsumexp(
            torch.cat([lses[i] for i in context]), torch.cat([indices[i] for i in context]), tokens
        )
        finite = whole.masked_fill(whole == -torch.inf, 0.0)
        change = finite * (_on(reading.slope, whole) - 1.0) + _on(reading.shift, whole)
        change = change.expand(tokens, heads)
    for segments, lse, index in zip(reading.segments, lses, indices, strict=True):
        if segments.role == "context" and change is not None:
            lse = lse + change[index]
        elif segments.role == "query" and not _is(reading.query_bias, 0.0):
            bias = _on(reading.query_bias, lse)
            lse = lse + (bias[index] if isinstance(bias, torch.Tensor) else bias)
        made.append(lse)
    whole_lse, whole_index = torch.cat(made), torch.cat(indices)
    peak = whole_lse.new_full((tokens, heads), -torch.inf)
    peak = peak.scatter_reduce(0, whole_index.unsqueeze(-1).expand_as(whole_lse), whole_lse, "amax")
    if sink is not None:
        peak = torch.maximum(peak, sink)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    shares = torch.exp(whole_lse - peak[whole_index])
    text = torch.zeros_like(peak).index_add_(0, whole_index, shares)
    tiny = torch.finfo(text.dtype).tiny
    total = text if sink is None else text + torch.exp(sink - peak)
    mixing = (shares / total.clamp_min(tiny)[whole_index]).split([len(lse) for lse in made])
    mixed = shares.new_zeros(tokens, heads, outputs[0].shape[-1])
    for output, share, index, segments in zip(
        outputs, mixing, indices, reading.segments, strict=True
    ):
        weighed = output.to(share.dtype) * share.unsqueeze(-1)
        if segments.index is None:
            mixed += weighed
        else:
            mixed.index_add_(0, index, weighed)
    told = None
    if weights:
        told = list((shares / text.clamp_min(tiny)[whole_index]).split([len(x) for x in made]))
    return mixed.to(outputs[0].dtype), told


def _logsumexp(lse: torch.Tensor, index: torch.Tensor, tokens: int) -> torch.Tensor:
    """(tokens, heads): over the results of each token; ``-inf`` where there is none."""
    peak = lse.new_full((tokens, lse.shape[1]), -torch.inf)
    peak = peak.scatter_reduce(0, index.unsqueeze(-1).expand_as(lse), lse, "amax")
    finite = peak.masked_fill(peak == -torch.inf, 0.0)
    total = torch.zeros_like(peak).index_add_(0, index, torch.exp(lse - finite[index]))
    return torch.log(total) + finite


def _unchanged(reading: Reading) -> bool:
    return _is(reading.slope, 1.0) and _is(reading.shift, 0.0)


def _is(number: Number, value: float) -> bool:
    return isinstance(number, int | float) and number == value


def _on(number: Number, like: torch.Tensor) -> Number:
    return number.to(like) if isinstance(number, torch.Tensor) else number


def _index(segments: Sequence[Segment], tokens: int) -> torch.Tensor | None:
    if len(segments) == 1 and segments[0].tokens is None:
        return None
    every = torch.arange(tokens)
    index = torch.cat([every if one.tokens is None else one.tokens for one in segments])
    return None if torch.equal(index, every) else index


def _counted(segment: Segment) -> bool:
    return isinstance(segment.seen, torch.Tensor)


def _countable(segment: Segment) -> bool:
    """Whether each group has one token, which stands where the last key that it sees does."""
    return segment.newest and _counted(segment)


def _within(segment: Segment, rows: Rows, reach: int | None) -> bool:
    """Whether a layer's reach hides none of the keys from any token."""
    if reach is None or rows.highest - segment.first < reach:
        return True
    if segment.tokens is None:
        return False
    if id(segment) not in rows.furthest:
        rows.furthest[id(segment)] = int(rows.positions[segment.tokens].max())
    return rows.furthest[id(segment)] - segment.first < reach


def _readings(
    segment: Segment,
    layer: int,
    query: torch.Tensor,
    scale: float,
    softcap: float | None,
    reach: int | None,
) -> list[native.Reading]:
    """A segment as the CPU kernel is asked for it, a reading a group; none if it can't be."""
    parts = segment.layers[layer]
    groups, kv_heads, keys, _ = parts[0][0].shape
    readers = segment.readers(len(query)) // groups
    if keys == 0 or not native.takes(
        query, parts, readers * (query.shape[1] // kv_heads), causal=segment.seen == "causal"
    ):
        return []
    tokens = range(len(query)) if segment.tokens is None else segment.tokens.tolist()
    stretches = [slice(None)] * groups
    if isinstance(segment.seen, torch.Tensor):
        stretches = [
            slice(0 if reach is None else max(0, seen - reach), seen)
            for seen in segment.seen.tolist()
        ]
    return [
        native.Reading(
            [
                (key[group][:, stretches[group]], value[group][:, stretches[group]])
                for key, value in parts
            ],
            tokens[group * readers : (group + 1) * readers],
            scale,
            softcap,
            segment.temperature,
            causal=segment.seen == "causal",
        )
        for group in range(groups)
    ]


def _read(
    segment: Segment,
    layer: int,
    query: torch.Tensor,
    rows: Rows,
    scale: float,
    softcap: float | None,
    reach: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One segment by the fastest backend that serves it; as `Segments.attend` gives it."""
    parts = segment.layers[layer]
    key, value = parts[0]
    if len(parts) > 1:
        key = torch.cat([one for one, _ in parts], dim=2)
        value = torch.cat([one for _, one in parts], dim=2)
    # Of another type only where one of both was computed under autocast.
    key, value = key.to(query.dtype), value.to(query.dtype)
    groups, keys = key.shape[0], key.shape[2]
    heads = query.shape[1]
    readers = segment.readers(len(query)) // groups
    if keys == 0 or (reach is not None and rows.lowest - segment.last >= reach):
        exact = torch.promote_types(query.dtype, torch.float32)
        shape = groups * readers, heads
        return (
            query.new_zeros(*shape, value.shape[-1]),
            query.new_full(shape, -torch.inf, dtype=exact),
        )
    asked = query if segment.tokens is None else query[segment.tokens.to(query.device)]
    asked = asked.unflatten(0, (groups, readers)).transpose(1, 2)
    mask = _mask(segment, rows, reach, groups, readers, keys, query.device)
    causal = mask is None and segment.seen == "causal"
    step = readers
    if mask is not None:
        step = max(1, MAX_MASK // (keys * heads * groups))
    made = [
        attend(
            Request(
                asked[:, :, at : at + step],
                key,
                value,
                scale,
                temperature=segment.temperature,
                softcap=softcap,
                causal=causal,
                mask=None if mask is None else mask[..., at : at + step, :],
            )
        )
        for at in range(0, readers, step)
    ]
    output, lse = made[0]
    if len(made) > 1:
        output = torch.cat([one[0] for one in made], dim=2)
        lse = torch.cat([one[1] for one in made], dim=2)
    return output.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def _mask(
    segment: Segment,
    rows: Rows,
    reach: int | None,
    groups: int,
    readers: int,
    keys: int,
    device: torch.device,
) -> torch.Tensor | None:
    """Bool (groups, 1, readers, keys): what each token sees; None where no kernel needs a mask."""
    near = _within(segment, rows, reach)
    counted = isinstance(segment.seen, torch.Tensor)
    if near and not counted:
        return None
    known = (id(segment), None if near else reach)
    if known in rows.masks:
        return rows.masks[known]
    index = torch.arange(keys)
    mask = torch.ones(groups, readers, keys, dtype=torch.bool)
    if isinstance(segment.seen, torch.Tensor):
        mask = index < segment.seen.view(groups, readers, 1)
    elif segment.seen == "causal":
        mask = (index <= torch.arange(readers).unsqueeze(-1)).expand(groups, -1, -1)
    if reach is not None and not near:
        at = rows.positions if segment.tokens is None else rows.positions[segment.tokens]
        of_keys = segment.first + index if segment.positions is None else segment.positions.cpu()
        distance = at.view(groups, readers, 1) - of_keys.view(-1, 1, keys)
        mask = mask & (distance < reach)
    made = mask.unsqueeze(1).to(device)
    rows.masks[known] = made
    return made
