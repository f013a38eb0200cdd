"""What the rows of a batch read in a forward pass: each its KV cache, together what they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from rag_windows.attention.layout import Layout, Parts, texts
from rag_windows.attention.native.kernel import Part
from rag_windows.attention.segments import Reading, Role, Rows, Segment, Segments
from rag_windows.batching.rows import Row
from rag_windows.kv import Window, follows, side_by_side

FIRST_CAPACITY = 64
"""Tokens for which there is room before the KV caches of a batch grow for the first time."""


class RowCaches:
    """The KV caches of a batch's rows, with room ahead, so that a token is one write.

    Row ``i`` of a batch is row ``i`` of the tensors. Not for several threads at once.

    Attributes:
        lengths: tokens of each row.
        keys: per layer, (rows, kv heads, capacity, head dim).
        values: per layer, (rows, kv heads, capacity, value dim).
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def remove(self, row: int) -> None:
        """Let go of a row; the last one takes its place."""
        last = len(self.lengths) - 1
        length = self.lengths[last]
        if row != last:
            for buffer in (*self.keys.values(), *self.values.values()):
                buffer[row, :, :length] = buffer[last, :, :length]
            self.lengths[row] = length
        self.lengths.pop()
        if not self.lengths:
            self.keys.clear()
            self.values.clear()

    def grow(self, tokens: Sequence[int]) -> None:
        """Count the tokens of the pass that begins, by row; rows that are new stand behind."""
        self.lengths += [0] * (len(tokens) - len(self.lengths))
        self.lengths = [length + n for length, n in zip(self.lengths, tokens, strict=True)]

    def undo(self, lengths: Sequence[int]) -> None:
        """Let each row have so many tokens again, and forget the rows behind them."""
        self.lengths = list(lengths)
        if not self.lengths:
            self.keys.clear()
            self.values.clear()

    def buffers(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, with room for what was counted; shaped like the given ones.

        Those are (kv heads, any, head dim) and (kv heads, any, value dim).
        """
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


def add(sums: dict[Role, torch.Tensor], shares: Mapping[Role, torch.Tensor]) -> None:
    """Add shares to sums, role by role."""
    for role, share in shares.items():
        sums[role] = sums[role] + share if role in sums else share


class Plan:
    """Which rows take part in forward passes, and what they read; it holds until rows come or go.

    Attributes:
        rows: in order; those that have a KV cache already stand first, with one token each.
        old: how many of the rows have a KV cache.
        lengths: fed tokens of each.
        newest: (rows,) int64, on the CPU: the place of each row's last token.
        shared: segments of the prefixes and of the windows, where there are any.
        cited: whether attention weights are recorded.
    """

    def __init__(self, rows: Sequence[Row], old: int) -> None:
        self.rows = list(rows)
        self.old = old
        self.lengths = [len(row.fed) for row in rows]
        ends = list(accumulate(self.lengths))
        self.newest = torch.tensor(ends) - 1
        self._tokens = ends[-1]
        self._owners = torch.arange(len(rows)).repeat_interleave(torch.tensor(self.lengths))
        places = [torch.arange(end - n, end) for end, n in zip(ends, self.lengths, strict=True)]
        self._places = dict(zip(rows, places, strict=True))
        self.slope = self._of_tokens([row.slope for row in rows], 1.0)
        self.shift = self._of_tokens([row.shift for row in rows], 0.0)
        self.query_bias = self._of_tokens([row.query_bias for row in rows], 0.0)
        self.cited = any(row.cited for row in rows)
        # Results of each role that predict an answer's next token: place, row, and of what.
        self._cited: dict[Role, list[tuple[int, Row, int]]] = {
            "prefix": [],
            "context": [],
            "query": [(end - 1, row, -1) for end, row in zip(ends, rows, strict=True) if row.cited],
        }
        made = {"prefix": self._prefixes(), "context": self._windows()}
        self.shared = [
            Segments(role, segments, self._tokens, static=True)  # type: ignore[arg-type]  # a Role
            for role, segments in made.items()
            if segments
        ]
        self._results = {
            role: torch.tensor([place for place, _, _ in found], dtype=torch.int64)
            for role, found in self._cited.items()
        }
        self._recorded: dict[Role, torch.Tensor] = {}

    def shares(
        self, segments: Sequence[Segments], weights: Sequence[torch.Tensor]
    ) -> dict[Role, torch.Tensor]:
        """One layer's attention weights of the tokens that predict an answer's next one."""
        return {
            one.role: weight[self._results[one.role].to(weight.device)].mean(dim=1)
            for one, weight in zip(segments, weights, strict=True)
        }

    def keep(self, recorded: Mapping[Role, torch.Tensor]) -> None:
        """Add a pass's attention weights, once it is done."""
        add(self._recorded, recorded)

    def flush(self) -> None:
        """Hand the attention weights to the rows, once."""
        recorded, self._recorded = self._recorded, {}
        for role, sums in recorded.items():
            for (_, row, of), share in zip(self._cited[role], sums.tolist(), strict=True):
                row.weights[of] += share

    def _of_tokens(self, numbers: Sequence[float], usual: float) -> float | torch.Tensor:
        """A number for all tokens, or (tokens, 1) fp32."""
        if all(number == usual for number in numbers):
            return usual
        if len(set(numbers)) == 1:
            return numbers[0]
        return torch.tensor(numbers)[self._owners].unsqueeze(-1)

    def _prefixes(self) -> list[Segment]:
        readers: dict[int, tuple[Window, list[Row]]] = {}
        for row in self.rows:
            if row.prefix is not None:
                readers.setdefault(id(row.prefix), (row.prefix, []))[1].append(row)
        made: list[Segment] = []
        for window, rows in readers.values():
            self._add(made, "prefix", rows, _Stretch([window]), 1.0, [-2] * len(rows))
        return made

    def _windows(self) -> list[Segment]:
        """Windows as segments: one a span that is cited, else one for all of equal readers."""
        readers: dict[tuple[int, float], list[tuple[Row, int]]] = {}
        windows: dict[int, tuple[Window, tuple[int, ...]]] = {}
        for row in self.rows:
            first = 0
            for window, spans in zip(row.windows, row.spans, strict=True):
                windows[id(window)] = window, spans
                readers.setdefault((id(window), row.temperature), []).append((row, first))
                first += len(spans)
        made: list[Segment] = []
        together: dict[tuple[tuple[Row, ...], float], list[Window]] = {}
        for (known, temperature), found in readers.items():
            window, spans = windows[known]
            rows = [row for row, _ in found]
            if not any(row.cited for row in rows):
                together.setdefault((tuple(rows), temperature), []).append(window)
                continue
            start = 0
            for number, length in enumerate(spans):
                stretch = _Stretch([window], start, start + length)
                of = [first + number for _, first in found]
                self._add(made, "context", rows, stretch, temperature, of)
                start += length
        for (alike, temperature), group in together.items():
            self._add(made, "context", alike, _Stretch(group), temperature, [0] * len(alike))
        return made

    def _add(
        self,
        made: list[Segment],
        role: Role,
        rows: Sequence[Row],
        stretch: _Stretch,
        temperature: float,
        of: Sequence[int],
    ) -> None:
        """Add a segment that rows read, and note where their attention weights will stand.

        ``of`` says of which entry of `Row.weights` each row's attention is a part.
        """
        place = sum(one.readers(self._tokens) for one in made)
        for row, entry in zip(rows, of, strict=True):
            place += len(self._places[row])
            if row.cited:
                self._cited[role].append((place - 1, row, entry))
        positions = stretch.positions
        segment = Segment(int(positions.min()), int(positions.max()))
        segment.tokens = torch.cat([self._places[row] for row in rows])
        segment.positions, segment.temperature = positions, temperature
        segment.layers = Parts(stretch.parts)
        made.append(segment)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Tokens ``first`` to ``end`` of each of some windows, which a segment reads."""

    windows: Sequence[Window]
    first: int = 0
    end: int | None = None

    @property
    def positions(self) -> torch.Tensor:
        """(tokens,) int64, on the CPU."""
        place = slice(self.first, self.end)
        return torch.cat([torch.arange(w.start, w.end)[place] for w in self.windows])

    def parts(self, layer: int) -> list[Part]:
        """Of a layer; windows that stand side by side in memory are one."""
        place = slice(self.first, self.end)
        runs: list[list[Part]] = []
        for window in self.windows:
            part = window.keys[layer][:, place], window.values[layer][:, place]
            if runs and all(map(follows, runs[-1][-1], part)):
                runs[-1].append(part)
            else:
                runs.append([part])
        keys = [side_by_side([key for key, _ in run]) for run in runs]
        values = [side_by_side([value for _, value in run]) for run in runs]
        return [(k.unsqueeze(0), v.unsqueeze(0)) for k, v in zip(keys, values, strict=True)]


class BatchLayout(Layout):
    """One forward pass over the tokens of all rows, one behind the other in one batch row.

    Args:
        sliding_windows: see `rag_windows.attention.layout.Layout`.
        plan: which tokens read what.
        caches: of the rows, which already count this pass's tokens.
        positions: (tokens,) int64, on the CPU.

    Attributes:
        recorded: attention weights of the pass so far, see `Plan.shares`.
    """

    def __init__(
        self,
        sliding_windows: tuple[int | None, ...],
        plan: Plan,
        caches: RowCaches,
        positions: torch.Tensor,
    ) -> None:
        self.sliding_windows = sliding_windows
        self._plan = plan
        self._caches = caches
        self.recorded: dict[Role, torch.Tensor] = {}
        self._where: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        tokens, old = len(positions), plan.old
        own: list[Segment] = []
        if old:
            lengths = torch.tensor(caches.lengths[:old])
            starts = positions[:old] - lengths + 1
            self._old = Segment(
                first=int(starts.min()),
                last=int(positions[:old].max()),
                tokens=torch.arange(old),
                positions=starts.unsqueeze(-1) + torch.arange(int(lengths.max())),
                seen=lengths,
            )
            own.append(self._old)
        self._new = texts(plan.lengths[old:], positions, old)
        own += [one.segment for one in self._new]
        made = [Segments("query", own, tokens), *plan.shared]
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
            keys[place, :, : one.length], values[place, :, : one.length] = one.take(
                layer, key, value
            )
            row += one.groups
        return self._reading

    def record(self, layer: int, reading: Reading, weights: Sequence[torch.Tensor]) -> None:
        """Add one layer's attention weights."""
        add(self.recorded, self._plan.shares(reading.segments, weights))
