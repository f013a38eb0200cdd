"""Rows that share a forward pass: what each is fed and reads, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any, Generic, TypeVar

import torch

from rag_windows.attention.layout import Layout, texts, use_layout
from rag_windows.attention.merge import Rescaling, Weights
from rag_windows.attention.segments import Queries, Reading, Rows, Segment, Segments
from rag_windows.attention.weights import RecordedTokens, WeightRecorder
from rag_windows.errors import InputError
from rag_windows.kv import Window, Windows
from rag_windows.loading import input_device
from rag_windows.methods import query_bias
from rag_windows.prefill import EncodedContext, ModelEncoder


class FedRow:
    """What one row of a forward pass is fed, and what it reads.

    Attributes:
        prefix: None where the row's own tokens begin with it, or where it is empty.
        windows: what it reads, each window once; None where there are none.
        fed: tokens that the next forward pass takes: at first the whole query.
        position: of the first of those.
        weights: of tokens that were recorded (tokens, spans + 2), fp32, on the CPU: see
            `WeightRecorder`; complete once it leaves.
    """

    cited = False

    def __init__(self, context: EncodedContext, query_ids: Sequence[int]) -> None:
        if not query_ids:
            raise InputError("The query has no tokens. Give at least one.")
        method, windowed = context.method, isinstance(context.windows, Windows)
        self.prefix: Window | None = context.prefix if windowed else None
        self.windows = context.windows if isinstance(context.windows, Windows) else None
        # Without windows nothing else holds the prefix, so it begins the row's own KV cache.
        self.fed = list(query_ids) if windowed else [*context.prefix_ids, *query_ids]
        self.position = context.query_start if windowed else 0
        self.temperature, self.slope, self.shift = method.temperature, method.slope, method.shift
        self.query_bias = query_bias(method, len(context.each)) if windowed else 0.0
        self.spans = 0 if self.windows is None else len(self.windows.spans)
        self.weights: list[torch.Tensor] = []


FIRST_CAPACITY = 64
"""Tokens that the KV caches of a batch hold before they grow for the first time."""


class RowCaches:
    """The KV caches of a batch's rows, with spare capacity, so that a token is one write.

    Row ``i`` of a batch is row ``i`` of the tensors, by layer (rows, kv heads, capacity, head dim
    or value dim); it has ``lengths[i]`` tokens. Not for several threads at once.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def remove(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        last = len(self.lengths) - 1
        length = self.lengths[last]
        if row != last:
            for buffer in (*self.keys.values(), *self.values.values()):
                buffer[row, :, :length] = buffer[last, :, :length]
            self.lengths[row] = length
        self.set_lengths(self.lengths[:-1])

    def grow(self, tokens: Sequence[int]) -> None:
        """Count the tokens of the pass that begins, by row; rows that are new stand behind."""
        self.lengths += [0] * (len(tokens) - len(self.lengths))
        self.lengths = [length + n for length, n in zip(self.lengths, tokens, strict=True)]

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Let each row have so many of its tokens, and forget the rows behind them."""
        self.lengths = list(lengths)
        if not self.lengths:
            self.keys.clear()
            self.values.clear()

    def buffers(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, shaped like the given ones, for all counted tokens."""
        held = self.keys.get(layer)
        rows, tokens = len(self.lengths), max(*self.lengths, FIRST_CAPACITY)
        if held is None or held.shape[0] < rows or held.shape[2] < tokens:
            if held is not None:
                rows = held.shape[0] if held.shape[0] >= rows else max(rows, 2 * held.shape[0])
                tokens = held.shape[2] if held.shape[2] >= tokens else 2 * tokens
            for buffers, like in ((self.keys, key), (self.values, value)):
                # Zeros, not what memory happens to hold: masked weights times NaN would be NaN.
                buffer = like.new_zeros(rows, like.shape[0], tokens, like.shape[2])
                if layer in buffers:
                    before = buffers[layer]
                    buffer[: before.shape[0], :, : before.shape[2]] = before
                buffers[layer] = buffer
        return self.keys[layer], self.values[layer]


AnyRow = TypeVar("AnyRow", bound=FedRow)


class Plan(Generic[AnyRow]):
    """Which rows take part in forward passes, and what they read; it holds until rows come or go.

    The first ``old`` rows have a KV cache already, with one fed token each. ``newest`` (rows,)
    int64, on the CPU, is the place of each row's last token; ``encoded`` are the segments of
    windows and prefixes. ``recorder`` takes the attention weights of the last token of each of the
    ``cited`` rows; its positions are the numbers of the passes.
    """

    def __init__(self, rows: Sequence[AnyRow], old: int) -> None:
        self.rows = list(rows)
        self.old = old
        self.lengths = [len(row.fed) for row in rows]
        ends = list(accumulate(self.lengths, initial=0))
        self.newest = torch.tensor(ends[1:]) - 1
        self._tokens = ends[-1]
        self._owners = torch.arange(len(rows)).repeat_interleave(torch.tensor(self.lengths))
        places = [torch.arange(start, end) for start, end in pairwise(ends)]
        self._places = dict(zip(rows, places, strict=True))
        self.rescaling = Rescaling(
            self._of_tokens([row.slope for row in rows], 1.0),
            self._of_tokens([row.shift for row in rows], 0.0),
            self._of_tokens([row.query_bias for row in rows], 0.0),
        )
        self.cited = [row for row in rows if row.cited]
        self.recorder = WeightRecorder()
        self._recorded: RecordedTokens | None = None
        # Which of the cited rows' spans the parts of segments are.
        self._spans: dict[Segment, torch.Tensor] = {}
        segments = [*self._windows(), *self._prefixes()]
        self.encoded = [Segments(segments, self._tokens, static=True)] if segments else []

    def last(self, tokens: int) -> torch.Tensor:
        """(rows x tokens,) int64, on the CPU: the places of so many last tokens of each row."""
        return (self.newest.unsqueeze(1) + torch.arange(1 - tokens, 1)).flatten()

    def begin_recording(self, segments: Sequence[Segments]) -> None:
        """Begin a pass over these segments."""
        if self._recorded is None:
            cited = self.newest[[row.cited for row in self.rows]]
            most = max(row.spans for row in self.cited)
            self._recorded = RecordedTokens(segments, cited, self._tokens, most, self._spans)
        passes = len(self.recorder.sums)
        self.recorder.begin(range(passes, passes + 1), self._recorded)

    def flush(self) -> None:
        """Hand the attention weights to the rows, once."""
        passes = [*self.recorder.sums.values()]
        self.recorder.sums.clear()
        if passes:
            for row, own in zip(self.cited, torch.stack(passes, dim=1).cpu(), strict=True):
                row.weights.append(torch.cat([own[:, : row.spans], own[:, -2:]], dim=1))

    def _of_tokens(self, numbers: Sequence[float], usual: float) -> float | torch.Tensor:
        """A number for all tokens, or (tokens, 1) fp32."""
        if all(number == usual for number in numbers):
            return usual
        if len(set(numbers)) == 1:
            return numbers[0]
        return torch.tensor(numbers, dtype=torch.float32)[self._owners].unsqueeze(-1)

    def _prefixes(self) -> list[Segment]:
        readers: dict[int, tuple[Window, list[AnyRow]]] = {}
        for row in self.rows:
            if row.prefix is not None:
                readers.setdefault(id(row.prefix), (row.prefix, []))[1].append(row)
        return [
            Segment.of_windows("prefix", window.whole, self._readers(rows))
            for window, rows in readers.values()
        ]

    def _windows(self) -> list[Segment]:
        """Windows as segments: one for all that have the same readers."""
        readers: dict[tuple[int, float], list[tuple[AnyRow, int]]] = {}
        stretches: dict[int, list[tuple[Window, slice]]] = {}
        for row in self.rows:
            entry = 0
            for _, run in groupby(row.windows.stretches() if row.windows else (), _window):
                spans = [*run]
                whose = id(spans[0][0])
                stretches[whose] = spans
                readers.setdefault((whose, row.temperature), []).append((row, entry))
                entry += len(spans)
        together: dict[tuple[tuple[AnyRow, ...], float], list[tuple[int, list[int]]]] = {}
        for (whose, temperature), found in readers.items():
            alike = tuple(row for row, _ in found), temperature
            together.setdefault(alike, []).append((whose, [entry for _, entry in found]))
        made: list[Segment] = []
        for (rows, temperature), group in together.items():
            parts: list[tuple[Window, slice]] = []
            own_spans: list[list[int]] = []
            for whose, entries in group:
                cited = [entry for row, entry in zip(rows, entries, strict=True) if row.cited]
                for number, part in enumerate(stretches[whose]):
                    parts.append(part)
                    own_spans.append([entry + number for entry in cited])
            made.append(Segment.of_windows("context", parts, self._readers(rows), temperature))
            self._spans[made[-1]] = torch.tensor(own_spans, dtype=torch.int64)
        return made

    def _readers(self, rows: Sequence[AnyRow]) -> torch.Tensor:
        """The tokens of rows."""
        return torch.cat([self._places[row] for row in rows])


def _window(stretch: tuple[Window, slice]) -> int:
    return id(stretch[0])


class BatchLayout(Layout):
    """One forward pass over the tokens of all rows, one behind the other in one batch row.

    ``caches`` count this pass's tokens already; ``positions`` (tokens,) int64 are on the CPU.
    """

    def __init__(
        self,
        sliding_windows: tuple[int | None, ...],
        plan: Plan[Any],
        caches: RowCaches,
        positions: torch.Tensor,
    ) -> None:
        self.sliding_windows = sliding_windows
        self._plan = plan
        self._caches = caches
        self._where: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        tokens, old = len(positions), plan.old
        own: list[Segment] = []
        if old:
            lengths = torch.tensor(caches.lengths[:old])
            starts = positions[:old] - lengths + 1
            self._old = Segment(
                "query",
                int(starts.min()),
                int(positions[:old].max()),
                tokens=torch.arange(old),
                positions=starts.unsqueeze(-1) + torch.arange(int(lengths.max())),
                seen=lengths,
            )
            own.append(self._old)
        self._new = texts(plan.lengths[old:], positions, old)
        own += [one.segment for one in self._new]
        made = [*plan.encoded, Segments(own, tokens)]
        self._reading = Reading(Rows(positions), made, plan.rescaling)
        if plan.cited:
            plan.begin_recording(made)

    @property
    def weighs(self) -> bool:
        """Whether a row of the batch is cited."""
        return bool(self._plan.cited)

    def reading(
        self, layer: int, batch: int, rows: int, key: torch.Tensor, value: torch.Tensor
    ) -> Reading:
        """Write the fed tokens into their rows' KV caches, and say what they read."""
        old, device = self._plan.old, key.device
        keys, values = self._caches.buffers(layer, key[0], value[0])
        if old:
            if device not in self._where:
                ends = torch.tensor(self._caches.lengths[:old], device=device) - 1
                self._where[device] = torch.arange(old, device=device), ends
            index, ends = self._where[device]
            keys[index, :, ends] = key[0, :, :old].transpose(0, 1)
            values[index, :, ends] = value[0, :, :old].transpose(0, 1)
            longest = max(self._caches.lengths[:old])
            self._old.layers = {layer: [(keys[:old, :, :longest], values[:old, :, :longest])]}
        row = old
        for one in self._new:
            place = slice(row, row + one.groups)
            part = one.take(layer, key, value)
            keys[place, :, : one.length], values[place, :, : one.length] = part
            row += one.groups
        return self._reading

    def record(self, weights: Weights, asked: Queries) -> None:
        """See `Layout.record`."""
        self._plan.recorder.add(weights)


def read_rows(
    encoder: ModelEncoder,
    plan: Plan[Any],
    caches: RowCaches,
    wanted: torch.Tensor,
    layout_kind: type[BatchLayout] = BatchLayout,
) -> tuple[torch.Tensor, BatchLayout]:
    """One forward pass over the fed tokens of all rows.

    Args:
        caches: those of the rows, which take in what is fed.
        wanted: (places,) int64, on the CPU: the tokens of the pass whose logits are computed.
        layout_kind: what records the pass.

    Returns:
        Logits (places, vocabulary), fp32, and what the pass recorded.
    """
    caches.grow(plan.lengths)
    positions = torch.cat(
        [torch.arange(row.position, row.position + len(row.fed)) for row in plan.rows]
    )
    device = input_device(encoder.model)
    fed = torch.tensor([[token for row in plan.rows for token in row.fed]], device=device)
    layout = layout_kind(encoder.sliding_windows, plan, caches, positions)
    with use_layout(layout):
        output = encoder.model(
            fed,
            position_ids=positions.unsqueeze(0).to(device),
            use_cache=False,
            logits_to_keep=wanted,
        )
    return torch.as_tensor(output.logits)[0].float(), layout
