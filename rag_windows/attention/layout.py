"""What the tokens of one call read; it travels with the call, never on a module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Protocol

import torch

from rag_windows.attention.segments import Part, Reading, Rows, Segment, Segments
from rag_windows.errors import RagWindowsError
from rag_windows.kv import Members, PackedWindows, Window


class Layout(Protocol):
    """What the attention function asks of a call, layer by layer."""

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Per layer, how many positions a token sees, itself included; None for all."""

    @property
    def capture(self) -> Capture | None:
        """Where each layer's own keys and values are kept, or None."""

    @property
    def weighs(self) -> bool:
        """Whether `record` wants attention weights."""

    def reading(
        self, layer: int, batch: int, rows: int, key: torch.Tensor, value: torch.Tensor
    ) -> Reading:
        """What the fed tokens read, batch row after batch row.

        Args:
            layer: number of the layer.
            batch: batch rows.
            rows: fed tokens of each.
            key: (batch, kv heads, tokens, head dim), of the KV cache with the fed tokens behind, or
                without one of the fed tokens.
            value: (batch, kv heads, tokens, value dim).
        """

    def record(self, layer: int, reading: Reading, weights: Sequence[torch.Tensor]) -> None:
        """Take a layer's attention weights, as `rag_windows.attention.segments.read` gives them."""


class AllCaptured(Exception):
    """Ends a forward pass of which only keys and values are wanted, once all of them are there.

    What follows them in the last layer, its attention and feed-forward, changes none. Unwinding is
    the only way out of a model's own loop over its layers that fits every architecture.
    """


