"""Segments: which keys the tokens of a pass read together, and what backends are asked for them.

A segment is a block of keys and values that some tokens of a forward pass read together: the
prefix, a window, the query so far. All kinds of passes differ only in which tokens read which
segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Literal

import torch

from rag_windows.attention.backends import (
    AttentionAnswer,
    AttentionRequest,
    Part,
    PreparedCall,
    calls_for,
)
from rag_windows.attention.merge import (
    NO_RESCALING,
    Attended,
    Rescaling,
    Results,
    Role,
    Weights,
    merge,
)
from rag_windows.kv import Window


class LazyParts(dict[int, Sequence[Part]]):
    """Stretches of windows as parts by layer, views that are made when they are first asked for.

    Attributes:
        packed: whether they are in 8 bits a number, as all windows are or none is.
    """

    def __init__(self, stretches: Sequence[tuple[Window, slice]]) -> None:
        super().__init__()
        self._stretches = stretches
        self.packed = all(window.packed is not None for window, _ in stretches)
        self._peaks: dict[int, Sequence[Part]] = {}

    def __missing__(self, layer: int) -> Sequence[Part]:
        if self.packed:
            self._take_packed(layer)
            return self[layer]
        made = self[layer] = [
            (window.keys[layer][None, :, place], window.values[layer][None, :, place])
            for window, place in self._stretches
        ]
        return made

    def _take_packed(self, layer: int) -> None:
        parts, peaks = [], []
        for window, place in self._stretches:
            if (packed := window.packed) is not None:
                key, of_key = packed.numbers(layer)
                value, of_value = packed.numbers(len(window.keys) + layer)
                parts.append((key[None, :, place], value[None, :, place]))
                peaks.append((of_key[None], of_value[None]))
        self[layer], self._peaks[layer] = parts, peaks

    def peaks(self, layer: int) -> Sequence[Part] | None:
        """Of parts in 8 bits a number, the peaks of their keys and values; see `AttentionRequest`.

        The layer's parts were asked for before.
        """
        return self._peaks.get(layer)


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
            is one group.
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

    @classmethod
    def of_windows(
        cls,
        role: Role,
        stretches: Sequence[tuple[Window, slice]],
        tokens: torch.Tensor | None = None,
        temperature: float = 1.0,
    ) -> Segment:
        """Stretches of windows, each a part that is read where it stands; see `Windows`."""
        starts = [window.start + place.start for window, place in stretches]
        first, last = min(starts), max(window.end for window, _ in stretches) - 1
        layers = LazyParts(stretches)
        return cls(role, first, last, tokens, starts, temperature=temperature, layers=layers)

    @property
    def n_parts(self) -> int:
        """Number of parts, where it is one group."""
        return 1 if self.starts is None else len(self.starts)

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


class Segments:
    """Segments answered together, those of a role side by side. Not for several threads at once.

    Where they are ``static``, segments, tokens and every layer's keys stay what they are for all
    passes, so the calls of backends are prepared once per layer.
    """

    def __init__(self, segments: Sequence[Segment], tokens: int, *, static: bool = False) -> None:
        self.segments = tuple(segments)
        self._static = static
        self._prepared: dict[int, tuple[list[int], _Calls]] = {}
        self.results: list[Results] = []
        first = 0
        for role, run in groupby(segments, key=lambda segment: segment.role):
            readers = [segment.tokens for segment in run]
            self.results.append(Results(role, readers, tokens, first))
            first = self.results[-1].place.stop

    def attend(self, asked: Queries, *, per_part: bool = False) -> list[Attended]:
        """Attention of each result's token over its segment, by role."""
        calls, cut = self._calls(asked)
        if len(calls) == 1 and not cut:
            return self._by_role(calls[0][1](asked.query, per_part=per_part))
        tokens = len(asked.query)
        made: dict[int, SegmentAnswer] = {}
        for indices, call in calls:
            output, lse, parts = call(asked.query, per_part=per_part)
            sizes = [self.segments[i].readers(tokens) for i in indices]
            own = parts or [None] * len(indices)
            each = zip(output.split(sizes), lse.split(sizes), own, strict=True)
            made |= zip(indices, each, strict=True)
        for i, places in cut.items():
            made[i] = _uncut(made.get(i), places, self.segments[i], asked)
        outputs, lses, whole = zip(*(made[i] for i in range(len(self.segments))), strict=True)
        output, lse = (one[0] if len(one) == 1 else torch.cat(one) for one in (outputs, lses))
        return self._by_role(AttentionAnswer(output, lse, [*whole] if per_part else None))

    def _by_role(self, answer: AttentionAnswer) -> list[Attended]:
        output, lse, parts = answer
        if len(self.results) == 1:
            return [Attended(self.results[0], output, lse, parts)]
        made, first = [], 0
        for one in self.results:
            last = first + len(one.sizes)
            own = None if parts is None else parts[first:last]
            made.append(Attended(one, output[one.place], lse[one.place], own))
            first = last
        return made

    def _calls(self, asked: Queries) -> _Calls:
        near, rows = asked.sliding_window, asked.rows
        if not self._static:
            return self._asked(range(len(self.segments)), asked)
        prepared = self._prepared.get(asked.layer)
        if prepared is not None and near is None:
            return prepared[1]
        # What a sliding window hides differs from pass to pass.
        every = range(len(self.segments))
        whole = [i for i in every if rows.within(self.segments[i], near)]
        if prepared is None or prepared[0] != whole:
            prepared = whole, self._asked(whole, asked, often=True)
            self._prepared[asked.layer] = prepared
        calls, cut = prepared[1]
        if len(whole) < len(every):
            more, hidden = self._asked([i for i in every if i not in whole], asked)
            calls, cut = [*calls, *more], cut | hidden
        return calls, cut

    def _asked(self, indices: Sequence[int], asked: Queries, *, often: bool = False) -> _Calls:
        given, requests, cut = [], [], {}
        for i in indices:
            request, seen = request_for(self.segments[i], asked)
            if request is not None:
                given.append(i)
                requests.append(request)
            if seen is not None:
                cut[i] = seen
        calls = calls_for(requests, asked.query, often=often)
        return [([given[at] for at in places], call) for places, call in calls], cut


