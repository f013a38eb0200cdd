"""What the tokens of one call read; it travels with the call, never on a module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate, groupby

import torch

from rag_windows.attention.native.kernel import Part
from rag_windows.attention.segments import Reading, Role, Rows, Segment, Segments
from rag_windows.errors import RagWindowsError
from rag_windows.kv import Members, PackedWindows, Window


class Layout(ABC):
    """What the attention function asks of a call, layer by layer.

    Attributes:
        sliding_windows: per layer, how many positions a token sees, itself included; None for all.
        capture: where each layer's own keys and values are kept, or None.
    """

    sliding_windows: tuple[int | None, ...]
    capture: Capture | None = None

    @property
    def weighs(self) -> bool:
        """Whether `record` wants attention weights."""
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

    def record(self, layer: int, reading: Reading, weights: Sequence[torch.Tensor]) -> None:  # noqa: B027 - most layouts record nothing
        """Take a layer's attention weights, as `segments.read` gives them."""


class AllCaptured(Exception):
    """Ends a forward pass of which only keys and values are wanted, once all of them are there.

    Unwinding is the only way out of a model's own loop over its layers that fits all architectures.
    """


class Capture:
    """Keeps the keys and values that each layer hands to attention: rotated, per key/value head.

    ``keys`` and ``values`` are (batch, kv heads, tokens, dim) by layer. With the layer ``last`` the
    pass ends, by `AllCaptured`; None lets it run.
    """

    def __init__(self, last: int | None = None) -> None:
        self._last = last
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def keep(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep one layer's keys and values; raise `AllCaptured` if nothing more is wanted."""
        self.keys[layer] = key
        self.values[layer] = value
        if layer == self._last:
            raise AllCaptured


@dataclass(slots=True)
class WeightRecorder:
    """Collects, per layer, the attention of the rows that predict answer tokens.

    The first of them, at ``first_position``, is that of the query's last token. The weights,
    position -> layer -> (batch, n_groups + 2) fp32, are averaged over heads: the share of each
    citation group, then of the prefix, then of the query. A row computed again (a rejected draft in
    assisted decoding) replaces what stood there.
    """

    first_position: int
    weights: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)

    def put(self, layer: int, position: int, share: torch.Tensor) -> None:
        """Record one row of one layer."""
        self.weights.setdefault(position, {})[layer] = share

    def average(self, positions: Sequence[int], batch_rows: Sequence[int]) -> torch.Tensor:
        """Mean over layers and (position, batch row) pairs: (n_groups + 2,) fp32, summing to 1."""
        rows = []
        for position, row in zip(positions, batch_rows, strict=True):
            layers = self.weights[position].values()
            rows.append(torch.stack([share[row].cpu() for share in layers]).mean(dim=0))
        mean = torch.stack(rows).mean(dim=0)
        return mean / mean.sum()


class Parts(dict[int, Sequence[Part]]):
    """The parts of a segment by layer, each made when it is first asked for."""

    def __init__(self, make: Callable[[int], Sequence[Part]]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, layer: int) -> Sequence[Part]:
        made = self[layer] = self._make(layer)
        return made


def spans_of(source: Window | PackedWindows, first: int, groups: int, length: int) -> Parts:
    """Spans of equal length, side by side from the token ``first`` on, as groups of a segment."""

    def parts(layer: int) -> list[Part]:
        place = first, groups, length
        return [(split(source.keys[layer], *place), split(source.values[layer], *place))]

    return Parts(parts)


def of_window(window: Window) -> Parts:
    """The keys and values of one window."""
    return spans_of(window, 0, 1, len(window.ids))


def split(tensor: torch.Tensor, first: int, groups: int, length: int) -> torch.Tensor:
    """Tokens of (heads, tokens, dim) as (groups, heads, length, dim), a view."""
    place = slice(first, first + groups * length)
    return tensor[:, place].unflatten(1, (groups, length)).transpose(0, 1)


