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
        masks: of segments in layers with a sliding window of that size, made once for all of them.
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


@dataclass(frozen=True, slots=True)
class Queries:
    """What the tokens of a pass ask in one layer.

    Attributes:
        layer: its number.
        query: (tokens, heads, head dim).
        rows: where the tokens stand.
        scale: multiplies the logits.
        softcap: caps them, or None.
        sliding_window: positions that a token sees, itself included, or None for all.
    """

    layer: int
    query: torch.Tensor
    rows: Rows
    scale: float
    softcap: float | None
    sliding_window: int | None


class Segments:
    """Segments of one role, answered together. Not for several threads at once.

    The *results* are one a segment, group and token, in that order.

    Attributes:
        role: of all of them.
        segments: at least one.
        index: (results,) int64, on the CPU: the token of each result; None if the results are one
            for each token of the pass, in order.

    Args:
        tokens: of the pass.
        static: whether the segments' keys stay where they are, so that what a kernel is asked is
            made once a layer.
    """

    __slots__ = ("_for_layers", "_index", "_static", "index", "role", "segments")

    def __init__(
        self, role: Role, segments: Sequence[Segment], tokens: int, *, static: bool = False
    ) -> None:
        self.role: Role = role
        self.segments = tuple(segments)
        self.index = _index(self.segments, tokens)
        self._static = static
        self._for_layers: dict[int, tuple[list[int], list[int], native.Items | None]] = {}
        self._index: dict[torch.device, torch.Tensor] = {}

    def index_on(self, device: torch.device) -> torch.Tensor | None:
        """`index` on a device."""
        if self.index is None:
            return None
        if device not in self._index:
            self._index[device] = self.index.to(device)
        return self._index[device]

    def attend(self, asked: Queries) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of each result's token over its segment.

        Returns:
            Output (results, heads, value dim) in the query's dtype, zero where a token sees no key;
            lse (results, heads), fp32 (fp64 for fp64), ``-inf`` there.
        """
        chosen, items = self._for_kernel(asked)
        if items is None:
            made = [_read(one, asked) for one in self.segments]
        else:
            output, lse = native.call(items, asked.query)
            if len(chosen) == len(self.segments):
                return output, lse
            sizes = [self.segments[i].readers(len(asked.query)) for i in chosen]
            answered = zip(output.split(sizes), lse.split(sizes), strict=True)
            by_kernel = dict(zip(chosen, answered, strict=True))
            made = [by_kernel.get(i) or _read(one, asked) for i, one in enumerate(self.segments)]
        if len(made) == 1:
            return made[0]
        return torch.cat([one[0] for one in made]), torch.cat([one[1] for one in made])

    def _for_kernel(self, asked: Queries) -> tuple[list[int], native.Items | None]:
        """The segments that one call of the CPU kernel answers, and what it is asked."""
        if asked.query.device.type != "cpu" or not native.active():
            return [], None
        held = self._for_layers.get(asked.layer)
        if held is not None and asked.sliding_window is None:
            return held[1:]
        offered = [
            index
            for index, one in enumerate(self.segments)
            if one.newest or (_within(one, asked) and not isinstance(one.seen, torch.Tensor))
        ]
        if held is not None and held[0] == offered:
            return held[1:]
        asks: list[native.Item] = []
        taken: list[int] = []
        for index in offered:
            if made := _items(self.segments[index], asked):
                taken.append(index)
                asks += made
        items = native.Items(asks) if native.pays(asks) else None
        if self._static:
            self._for_layers[asked.layer] = offered, taken, items
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
    sliding_window: int | None,
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
        sliding_window: positions that a token sees in this layer, or None for all.
        sinks: (heads,) logits of attention sinks, or None.
        weights: whether the attention weights of segments are wanted.

    Returns:
        (tokens, heads, value dim) in the query's dtype; and for each of ``reading.segments`` the
        weights (results, heads) of its results, fp32, which sum to one over a token's: a sink is no
        text and counts for nothing. None if they are not wanted.
    """
    asked = Queries(layer, query, reading.rows, scale, softcap, sliding_window)
    outputs, lses = zip(*(segments.attend(asked) for segments in reading.segments), strict=True)
    indices = [segments.index_on(query.device) for segments in reading.segments]
    rescaled = _rescaled(reading, lses, indices, len(query))
    if sinks is None and not weights and indices in ([None], [None, None]):
        if len(outputs) == 1:
            return outputs[0], None
        # The newest token always sees itself, so no token sees nothing in both.
        share = torch.sigmoid(rescaled[0] - rescaled[1]).unsqueeze(-1)
        mixed = torch.lerp(outputs[1].to(share.dtype), outputs[0].to(share.dtype), share)
        return mixed.to(query.dtype), None
    return _merged(outputs, rescaled, indices, sinks, len(query), weights)


