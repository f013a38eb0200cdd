"""Rows that share a forward pass: what each is fed and reads, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any, Generic, TypeVar

import torch

from rag_windows.attention.layout import Layout, of_stretches, of_window, texts, use_layout
from rag_windows.attention.segments import (
    Queries,
    Reading,
    Role,
    Rows,
    Segment,
    Segments,
    SegmentWeights,
    Weights,
    segment_weights,
)
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
        weights: of each token that was recorded, attention weights of each span, of the prefix and
            of the row's own tokens; only their shares mean something.
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
        self.weights: list[list[float]] = []


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
    windows and prefixes.
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
        self.slope = self._of_tokens([row.slope for row in rows], 1.0)
        self.shift = self._of_tokens([row.shift for row in rows], 0.0)
        self.query_bias = self._of_tokens([row.query_bias for row in rows], 0.0)
        self.cited = any(row.cited for row in rows)
        # What the attention weights that predict an answer's next token are of: for each segment,
        # places among its results; and by role, row and entry of `Row.weights`.
        self._wanted: list[torch.Tensor] = []
        self._cited: dict[Role, list[tuple[AnyRow, int]]] = {
            "context": [],
            "prefix": [],
            "query": [(row, -1) for row in rows if row.cited],
        }
        segments = [*self._windows(), *self._prefixes()]
        self._wanted.append(self.newest[[row.cited for row in rows]])
        self.encoded = [Segments(segments, self._tokens, static=True)] if segments else []
        # Of each pass since the last `flush`.
        self._recorded: dict[Role, list[torch.Tensor]] = {}

    def last(self, tokens: int) -> torch.Tensor:
        """(rows x tokens,) int64, on the CPU: the places of so many last tokens of each row."""
        return (self.newest.unsqueeze(1) + torch.arange(1 - tokens, 1)).flatten()

    def of_cited(self, layers: Sequence[Weights]) -> list[SegmentWeights]:
        """The attention weights of the tokens that predict an answer's next one."""
        segments = segment_weights(layers)
        query = [one.shares for one in segments if one.role == "query"]
        # The segments of the rows' own tokens give a result for each token, in order.
        own = SegmentWeights("query", torch.cat(query, dim=1))
        whole = [*segments[: len(segments) - len(query)], own]
        return [
            one if len(places) == one.shares.shape[1] else one.at(places)
            for one, places in zip(whole, self._wanted, strict=True)
        ]

    def keep(self, recorded: Sequence[Sequence[SegmentWeights]]) -> None:
        """Add a pass's attention weights, as `of_cited` gives them, once it is done."""
        whole: dict[Role, torch.Tensor] = {}
        for segments in recorded:
            by_role: dict[Role, list[torch.Tensor]] = {}
            for one in segments:
                by_role.setdefault(one.role, []).append(one.summed().flatten())
            for role, weights in by_role.items():
                sums = torch.cat(weights)
                whole[role] = sums.to(whole[role].device) + whole[role] if role in whole else sums
        for role, sums in whole.items():
            self._recorded.setdefault(role, []).append(sums)

    def flush(self) -> None:
        """Hand the attention weights to the rows, once."""
        recorded, self._recorded = self._recorded, {}
        tokens = len(next(iter(recorded.values()), ()))
        before = {row: len(row.weights) for row in self.rows if row.cited}
        for row in before:
            row.weights += [[0.0] * (row.spans + 2) for _ in range(tokens)]
        for role, sums in recorded.items():
            columns = torch.stack(sums).T.tolist()
            for (row, of), weights in zip(self._cited[role], columns, strict=True):
                for token, weight in enumerate(weights, start=before[row]):
                    row.weights[token][of] += weight

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
        made: list[Segment] = []
        for window, rows in readers.values():
            tokens, cited = self._readers(rows)
            self._wanted.append(cited)
            self._cited["prefix"] += [(row, -2) for row in rows if row.cited]
            made.append(Segment("prefix", window.start, window.end - 1, tokens))
            made[-1].layers = of_window(window)
        return made

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
            for whose, entries in group:
                for number, part in enumerate(stretches[whose]):
                    parts.append(part)
                    self._cited["context"] += [
                        (row, entry + number)
                        for row, entry in zip(rows, entries, strict=True)
                        if row.cited
                    ]
            tokens, cited = self._readers(rows)
            self._wanted.append(cited)
            starts = [window.start + (place.start or 0) for window, place in parts]
            last = max(window.end for window, _ in parts) - 1
            segment = Segment("context", min(starts), last, tokens, starts=starts)
            segment.temperature, segment.layers = temperature, of_stretches(parts)
            made.append(segment)
        return made

    def _readers(self, rows: Sequence[AnyRow]) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of rows; and places among these of the newest ones of cited rows."""
        tokens = torch.cat([self._places[row] for row in rows])
        ends = torch.tensor([len(self._places[row]) for row in rows]).cumsum(0) - 1
        return tokens, ends[[row.cited for row in rows]]


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
        head_weights: torch.Tensor | None = None,
    ) -> None:
        self.sliding_windows = sliding_windows
        self.head_weights = head_weights
        self._plan = plan
        self._caches = caches
        self._layers: list[Weights] = []
        self._cited: list[list[SegmentWeights]] = []
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
        self._reading = Reading(Rows(positions), made, plan.slope, plan.shift, plan.query_bias)

    @property
    def weighs(self) -> bool:
        """Whether a row of the batch is cited."""
        return self._plan.cited

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
        if len(self._plan.newest) == len(self._reading.rows.positions):
            self._layers.append(weights)
        else:
            # Of a pass of many tokens, only the weights of a few are stored.
            self._cited.append(self._plan.of_cited([weights]))

    @property
    def recorded(self) -> list[list[SegmentWeights]]:
        """The attention weights of the pass, as `Plan.of_cited` gives them."""
        return self._cited + ([self._plan.of_cited(self._layers)] if self._layers else [])


def read_rows(
    encoder: ModelEncoder,
    plan: Plan[Any],
    caches: RowCaches,
    wanted: torch.Tensor,
    head_weights: torch.Tensor | None = None,
    layout_kind: type[BatchLayout] = BatchLayout,
) -> tuple[torch.Tensor, BatchLayout]:
    """One forward pass over the fed tokens of all rows.

    Args:
        caches: those of the rows, which take in what is fed.
        wanted: (places,) int64, on the CPU: the tokens of the pass whose logits are computed.
        head_weights: see `Layout`.
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
    layout = layout_kind(encoder.sliding_windows, plan, caches, positions, head_weights)
    with use_layout(layout):
        output = encoder.model(
            fed,
            position_ids=positions.unsqueeze(0).to(device),
            use_cache=False,
            logits_to_keep=wanted,
        )
    return torch.as_tensor(output.logits)[0].float(), layout