@dataclass(slots=True)
class PromptLayout(Layout):
    """A query behind a prefix, which an ordinary KV cache holds, and windows, which it does not.

    Not for several threads at once: it remembers what a pass's layers share.

    Attributes:
        prefix_length: tokens of the KV cache before the query, at positions ``0 ..``.
        query_start: position of the first token behind the prefix.
        windows: what every batch row reads; or, of an ensemble, each batch row one of; or None.
        temperature: divides the windows' logits; ``slope`` and ``shift`` are of their log-sum-exp.
        query_bias: added to the query's log-sum-exp, prefix excluded.
        recorder: where attention weights are recorded, or None to record nothing.
    """

    prefix_length: int
    query_start: int
    sliding_windows: tuple[int | None, ...]
    windows: PackedWindows | Members | None = None
    temperature: float = 1.0
    slope: float = 1.0
    shift: float = 0.0
    query_bias: float = 0.0
    recorder: WeightRecorder | None = None
    _pass: _Pass | None = field(default=None, init=False, repr=False)
    _context: Segments | None = field(default=None, init=False, repr=False)

    @property
    def weighs(self) -> bool:
        """See `Layout.weighs`."""
        return self.recorder is not None and self.windows is not None

    def position(self, index: int) -> int:
        """Position of the KV cache's ``index``-th token."""
        if index < self.prefix_length:
            return index
        return index - self.prefix_length + self.query_start

    def _positions(self, first: int, last: int) -> torch.Tensor:
        """(last - first,) int64: positions of the KV cache's tokens from ``first`` to ``last``."""
        start, border = self.position(first), self.prefix_length
        at = torch.arange(start, start + last - first)
        if first < border < last:
            at[border - first :] += self.query_start - border
        return at

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
            if place == slice(0, shape[2]):
                segment.layers = {layer: [(key, value)]}
            else:
                segment.layers = {layer: [(key[:, :, place], value[:, :, place])]}
        return now.reading

    def record(self, layer: int, reading: Reading, weights: Sequence[torch.Tensor]) -> None:
        """See `Layout.record`."""
        recorder, windows, now = self.recorder, self.windows, self._pass
        if recorder is None or windows is None or now is None:
            return
        batch, rows, length = now.shape
        by_role: dict[str, torch.Tensor] = {}
        for segments, weight in zip(reading.segments, weights, strict=True):
            share = weight.mean(dim=1)
            if segments.role == "context":
                share = _of_groups(windows, segments, share, batch * rows)
            by_role[segments.role] = by_role.get(segments.role, 0.0) + share
        context = by_role["context"]
        nothing = context.new_zeros(len(context))
        ends = [by_role.get(role, nothing).unsqueeze(1) for role in ("prefix", "query")]
        whole = torch.cat([context, *ends], dim=1).unflatten(0, (batch, rows))
        for row in range(rows):
            position = self.position(length - rows + row)
            if position >= recorder.first_position:
                recorder.put(layer, position, whole[:, row])

    def _begun(self, shape: tuple[int, int, int]) -> _Pass:
        """What the layers of a pass share."""
        batch, rows, length = shape
        old, border = length - rows, self.prefix_length
        made: list[Segments] = []
        stretches: list[tuple[Segment, slice]] = []
        if self.weighs or self.query_bias != 0.0:
            roles: list[tuple[Role, int, int]] = [("prefix", 0, border), ("query", border, length)]
        else:
            roles = [("query", 0, length)]
        for role, begin, end in roles:
            # All of the fed tokens see what stands before the first of them.
            middle = end if end <= old + 1 else max(begin, old)
            for first, last in ((begin, middle), (middle, end)):
                if first == last:
                    continue
                segment = Segment(self.position(first), self.position(last - 1))
                if first < border < last:
                    segment.positions = self._positions(first, last)
                if first == old and last == length and rows > 1:
                    segment.seen = "causal"
                elif last > old + 1:
                    ends = torch.arange(old + 1, length + 1) - first
                    segment.seen = ends.clamp(0, last - first).repeat(batch)
                stretches.append((segment, slice(first, last)))
                made.append(Segments(role, [segment], batch * rows))
        if self.windows is not None:
            if self._context is None or self._pass is None or self._pass.shape[:2] != shape[:2]:
                self._context = self._windows(self.windows, batch, rows)
            made.append(self._context)
        now = Rows(self._positions(old, length).repeat(batch))
        reading = Reading(now, made, self.slope, self.shift, self.query_bias)
        return _Pass(shape, stretches, reading)

    def _windows(self, windows: PackedWindows | Members, batch: int, rows: int) -> Segments:
        """The windows: what every token of a pass reads, or its batch row's own one."""
        tokens, segments = batch * rows, []
        if isinstance(windows, Members):
            queries = torch.arange(0, batch, windows.per_query).unsqueeze(-1)
            for place, window in enumerate(windows.windows):
                readers = ((queries + place) * rows + torch.arange(rows)).flatten()
                segment = Segment(window.start, window.end - 1, readers)
                segment.layers = of_window(window)
                segments.append(segment)
        else:
            # Each span is a segment of its own where its weight is wanted; equal ones are groups.
            spans = windows.spans if self.weighs else (len(windows.positions),)
            first = 0
            for length, run in groupby(spans):
                groups = sum(1 for _ in run)
                positions = windows.positions[first : first + groups * length]
                segment = Segment(int(positions.min()), int(positions.max()))
                segment.positions = positions.view(groups, length)
                if groups > 1:
                    segment.tokens = torch.arange(tokens).repeat(groups)
                segment.layers = spans_of(windows, first, groups, length)
                segments.append(segment)
                first += groups * length
        for segment in segments:
            segment.temperature = self.temperature
        return Segments("context", segments, tokens, static=True)