_Calls = tuple[list[tuple[list[int], PreparedCall]], dict[int, list[int]]]
"""Calls that answer segments, each with the indices of these; and of segments that are cut, the
indices of the parts that are seen. Of a segment of which nothing is seen, nothing is asked."""

SegmentAnswer = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Output, log-sum-exp and, if wanted, parts of one segment; as in `Attended`."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the tokens of a pass, which stand at ``rows``, read in one layer.

    Every token has a result in one of the segments at least; ``rescaling`` is the method's.
    """

    rows: Rows
    segments: Sequence[Segments]
    rescaling: Rescaling = NO_RESCALING


def read(
    reading: Reading, asked: Queries, sinks: torch.Tensor | None = None, *, weights: bool = False
) -> tuple[torch.Tensor, Weights | None]:
    """Attention of every token of a pass over all that it reads; see `merge`."""
    attended = [
        one for segments in reading.segments for one in segments.attend(asked, per_part=weights)
    ]
    return merge(attended, asked.query, reading.rescaling, sinks, weights=weights)


def request_for(
    segment: Segment, asked: Queries
) -> tuple[AttentionRequest | None, list[int] | None]:
    """What is asked for a segment; and the indices of the parts that are seen, None for all.

    If all readers share a position, what a sliding window hides is cut off; else a mask hides it.
    No request is made where no token sees anything.
    """
    rows, near, seen = asked.rows, asked.sliding_window, segment.seen
    parts = segment.layers[asked.layer]
    layers = segment.layers
    peaks = layers.peaks(asked.layer) if isinstance(layers, LazyParts) else None
    request = AttentionRequest(
        parts, asked.scale, asked.softcap, segment.temperature, segment.tokens, peaks=peaks
    )
    if near is not None and rows.lowest - segment.last >= near:
        return None, []
    if isinstance(seen, torch.Tensor):
        # Row caches: a group's only token stands right behind the others that it sees.
        if segment.readers(len(asked.query)) == request.groups and bool(seen.all()):
            first = seen * 0 if near is None else (seen - near).clamp_min(0)
            request.between = first, seen
        else:
            request.mask = _mask(segment, asked)
        return request, None
    within = rows.within(segment, near)
    at = None if near is None or within else rows.position_of(segment)
    masked = not within and (at is None or seen is not None or segment.positions is not None)
    if masked or (seen is not None and len(parts) > 1):
        request.mask = _mask(segment, asked)
        return request, None
    request.causal = seen is not None
    lengths = [key.shape[2] for key, _ in parts]
    hidden = [0] * len(parts)
    if near is not None and at is not None:
        starts = zip(segment.starts_of(lengths), lengths, strict=True)
        hidden = [min(max(0, at - near + 1 - start), length) for start, length in starts]
    if not any(hidden) and all(lengths):
        return request, None
    places = [i for i, length in enumerate(lengths) if length > hidden[i]]
    request.peaks = None if peaks is None else [peaks[i] for i in places]
    request.parts = [
        (parts[i][0][:, :, hidden[i] :], parts[i][1][:, :, hidden[i] :]) for i in places
    ]
    return request if places else None, places


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


def _uncut(
    answer: SegmentAnswer | None, places: list[int], segment: Segment, asked: Queries
) -> SegmentAnswer:
    """The answer for a whole segment, from that for the parts that are seen; None if none is."""
    parts = segment.layers[asked.layer]
    if answer is None:
        query = asked.query
        shape = segment.readers(len(query)), query.shape[1]
        exact = torch.promote_types(query.dtype, torch.float32)
        lse = query.new_full(shape, -torch.inf, dtype=exact)
        output, own = query.new_zeros(*shape, parts[0][1].shape[-1]), lse.new_empty(0, *shape)
    else:
        output, lse, per_part = answer
        own = lse.unsqueeze(0) if per_part is None else per_part
    if len(parts) == 1:
        return output, lse, None
    whole = lse.new_full((len(parts), *lse.shape), -torch.inf)
    whole[places] = own
    return output, lse, whole