def _rescaled(
    reading: Reading,
    lses: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor | None],
    tokens: int,
) -> list[torch.Tensor]:
    """Log-sum-exps as the merge takes them: the context's and the query's by the method."""
    made = list(lses)
    context = [i for i, one in enumerate(reading.segments) if one.role == "context"]
    if context and not (_is(reading.slope, 1.0) and _is(reading.shift, 0.0)):
        if len(context) > 1:
            raise ValueError("A pass has its whole context in one place.")
        lse, index = lses[context[0]], indices[context[0]]
        slope, shift = _on(reading.slope, lse), _on(reading.shift, lse)
        if index is None:
            made[context[0]] = lse * slope + shift
        else:
            whole = _logsumexp(lse, index, tokens)
            finite = whole.masked_fill(whole == -torch.inf, 0.0)
            change = finite * (slope - 1.0) + shift
            made[context[0]] = lse + change.expand_as(whole)[index]
    if not _is(reading.query_bias, 0.0):
        bias = _on(reading.query_bias, lses[0])
        for i, one in enumerate(reading.segments):
            if one.role == "query":
                index = indices[i]
                several = isinstance(bias, torch.Tensor) and index is not None
                made[i] = lses[i] + (bias[index] if several else bias)  # type: ignore[index]  # a tensor
    return made


def _merged(
    outputs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor | None],
    sinks: torch.Tensor | None,
    tokens: int,
    weights: bool,
) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    """The softmax over the segments of each token, and what it mixes; see `read`."""
    # Of one token, as a decode step has it, all results are its own: fewer operations.
    alone = tokens == 1
    lse, sizes = torch.cat(list(lses)), [len(one) for one in lses]
    every = torch.arange(tokens, device=lse.device)
    index = torch.cat([every if one is None else one for one in indices])

    def of_results(of_tokens: torch.Tensor) -> torch.Tensor:
        return of_tokens if alone else of_tokens[index]

    def summed(of_results: torch.Tensor) -> torch.Tensor:
        if alone:
            return of_results.sum(dim=0, keepdim=True)
        return of_results.new_zeros(tokens, *of_results.shape[1:]).index_add_(0, index, of_results)

    peak = _peak(lse, index, tokens)
    if sinks is not None:
        peak = torch.maximum(peak, sinks.to(lse.dtype))
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    shares = torch.exp(lse - of_results(peak))
    text = summed(shares)
    total = text if sinks is None else text + torch.exp(sinks.to(lse.dtype) - peak)
    tiny = torch.finfo(text.dtype).tiny
    mixing = (shares / of_results(total.clamp_min(tiny))).unsqueeze(-1)
    if alone:
        mixed = summed(torch.cat(list(outputs)) * mixing)
    else:
        mixed = mixing.new_zeros(tokens, lse.shape[1], outputs[0].shape[-1])
        for output, share, place in zip(outputs, mixing.split(sizes), indices, strict=True):
            weighed = output * share
            mixed = mixed + weighed if place is None else mixed.index_add_(0, place, weighed)
    told = list((shares / of_results(text.clamp_min(tiny))).split(sizes)) if weights else None
    return mixed.to(outputs[0].dtype), told


def _peak(lse: torch.Tensor, index: torch.Tensor, tokens: int) -> torch.Tensor:
    """(tokens, heads): the largest of the results of each token; ``-inf`` where there is none."""
    if tokens == 1:
        return lse.amax(dim=0, keepdim=True)
    peak = lse.new_full((tokens, lse.shape[1]), -torch.inf)
    return peak.scatter_reduce(0, index.unsqueeze(-1).expand_as(lse), lse, "amax")


def _logsumexp(lse: torch.Tensor, index: torch.Tensor, tokens: int) -> torch.Tensor:
    """(tokens, heads): over the results of each token; ``-inf`` where there is none."""
    if tokens == 1:
        return lse.logsumexp(dim=0, keepdim=True)
    peak = _peak(lse, index, tokens)
    finite = peak.masked_fill(peak == -torch.inf, 0.0)
    total = torch.zeros_like(peak).index_add_(0, index, torch.exp(lse - finite[index]))
    return torch.log(total) + finite


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