class Capture:
    """Keeps the keys and values that each layer hands to attention.

    Taking them here rather than from a cache keeps the model's forward pass free of any copy, and
    sees them exactly as attention does: rotated, and per key/value head.

    Args:
        last: the layer with which the pass may end, by `AllCaptured`; None to let it run.
    """

    __slots__ = ("_last", "keys", "values")

    def __init__(self, last: int | None = None) -> None:
        self._last = last
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def keep(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep one layer's ``key`` (batch, kv heads, tokens, head dim) and ``value``.

        Raises:
            AllCaptured: nothing more is wanted of this pass.
        """
        self.keys[layer] = key
        self.values[layer] = value
        if layer == self._last:
            raise AllCaptured


@dataclass(slots=True)
class WeightRecorder:
    """Collects, per layer, the attention of the rows that predict answer tokens.

    The row of the query's last token predicts the first answer token, the row of each answer token
    the next one.

    Attributes:
        first_position: position of the query's last token; earlier rows aren't recorded.
        shares: position -> layer -> (batch, n_groups + 2) fp32, averaged over heads: the share of
            each citation group, then of the prefix, then of the query. A row computed again (a
            rejected draft in assisted decoding) replaces what stood there.
    """

    first_position: int
    shares: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)

    def put(self, layer: int, position: int, share: torch.Tensor) -> None:
        """Record one row of one layer."""
        self.shares.setdefault(position, {})[layer] = share

    def average(self, positions: Sequence[int], batch_rows: Sequence[int]) -> torch.Tensor:
        """Mean over layers and the given (position, batch row) pairs.

        Returns:
            (n_groups + 2,) fp32 on the CPU, summing to one.
        """
        rows = []
        for position, row in zip(positions, batch_rows, strict=True):
            layers = self.shares[position].values()
            rows.append(torch.stack([share[row].cpu() for share in layers]).mean(dim=0))
        mean = torch.stack(rows).mean(dim=0)
        return mean / mean.sum()


@dataclass(slots=True)
class PromptLayout:
    """A query behind a prefix, which an ordinary KV cache holds, and windows, which it does not.

    Not for several threads at once: it remembers what one pass's layers share.

    Attributes:
        prefix_length: tokens of the KV cache before the query, at positions ``0 ..``.
        query_start: position of the first token behind the prefix.
        sliding_windows: see `Layout.sliding_windows`.
        windows: what every batch row reads; or, of an ensemble, each batch row one of; or None.
        temperature: divides the windows' logits.
        slope: of the windows' log-sum-exp.
        shift: added to it then.
        query_bias: added to the query's log-sum-exp, prefix excluded; 0 changes nothing.
        recorder: where attention weights are recorded, or None to record nothing.
        capture: see `Layout.capture`.
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
    capture: Capture | None = None
    _pass: _Pass | None = field(default=None, init=False, repr=False)
    _context: Segments | None = field(default=None, init=False, repr=False)
    _context_shape: tuple[int, int] = field(default=(0, 0), init=False, repr=False)

    @property
    def weighs(self) -> bool:
        """See `Layout.weighs`."""
        return self.recorder is not None and self.windows is not None

    def position(self, index: int) -> int:
        """Position of the KV cache's ``index``-th token."""
        if index < self.prefix_length:
            return index
        return index - self.prefix_length + self.query_start

    def reading(
        self, layer: int, batch: int, rows: int, key: torch.Tensor, value: torch.Tensor
    ) -> Reading:
        """See `Layout.reading`."""
        length = key.shape[2]
        shape = (batch, rows, length)
        if self._pass is None or self._pass.shape != shape or layer in self._pass.done:
            self._pass = self._begun(batch, rows, length)
        now = self._pass
        now.done.add(layer)
        for segment, (first, last) in now.stretches:
            if first == 0 and last == length:
                segment.layers = {layer: [(key, value)]}
            else:
                segment.layers = {layer: [(key[:, :, first:last], value[:, :, first:last])]}
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
                share = _shown(windows, segments, share, batch * rows)
            by_role[segments.role] = by_role.get(segments.role, 0.0) + share
        like = next(iter(by_role.values()))
        nothing = like.new_zeros(batch * rows)
        context = by_role["context"]
        prefix, query = by_role.get("prefix", nothing), by_role.get("query", nothing)
        whole = torch.cat([context, prefix.unsqueeze(1), query.unsqueeze(1)], dim=1)
        whole = whole.unflatten(0, (batch, rows))
        for row in range(rows):
            position = self.position(length - rows + row)
            if position >= recorder.first_position:
                recorder.put(layer, position, whole[:, row])

    def _begun(self, batch: int, rows: int, length: int) -> _Pass:
        """What the layers of a pass share."""
        old, border = length - rows, self.prefix_length
        order = torch.arange(old, length)
        gap = self.query_start - border
        of_cache = torch.arange(length)
        of_cache = torch.where(of_cache < border, of_cache, of_cache + gap)
        at = Rows.at(of_cache[old:].repeat(batch))
        split = self.weighs or self.query_bias != 0.0
        stretches: list[tuple[Segment, tuple[int, int]]] = []
        made: list[Segments] = []

        def add(role: str, first: int, last: int, seen: object) -> None:
            if first >= last:
                return
            contiguous = first >= border or last <= border
            segment = Segment(
                first=int(of_cache[first]),
                last=int(of_cache[last - 1]),
                positions=None if contiguous else of_cache[first:last],
                seen=seen,  # type: ignore[arg-type]  # one of those that Segment lists
            )
            stretches.append((segment, (first, last)))
            made.append(Segments(role, [segment], batch * rows))  # type: ignore[arg-type]  # a Role

        if old >= border:
            start = border if split else 0
            if split:
                add("prefix", 0, border, None)
            if rows == 1:
                add("query", start, length, None)
            else:
                add("query", start, old, None)
                add("query", old, length, "causal")
        elif not split:
            # Rows feed a part of the prefix: assisted decoding feeds all that it has at first.
            add("query", 0, length, "causal" if old == 0 else (order + 1).repeat(batch))
        else:
            add("prefix", 0, border, (order + 1).clamp_max(border).repeat(batch))
            add("query", border, length, (order + 1 - border).clamp_min(0).repeat(batch))
        if self.windows is not None:
            if self._context is None or self._context_shape != (batch, rows):
                self._context = _context(
                    self.windows, batch, rows, self.temperature, spans=self.weighs
                )
                self._context_shape = (batch, rows)
            made.append(self._context)
        reading = Reading(at, made, self.slope, self.shift, self.query_bias)
        return _Pass((batch, rows, length), stretches, reading)


def _shown(
    windows: PackedWindows | Members, segments: Segments, share: torch.Tensor, tokens: int
) -> torch.Tensor:
    """The context's shares (results,) as (tokens, groups); of an ensemble (tokens, 1)."""
    if isinstance(windows, Members):
        index = segments.index_on(share.device)
        if index is None:
            return share.unsqueeze(-1)
        return share.new_zeros(tokens).index_add_(0, index, share).unsqueeze(-1)
    return share.view(len(windows.spans), tokens).T @ windows.shares.to(share)


@dataclass(slots=True)
class _Pass:
    """What the layers of one forward pass share.

    Attributes:
        shape: batch rows, fed tokens of each, tokens in the KV cache.
        stretches: segments of the KV cache, and from where to where each goes.
        reading: of all layers.
        done: the layers that have asked.
    """

    shape: tuple[int, int, int]
    stretches: list[tuple[Segment, tuple[int, int]]]
    reading: Reading
    done: set[int] = field(default_factory=set)


class _Run:
    """Spans of equal length, side by side in packed windows, as groups of a segment.

    Args:
        windows: that they are part of.
        first: index of the run's first token.
        groups: number of spans.
        length: of each.
    """

    __slots__ = ("_first", "_groups", "_length", "_made", "_windows")

    def __init__(self, windows: PackedWindows, first: int, groups: int, length: int) -> None:
        self._windows = windows
        self._first = first
        self._groups = groups
        self._length = length
        self._made: dict[int, list[Part]] = {}

    def __getitem__(self, layer: int) -> list[Part]:
        if layer not in self._made:
            place = slice(self._first, self._first + self._groups * self._length)
            key, value = (
                tensor[layer][:, place].unflatten(1, (self._groups, self._length)).transpose(0, 1)
                for tensor in (self._windows.keys, self._windows.values)
            )
            self._made[layer] = [(key, value)]
        return self._made[layer]


def _context(
    windows: PackedWindows | Members, batch: int, rows: int, temperature: float, *, spans: bool
) -> Segments:
    """The windows as segments of the context, which every token of a pass reads, or its row's.

    Args:
        windows: at least one.
        batch: batch rows.
        rows: tokens of each.
        temperature: divides the logits.
        spans: whether each span is a segment of its own, so that its weight is known.
    """
    tokens = batch * rows
    if isinstance(windows, Members):
        queries = torch.arange(0, batch, windows.per_query).unsqueeze(-1)
        segments = [
            Segment(
                first=window.start,
                last=window.end - 1,
                tokens=((queries + place) * rows + torch.arange(rows)).flatten(),
                temperature=temperature,
                layers=_of_window(window),
            )
            for place, window in enumerate(windows.windows)
        ]
        return Segments("context", segments, tokens, static=True)
    if not spans:
        whole = Segment(
            first=int(windows.positions.min()),
            last=int(windows.positions.max()),
            positions=windows.positions,
            temperature=temperature,
            layers=_Run(windows, 0, 1, len(windows.positions)),
        )
        return Segments("context", [whole], tokens, static=True)
    segments = []
    first = 0
    for length, run in groupby(windows.spans):
        groups = sum(1 for _ in run)
        positions = windows.positions[first : first + groups * length]
        segments.append(
            Segment(
                first=int(positions.min()),
                last=int(positions.max()),
                tokens=torch.arange(tokens).repeat(groups),
                positions=positions.view(groups, length),
                temperature=temperature,
                layers=_Run(windows, first, groups, length),
            )
        )
        first += groups * length
    return Segments("context", segments, tokens, static=True)


def _of_window(window: Window) -> list[list[Part]]:
    """By layer, the keys and values of one window."""
    pairs = zip(window.keys, window.values, strict=True)
    return [[(key.unsqueeze(0), value.unsqueeze(0))] for key, value in pairs]


class TextsLayout:
    """Texts one behind the other in one batch row, each of which sees the prefix and itself.

    Layers that treat every token alike, which are all but attention, so run over the tokens of many
    texts at once, whatever their lengths. Texts of equal length and start share a call of the
    kernel, so those that stand beside each other should be alike. No KV cache takes part.

    Args:
        sliding_windows: see `Layout.sliding_windows`.
        lengths: tokens of each text, in the order in which they stand.
        starts: position of each one's first token.
        prefix: what every token sees before its own text, or None.
        before: a window for each text, all of which its tokens see, too; or none.
        capture: see `Layout.capture`.

    Attributes:
        positions: (tokens,) int64 on the CPU: of every token of all texts.
    """

    weighs = False

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
        self._own: list[tuple[Segment, int, int]] = []
        first = 0
        for (length, start), run in groupby(zip(lengths, starts, strict=True)):
            groups = sum(1 for _ in run)
            segment = Segment(
                first=start,
                last=start + length - 1,
                tokens=torch.arange(first, first + groups * length),
                seen="causal",
            )
            self._own.append((segment, first, groups))
            first += groups * length
        made = [Segments("query", [segment for segment, _, _ in self._own], tokens)]
        if prefix is not None:
            whole = Segment(prefix.start, prefix.end - 1, layers=_of_window(prefix))
            made.append(Segments("prefix", [whole], tokens))
        if before:
            ends = accumulate(lengths)
            segments = [
                Segment(
                    window.start,
                    window.end - 1,
                    tokens=torch.arange(end - length, end),
                    layers=_of_window(window),
                )
                for window, length, end in zip(before, lengths, ends, strict=True)
            ]
            made.append(Segments("context", segments, tokens))
        self._reading = Reading(Rows.at(self.positions), made)

    def reading(
        self, layer: int, batch: int, rows: int, key: torch.Tensor, value: torch.Tensor
    ) -> Reading:
        """See `Layout.reading`; there is one batch row."""
        for segment, first, groups in self._own:
            length = (segment.last - segment.first) + 1
            place = slice(first, first + groups * length)
            segment.layers = {
                layer: [
                    (
                        key[0, :, place].unflatten(1, (groups, length)).transpose(0, 1),
                        value[0, :, place].unflatten(1, (groups, length)).transpose(0, 1),
                    )
                ]
            }
        return self._reading

    def record(self, layer: int, reading: Reading, weights: Sequence[torch.Tensor]) -> None:
        """Nothing is recorded."""


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
