"""What the tokens of one call read; passed with the call, never stored on a module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby

import torch

from rag_windows.attention.items import Part
from rag_windows.attention.segments import (
    Queries,
    Reading,
    Rows,
    Segment,
    Segments,
    SegmentWeights,
    Weights,
    segment_weights,
)
from rag_windows.errors import RagWindowsError
from rag_windows.kv import Members, Window, Windows


class Layout(ABC):
    """What the attention function asks of a call, layer by layer.

    Attributes:
        sliding_windows: per layer, how many positions a token sees, itself included; None for all.
        capture: where each layer's own keys and values are stored, or None.
        head_weights: (layers, heads): how much what `record` takes counts; None for all alike.
    """

    sliding_windows: tuple[int | None, ...]
    capture: Capture | None = None
    head_weights: torch.Tensor | None = None

    @property
    def weighs(self) -> bool:
        """Whether `record` wants the attention weights of the current pass."""
        return False

    @abstractmethod
    def reading(
        self, layer: int, batch: int, rows: int, key: torch.Tensor, value: torch.Tensor
    ) -> Reading:
        """What the fed tokens read, batch row after batch row.

        ``batch`` rows are fed ``rows`` tokens each. ``key`` (batch, kv heads, tokens, head dim) and
        ``value`` (batch, kv heads, tokens, value dim) are those of the KV cache with the fed tokens
        behind, or without a KV cache those of the fed tokens.
        """

    def record(self, weights: Weights, asked: Queries) -> None:  # noqa: B027 - most record nothing
        """Take the attention weights of the layer that has read last, and what it asked."""


class AllCaptured(Exception):
    """Ends a forward pass of which only keys and values are wanted, once all of them are there.

    In all architectures, only an exception leaves a model's own loop over its layers early.
    """


class Capture:
    """Stores the keys and values that each layer hands to attention: rotated, per key/value head.

    ``keys`` and ``values`` are (batch, kv heads, tokens, dim) by layer. With the layer ``last`` the
    pass ends, by `AllCaptured`; None lets it run.
    """

    def __init__(self, last: int | None = None) -> None:
        self._last = last
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def keep(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store one layer's keys and values; raise `AllCaptured` if nothing more is wanted."""
        self.keys[layer] = key
        self.values[layer] = value
        if layer == self._last:
            raise AllCaptured


@dataclass(slots=True)
class WeightRecorder:
    """Collects the attention of the tokens that predict answer tokens, averaged over heads.

    The first of them, at ``first_position``, is that of the query's last token. ``sums``, by
    position, are (spans + 2, batch), fp32, summed over layers: the weight of each span, then of the
    prefix, then of the query. They stay on the device until `average`. A token computed again (a
    rejected draft in assisted decoding) replaces what stood there.

    ``span_groups`` (spans, groups) tells for which citation groups the spans count; None where each
    span is a group.
    """

    first_position: int
    span_groups: torch.Tensor | None = None
    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    _positions: range = field(default=range(0), init=False)
    _layers: list[Weights] = field(default_factory=list, init=False)
    _segments: list[list[SegmentWeights]] = field(default_factory=list, init=False)

    def begin(self, positions: range) -> None:
        """Begin a pass; `add` then takes each layer's weights of the tokens at these positions."""
        self.settle()
        self._positions = positions

    def add(self, weights: Weights) -> None:
        """Take a layer's weights, position after position; work is done once for all layers."""
        self._layers.append(weights)

    def add_segments(self, segments: list[SegmentWeights]) -> None:
        """The same, where only some of a layer's results are of these positions."""
        self._segments.append(segments)

    def settle(self) -> None:
        """Sum up the layers of the last pass."""
        segments = self._segments + ([segment_weights(self._layers)] if self._layers else [])
        self._layers, self._segments = [], []
        by_role: dict[str, torch.Tensor] = {}
        for one in chain.from_iterable(segments):
            weights = one.summed()
            if one.role in by_role:
                weights = weights.to(by_role[one.role].device) + by_role[one.role]
            by_role[one.role] = weights
        if not by_role:
            return
        query = by_role["query"]
        whole = [by_role["context"], by_role.get("prefix", torch.zeros_like(query)), query]
        by_position = torch.cat(whole).unflatten(1, (len(self._positions), -1))
        for at, position in enumerate(self._positions):
            self.sums[position] = by_position[:, at]

    def average(self, positions: Sequence[int], batch_rows: Sequence[int]) -> torch.Tensor:
        """Mean over layers and (position, batch row) pairs: (groups + 2,) fp32, summing to 1."""
        mean = self.of_tokens(positions, batch_rows).mean(dim=0)
        return mean / mean.sum()

    def of_tokens(self, positions: Sequence[int], batch_rows: Sequence[int]) -> torch.Tensor:
        """Sums over layers of (position, batch row) pairs: (pairs, groups + 2) fp32, on the CPU."""
        self.settle()
        pairs = zip(positions, batch_rows, strict=True)
        sums = torch.stack([self.sums[at][:, row] for at, row in pairs]).float().cpu()
        if self.span_groups is not None:
            sums = torch.cat([sums[:, :-2] @ self.span_groups, sums[:, -2:]], dim=1)
        return sums


