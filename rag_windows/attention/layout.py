"""What the tokens of one call read; passed with the call, never stored on a module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby

import torch

from rag_windows.attention.backends import Part
from rag_windows.attention.merge import NO_RESCALING, Rescaling, Weights
from rag_windows.attention.segments import Queries, Reading, Rows, Segment, Segments
from rag_windows.attention.weights import RecordedTokens, WeightRecorder
from rag_windows.errors import RagWindowsError
from rag_windows.kv import Members, Window, Windows


class Layout(ABC):
    """What the attention function asks of a call, layer by layer.

    Attributes:
        sliding_windows: per layer, how many positions a token sees, itself included; None for all.
        capture: where each layer's own keys and values are stored, or None.
    """

    sliding_windows: tuple[int | None, ...]
    capture: Capture | None = None

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
class PromptLayout(Layout):
    """A query behind a prefix and windows, whose keys are read where they stand.

    An ordinary KV cache holds the prefix and the query, and no windows. Not for several threads at
    once: it remembers what a pass's layers share.

    Attributes:
        prefix: at positions ``0 ..``; it comes first in the KV cache, too. None for none.
        query_start: position of the first token behind the prefix.
        windows: read by every batch row; in an ensemble, each batch row reads one of them.
        temperature: divides the windows' logits.
        rescaling: of the windows' and the query's log-sum-exps; that of the prefix stays as it is.
        recorder: where attention weights are recorded, or None to record nothing.
        encoded: segments of the windows, then of the prefix, once a pass has begun.
    """

    prefix: Window | None
    query_start: int
    sliding_windows: tuple[int | None, ...]
    windows: Windows | Members
    temperature: float = 1.0
    rescaling: Rescaling = NO_RESCALING
    recorder: WeightRecorder | None = None
    _pass: _Pass | None = field(default=None, init=False, repr=False)
    encoded: list[Segment] = field(default_factory=list, init=False, repr=False)
    _together: Segments | None = field(default=None, init=False, repr=False)
    _recorded: dict[tuple[int, ...], RecordedTokens] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def weighs(self) -> bool:
        """See `Layout.weighs`."""
        return self.recorder is not None and self.recorder.recording

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
        for segment, place in now.own:
            segment.layers = {layer: [(key[:, :, place], value[:, :, place])]}
        return now.reading

    def record(self, weights: Weights, asked: Queries) -> None:
        """See `Layout.record`."""
        if self.recorder is not None:
            self.recorder.add(weights)

    def _begun(self, shape: tuple[int, int, int]) -> _Pass:
        """What the layers of a pass share."""
        batch, rows, length = shape
        old, border, tokens = length - rows, self.prefix_length, batch * rows
        own: list[tuple[Segment, slice]] = []
        # All of the fed tokens see what stands before the first of them.
        middle = length if rows == 1 else old
        for first, last in ((border, middle), (middle, length)):
            if first < last:
                segment = Segment("query", self.position(first), self.position(last - 1))
                segment.seen = "causal" if first == old and rows > 1 else None
                own.append((segment, slice(first, last)))
        if self._together is None or self._pass is None or self._pass.shape[:2] != shape[:2]:
            self._together = Segments(self._of_rows(batch, rows), tokens, static=True)
        segments = [self._together, Segments([segment for segment, _ in own], tokens)]
        start = self.position(old)
        positions = Rows(torch.arange(start, start + rows).repeat(batch))
        if self.recorder is not None:
            recorded = range(max(start, self.recorder.first_position), start + rows)
            self.recorder.begin(recorded, self._places(batch, rows, len(recorded), segments))
        return _Pass(shape, own, Reading(positions, segments, self.rescaling))

    def _places(
        self, batch: int, rows: int, recorded: int, segments: list[Segments]
    ) -> RecordedTokens | None:
        """Where the weights of so many last tokens of each batch row go; None if they are none."""
        if not recorded:
            return None
        # One decode step is like the other.
        alike = batch, rows, recorded, len(segments[1].segments)
        if alike not in self._recorded:
            places = torch.arange(rows - recorded, rows).unsqueeze(-1)
            wanted = (torch.arange(batch) * rows + places).flatten()
            windows = self.windows
            spans = 1 if isinstance(windows, Members) else len(windows.spans)
            self._recorded[alike] = RecordedTokens(segments, wanted, batch * rows, spans)
        return self._recorded[alike]

    def _of_rows(self, batch: int, rows: int) -> list[Segment]:
        """Windows and prefix: what every token of a pass reads, or its batch row's own window."""
        windows, heat = self.windows, self.temperature
        if not self.encoded:
            if isinstance(windows, Members):
                each = [window.whole for window in windows.windows]
            else:
                each = [[*windows.stretches()]]
            self.encoded = [Segment.of_windows("context", one, None, heat) for one in each]
            if self.prefix is not None:
                self.encoded.append(Segment.of_windows("prefix", self.prefix.whole))
        if not isinstance(windows, Members):
            return self.encoded
        queries = torch.arange(0, batch, windows.per_query).unsqueeze(-1)
        own = [
            replace(one, tokens=((queries + place) * rows + torch.arange(rows)).flatten())
            for place, one in enumerate(self.encoded[: windows.count])
        ]
        return [*own, *self.encoded[windows.count :]]


@dataclass(slots=True)
class _Pass:
    """What the layers of one forward pass share.

    Its shape is batch rows, fed tokens of each and tokens in the KV cache; ``own`` are the query's
    segments and where in the KV cache each is; done are the layers that have asked.
    """

    shape: tuple[int, int, int]
    own: list[tuple[Segment, slice]]
    reading: Reading
    done: set[int] = field(default_factory=set)


def split(tensor: torch.Tensor, first: int, groups: int, length: int) -> torch.Tensor:
    """Tokens of (heads, tokens, dim) as (groups, heads, length, dim), a view."""
    place = slice(first, first + groups * length)
    return tensor[:, place].unflatten(1, (groups, length)).transpose(0, 1)


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
            encoded.append(Segment.of_windows("context", window.whole, readers))
        if prefix is not None:
            encoded.append(Segment.of_windows("prefix", prefix.whole))
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