def _within(segment: Segment, asked: Queries) -> bool:
    """Whether a layer's sliding window hides none of the keys from any token."""
    rows, seen = asked.rows, asked.sliding_window
    if seen is None or rows.highest - segment.first < seen:
        return True
    if segment.tokens is None:
        return False
    if id(segment) not in rows.furthest:
        rows.furthest[id(segment)] = int(rows.positions[segment.tokens].max())
    return rows.furthest[id(segment)] - segment.first < seen


def _items(segment: Segment, asked: Queries) -> list[native.Item]:
    """A segment as the CPU kernel is asked for it, an item a group; none if it can't be."""
    query, parts = asked.query, segment.layers[asked.layer]
    groups, kv_heads, keys, _ = parts[0][0].shape
    readers = segment.readers(len(query)) // groups
    causal = segment.seen == "causal"
    if keys == 0 or not native.takes(
        query, parts, readers * (query.shape[1] // kv_heads), causal=causal
    ):
        return []
    tokens = range(len(query)) if segment.tokens is None else segment.tokens.tolist()
    stretches = [slice(None)] * groups
    if isinstance(segment.seen, torch.Tensor):
        near = asked.sliding_window
        stretches = [
            slice(0 if near is None else max(0, seen - near), seen)
            for seen in segment.seen.tolist()
        ]
    return [
        native.Item(
            [(key[group][:, stretch], value[group][:, stretch]) for key, value in parts],
            tokens[group * readers : (group + 1) * readers],
            asked.scale,
            asked.softcap,
            segment.temperature,
            causal,
        )
        for group, stretch in enumerate(stretches)
    ]


def _read(segment: Segment, asked: Queries) -> tuple[torch.Tensor, torch.Tensor]:
    """One segment by the fastest backend that serves it; as `Segments.attend` gives it."""
    query, rows = asked.query, asked.rows
    # Of another type only where one of both was computed under autocast.
    parts = [(k.to(query.dtype), v.to(query.dtype)) for k, v in segment.layers[asked.layer]]
    groups, keys = len(parts[0][0]), sum(key.shape[2] for key, _ in parts)
    readers = segment.readers(len(query)) // groups
    seen = asked.sliding_window
    if keys == 0 or (seen is not None and rows.lowest - segment.last >= seen):
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
    step = readers
    if mask is not None:
        step = max(1, MAX_MASK // (keys * query.shape[1] * groups))

    def answered(part: Part, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        request = Request(
            of_tokens[:, :, at : at + step],
            *part,
            asked.scale,
            temperature=segment.temperature,
            softcap=asked.softcap,
            causal=causal,
            mask=None if mask is None else mask[..., at : at + step, :],
        )
        return attend(request)

    made = [answered(parts[0], at) for at in range(0, readers, step)]
    output = torch.cat([one[0] for one in made], dim=2) if len(made) > 1 else made[0][0]
    lse = torch.cat([one[1] for one in made], dim=2) if len(made) > 1 else made[0][1]
    if len(parts) > 1:
        # Several places are read where they stand: joining them would copy every key, every time.
        each = [(output, lse), *(answered(part, 0) for part in parts[1:])]
        lses = torch.stack([one[1] for one in each])
        lse = lses.logsumexp(dim=0)
        shares = torch.exp(lses - lse).unsqueeze(-1)
        mixed = sum(one[0] * share for one, share in zip(each, shares, strict=True))
        output = torch.as_tensor(mixed).to(query.dtype)
    return output.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def _mask(
    segment: Segment, asked: Queries, groups: int, readers: int, keys: int
) -> torch.Tensor | None:
    """Bool (groups, 1, readers, keys): what each token sees; None where no kernel needs a mask."""
    rows, near = asked.rows, _within(segment, asked)
    if near and not isinstance(segment.seen, torch.Tensor):
        return None
    known = (id(segment), None if near else asked.sliding_window)
    if known in rows.masks:
        return rows.masks[known]
    index = torch.arange(keys)
    mask = torch.ones(groups, readers, keys, dtype=torch.bool)
    if isinstance(segment.seen, torch.Tensor):
        mask = index < segment.seen.view(groups, readers, 1)
    elif segment.seen == "causal":
        mask = (index <= torch.arange(readers).unsqueeze(-1)).expand(groups, -1, -1)
    if asked.sliding_window is not None and not near:
        at = rows.positions if segment.tokens is None else rows.positions[segment.tokens]
        of_keys = segment.first + index if segment.positions is None else segment.positions.cpu()
        distance = at.view(groups, readers, 1) - of_keys.view(-1, 1, keys)
        mask = mask & (distance < asked.sliding_window)
    rows.masks[known] = mask.unsqueeze(1).to(asked.query.device)
    return rows.masks[known]