class LazyParts(dict[int, Sequence[Part]]):
    """The parts of a segment by layer, each made when it is first asked for."""

    def __init__(self, make: Callable[[int], Sequence[Part]]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, layer: int) -> Sequence[Part]:
        made = self[layer] = self._make(layer)
        return made


def of_window(window: Window) -> LazyParts:
    """The keys and values of one window."""
    return of_stretches([(window, slice(None))])


def of_stretches(stretches: Sequence[tuple[Window, slice]]) -> LazyParts:
    """The keys and values of stretches of windows, each a part that is read where it stands."""

    def parts(layer: int) -> list[Part]:
        return [
            (window.keys[layer][None, :, place], window.values[layer][None, :, place])
            for window, place in stretches
        ]

    return LazyParts(parts)


def split(tensor: torch.Tensor, first: int, groups: int, length: int) -> torch.Tensor:
    """Tokens of (heads, tokens, dim) as (groups, heads, length, dim), a view."""
    place = slice(first, first + groups * length)
    return tensor[:, place].unflatten(1, (groups, length)).transpose(0, 1)


@dataclass(slots=True)
class PromptLayout(Layout):
    """A query behind a prefix and windows, whose keys are read where they stand.

    An ordinary KV cache holds the prefix and the query, and no windows. Not for several threads at
    once: it remembers what a pass's layers share.

    Attributes:
        prefix: at positions ``0 ..``; it comes first in the KV cache, too. None for none.
        query_start: position of the first token behind the prefix.
        windows: read by every batch row; in an ensemble, each batch row reads one of them.
        temperature: divides the windows' logits; ``slope`` and ``shift`` are of their log-sum-exp.
        query_bias: added to the query's log-sum-exp, prefix excluded.
        recorder: where attention weights are recorded, or None to record nothing.
    """

    prefix: Window | None
    query_start: int
    sliding_windows: tuple[int | None, ...]
    windows: Windows | Members
    temperature: float = 1.0
    slope: float = 1.0
    shift: float = 0.0
    query_bias: float = 0.0
    recorder: WeightRecorder | None = None
    head_weights: torch.Tensor | None = None
    _pass: _Pass | None = field(default=None, init=False, repr=False)
    _encoded: Segments | None = field(default=None, init=False, repr=False)
    _parts: list[LazyParts] = field(default_factory=list, init=False, repr=False)

    @property
    def weighs(self) -> bool:
        """See `Layout.weighs`."""
        return self._pass is not None and len(self._pass.recorded) > 0

    @property
    def prefix_length(self) -> int:
        """Tokens of the prefix."""
        return 0 if self.prefix is None else len(self.prefix.ids)

    def position(self, index: int) -> int:
        """Position of the KV cache's ``index``-th token."""
        if index < self.prefix_length:
            return index
        return index - self.prefix_length + self.query_start

    def reading(
        self, layer: int, batch: int, rows: int, key: torch.Tensor, value: torch.Tensor
    ) -> Reading:
        """See `Layout.reading`."""
        shape = (batch, rows, key.shape[2])
        now = self._pass
        if now is None or now.shape != shape or layer in now.done:
            now = self._pass = self._begun(shape)
        now.done.add(layer)
        for segment, place in now.stretches:
            segment.layers = {layer: [(key[:, :, place], value[:, :, place])]}
        return now.reading

    def record(self, weights: Weights, asked: Queries) -> None:
        """See `Layout.record`."""
        recorder, now = self.recorder, self._pass
        if recorder is None or now is None:
            return
        if now.places is None and not isinstance(self.windows, Members):
            recorder.add(weights)
            return
        segments = segment_weights([weights])
        if isinstance(self.windows, Members):
            segments = _of_members(segments, now)
        if now.places is not None:
            segments = [one.at(now.places) for one in segments]
        recorder.add_segments(segments)

    def _begun(self, shape: tuple[int, int, int]) -> _Pass:
        """What the layers of a pass share."""
        batch, rows, length = shape
        old, border, tokens = length - rows, self.prefix_length, batch * rows
        stretches: list[tuple[Segment, slice]] = []
        # All of the fed tokens see what stands before the first of them.
        middle = length if rows == 1 else old
        for first, last in ((border, middle), (middle, length)):
            if first < last:
                segment = Segment("query", self.position(first), self.position(last - 1))
                segment.seen = "causal" if first == old and rows > 1 else None
                stretches.append((segment, slice(first, last)))
        if self._encoded is None or self._pass is None or self._pass.shape[:2] != shape[:2]:
            self._encoded = Segments(self._segments(batch, rows), tokens, static=True)
        made = [self._encoded, Segments([segment for segment, _ in stretches], tokens)]
        start = self.position(old)
        now = Rows(torch.arange(start, start + rows).repeat(batch))
        reading = Reading(now, made, self.slope, self.shift, self.query_bias)
        wanted = range(0)
        if self.recorder is not None:
            wanted = range(max(start, self.recorder.first_position), start + rows)
            self.recorder.begin(wanted)
        places = None
        if rows > 1:
            places = torch.arange(rows - len(wanted), rows).unsqueeze(-1)
            places = (torch.arange(batch) * rows + places).flatten()
        return _Pass(shape, stretches, reading, wanted, places)

    def _segments(self, batch: int, rows: int) -> list[Segment]:
        """Prefix and windows: what every token of a pass reads, or its batch row's own window."""
        windows, segments = self.windows, []
        if not self._parts:
            if isinstance(windows, Members):
                self._parts = [of_window(window) for window in windows.windows]
            else:
                self._parts = [of_stretches([*windows.stretches()])]
            if self.prefix is not None:
                self._parts.append(of_window(self.prefix))
        first = min(window.start for window in windows.windows)
        last = max(window.end for window in windows.windows) - 1
        if isinstance(windows, Members):
            queries = torch.arange(0, batch, windows.per_query).unsqueeze(-1)
            for place, window in enumerate(windows.windows):
                readers = ((queries + place) * rows + torch.arange(rows)).flatten()
                segments.append(Segment("context", window.start, window.end - 1, readers))
        else:
            starts = [window.start + place.start for window, place in windows.stretches()]
            segments.append(Segment("context", first, last, starts=starts))
        for segment in segments:
            segment.temperature = self.temperature
        if self.prefix is not None:
            segments.append(Segment("prefix", 0, self.prefix_length - 1))
        for segment, parts in zip(segments, self._parts, strict=True):
            segment.layers = parts
        return segments