@dataclass(slots=True)
class _Pass:
    """What the layers of one forward pass share.

    Its shape is batch rows, fed tokens of each and tokens in the KV cache; the stretches say where
    in the KV cache each segment is; done are the layers that have asked.
    """

    shape: tuple[int, int, int]
    stretches: list[tuple[Segment, slice]]
    reading: Reading
    done: set[int] = field(default_factory=set)


def _of_groups(
    windows: PackedWindows | Members, segments: Segments, share: torch.Tensor, tokens: int
) -> torch.Tensor:
    """The context's shares (results,) as (tokens, groups); of an ensemble (tokens, 1)."""
    if isinstance(windows, Members):
        index = segments.index.to(share.device)
        return share.new_zeros(tokens).index_add_(0, index, share).unsqueeze(-1)
    return share.view(len(windows.spans), tokens).T @ windows.span_groups.to(share)


class Texts:
    """``groups`` texts of one length and start, side by side in a batch row; each sees itself."""

    def __init__(self, positions: torch.Tensor, first: int, groups: int, length: int) -> None:
        self.first, self.groups, self.length = first, groups, length
        tokens = torch.arange(first, first + groups * length)
        at = positions[tokens].view(groups, length)
        self.segment = Segment(int(at.min()), int(at.max()), tokens, at, "causal")

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

    Layers that treat every token alike, which are all but attention, so run over the tokens of many
    texts at once, whatever their lengths. Texts of equal length and start share a call of the
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
        made = [Segments("query", [one.segment for one in self._texts], tokens)]
        if prefix is not None:
            whole = Segment(prefix.start, prefix.end - 1, layers=of_window(prefix))
            made.append(Segments("prefix", [whole], tokens))
        if before:
            segments = []
            for window, length, end in zip(before, lengths, accumulate(lengths), strict=True):
                readers = torch.arange(end - length, end)
                segment = Segment(window.start, window.end - 1, readers, layers=of_window(window))
                segments.append(segment)
            made.append(Segments("context", segments, tokens))
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