@dataclass(slots=True)
class _Pass:
    """What the layers of one forward pass share.

    Its shape is batch rows, fed tokens of each and tokens in the KV cache; the stretches say where
    in the KV cache each segment is. The weights of the tokens at the positions ``recorded`` are
    wanted, which stand at ``places`` of the pass, position after position; None if they are all of
    its tokens. Done are the layers that have asked.
    """

    shape: tuple[int, int, int]
    stretches: list[tuple[Segment, slice]]
    reading: Reading
    recorded: range
    places: torch.Tensor | None
    done: set[int] = field(default_factory=set)


def _of_members(segments: Sequence[SegmentWeights], now: _Pass) -> list[SegmentWeights]:
    """An ensemble's weights with those of all windows as one segment, each batch row's own."""
    batch, rows, _ = now.shape
    shares = torch.cat([one.shares for one in segments if one.role == "context"], dim=1)
    results = next(each for each in now.reading.segments[0].results if each.role == "context")
    index = results.index.to(shares.device)
    whole = shares.new_zeros(len(shares), batch * rows, shares.shape[2])
    whole.index_add_(1, index, shares)
    return [SegmentWeights("context", whole), *(one for one in segments if one.role != "context")]


class Texts:
    """``groups`` texts of one length and start, side by side in a batch row; each sees itself."""

    def __init__(self, positions: torch.Tensor, first: int, groups: int, length: int) -> None:
        self.first, self.groups, self.length = first, groups, length
        tokens = torch.arange(first, first + groups * length)
        at = positions[tokens].view(groups, length)
        self.segment = Segment(
            "query", int(at.min()), int(at.max()), tokens, positions=at, seen="causal"
        )

    def take(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Part:
        """Read keys (1, kv heads, tokens, head dim) and values of a layer; the texts' own."""
        place = self.first, self.groups, self.length
        part = split(key[0], *place), split(value[0], *place)
        self.segment.layers = {layer: [part]}
        return part


def texts(lengths: Sequence[int], positions: torch.Tensor, first: int = 0) -> list[Texts]:
    """Texts of these lengths one behind the other, from the place ``first`` on."""
    places = list(accumulate(lengths, initial=first))
    starts = positions[places[:-1]].tolist()
    made = []
    for (length, _), run in groupby(zip(lengths, starts, strict=True)):
        groups = sum(1 for _ in run)
        made.append(Texts(positions, first, groups, length))
        first += groups * length
    return made


class TextsLayout(Layout):
    """Texts one behind the other in one batch row, each of which sees the prefix and itself.

    All layers but attention treat every token alike, so they run over the tokens of many texts at
    once, whatever their lengths. Texts of equal length and start share a call of the
    kernel, so those that stand beside each other should be alike. No KV cache takes part.

    ``before`` holds a window for each text, all of which its tokens see, too; or none.
    ``positions`` (tokens,) int64 on the CPU are those of all texts.
    """

    def __init__(
        self,
        sliding_windows: tuple[int | None, ...],
        lengths: Sequence[int],
        starts: Sequence[int],
        prefix: Window | None = None,
        before: Sequence[Window] = (),
        capture: Capture | None = None,
    ) -> None:
        self.sliding_windows = sliding_windows
        self.capture = capture
        each = zip(starts, lengths, strict=True)
        self.positions = torch.cat([torch.arange(start, start + n) for start, n in each])
        tokens = len(self.positions)
        self._texts = texts(lengths, self.positions)
        made = [Segments([one.segment for one in self._texts], tokens)]
        encoded = []
        ends = list(accumulate(lengths))
        for index, window in enumerate(before):
            readers = torch.arange(ends[index] - lengths[index], ends[index])
            encoded.append(Segment("context", window.start, window.end - 1, readers))
            encoded[-1].layers = of_window(window)
        if prefix is not None:
            encoded.append(Segment("prefix", prefix.start, prefix.end - 1))
            encoded[-1].layers = of_window(prefix)
        if encoded:
            made.append(Segments(encoded, tokens))
        self._reading = Reading(Rows(self.positions), made)

    def reading(
        self, layer: int, batch: int, rows: int, key: torch.Tensor, value: torch.Tensor
    ) -> Reading:
        """See `Layout.reading`; there is one batch row."""
        for one in self._texts:
            one.take(layer, key, value)
        return self._reading


_CURRENT: ContextVar[Layout | None] = ContextVar("rag_windows_layout", default=None)


@contextmanager
def use_layout(layout: Layout) -> Iterator[None]:
    """Make ``layout`` the one that the attention hook sees in this thread or task."""
    token = _CURRENT.set(layout)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_layout() -> Layout:
    """The layout of the call in flight.

    Raises:
        RagWindowsError: there is none: a model was switched to "rag_windows" attention by hand.
    """
    layout = _CURRENT.get()
    if layout is None:
        raise RagWindowsError(
            "The 'rag_windows' attention was called outside of WindowedLM. Load the model with its "
            "usual attn_implementation and pass it to WindowedLM.from_pretrained."
        )
    return layout
