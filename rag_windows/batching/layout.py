"""What the rows of a batch read in a forward pass: each its KV cache, together what they share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

import torch

from rag_windows.attention.segments import Part, Reading, Role, Rows, Segment, Segments
from rag_windows.batching.rows import Row, Slot

FIRST_ROOM = 64
"""Tokens for which there is room before the KV caches of a batch grow for the first time."""


class RowCaches:
    """The KV caches of a batch's rows, with room ahead, so that a token is one write.

    Row ``i`` of a batch is row ``i`` of the tensors. Not for several threads at once.

    Attributes:
        lengths: tokens of each row.
        keys: per layer, (rows, kv heads, room, head dim).
        values: per layer, (rows, kv heads, room, value dim).
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
            for room in (*self.keys.values(), *self.values.values()):
                room[row, :, :length] = room[last, :, :length]
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

    def room(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, with room for what was counted.

        Args:
            layer: its number.
            key: (kv heads, any, head dim), as they come.
            value: (kv heads, any, value dim).
        """
        held = self.keys.get(layer)
        rows, tokens = len(self.lengths), max(*self.lengths, FIRST_ROOM)
        if held is None or held.shape[0] < rows or held.shape[2] < tokens:
            if held is not None:
                rows = held.shape[0] if held.shape[0] >= rows else max(rows, 2 * held.shape[0])
                tokens = held.shape[2] if held.shape[2] >= tokens else 2 * tokens
            self.keys[layer] = _grown(held, key, rows, tokens)
            self.values[layer] = _grown(self.values.get(layer), value, rows, tokens)
        return self.keys[layer], self.values[layer]


def _grown(held: torch.Tensor | None, like: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
    """Zeros, not what memory happens to hold: masked weights times NaN would be NaN."""
    room = like.new_zeros(rows, like.shape[0], tokens, like.shape[2])
    if held is not None:
        room[: held.shape[0], :, : held.shape[2]] = held
    return room


class Plan:
    """Which rows take part in forward passes, and what they read; it holds until rows come or go.

    Attributes:
        rows: in order; those that have a KV cache already stand first, with one token each.
        lengths: fed tokens of each.
        old: how many of the rows have a KV cache.
        newest: (rows,) int64, on the CPU: the place of each row's last token.

    Args:
        rows: see there.
        old: see there.
    """

    def __init__(self, rows: Sequence[Row], old: int) -> None:
        self.rows = list(rows)
        self.lengths = [len(row.fed) for row in rows]
        self.old = old
        ends = list(accumulate(self.lengths))
        self.newest = torch.tensor(ends) - 1
        self._tokens = ends[-1]
        self._owners = torch.arange(len(rows)).repeat_interleave(torch.tensor(self.lengths))
        places = [torch.arange(end - n, end) for end, n in zip(ends, self.lengths, strict=True)]
        self._places = dict(zip(rows, places, strict=True))
        self.slope = self._of_tokens([row.slope for row in rows], 1.0)
        self.shift = self._of_tokens([row.shift for row in rows], 0.0)
        self.query_bias = self._of_tokens([row.query_bias for row in rows], 0.0)
        self._slots: list[tuple[Slot, int] | None] = []
        self.shared = [made for made in (self._prefixes(), self._windows()) if made is not None]
        self.cited = any(row.cited for row in rows)
        self._recorded: dict[Role, torch.Tensor] = {}
        self._measured = {role: self._measuring(role) for role in ("prefix", "context", "query")}

    def record(self, segments: Sequence[Segments], weights: Sequence[torch.Tensor]) -> None:
        """Add one layer's attention weights, of the tokens that predict an answer's next one."""
        for one, weight in zip(segments, weights, strict=True):
            places = self._measured[one.role].to(weight.device)
            share = weight[places].mean(dim=1)
            before = self._recorded.get(one.role)
            self._recorded[one.role] = share if before is None else before + share

    def recorded(self) -> dict[Role, torch.Tensor]:
        """What was recorded so far, for `restore`."""
        return dict(self._recorded)

    def restore(self, recorded: dict[Role, torch.Tensor]) -> None:
        """Forget what a pass that failed has recorded."""
        self._recorded = dict(recorded)

    def flush(self) -> None:
        """Hand the attention weights to the rows, once."""
        recorded, self._recorded = self._recorded, {}
        for role, sums in recorded.items():
            places = self._measured[role]
            owners = self._owner(role)[places].tolist()
            for place, owner, share in zip(places.tolist(), owners, sums.tolist(), strict=True):
                row = self.rows[owner]
                if role == "context":
                    slot, span = self._span(place)
                    row.add_context(slot, span, share)
                else:
                    row.add_weight(role, share)

    def _of_tokens(self, numbers: Sequence[float], usual: float) -> float | torch.Tensor:
        """A number for all tokens, or (tokens, 1) fp32."""
        if all(number == usual for number in numbers):
            return usual
        if len(set(numbers)) == 1:
            return numbers[0]
        return torch.tensor(numbers)[self._owners].unsqueeze(-1)

    def _prefixes(self) -> Segments | None:
        slots = {id(slot): slot for row in self.rows for slot in row.slots if slot.prefix}
        made = [
            Segment(
                slot.window.start,
                slot.window.end - 1,
                tokens=self._readers(slot, None),
                layers=slot.layers(0),
            )
            for slot in slots.values()
        ]
        return Segments("prefix", made, self._tokens, static=True) if made else None

    def _windows(self) -> Segments | None:
        """Windows as segments: one a span that is cited, else one for all of equal readers."""
        slots = {id(slot): slot for row in self.rows for slot in row.slots if not slot.prefix}
        made: list[Segment] = []
        together: dict[tuple[frozenset[Row], float], list[Slot]] = {}
        self._spans: list[tuple[Slot, int]] = []
        for slot in slots.values():
            mine = [row for row in self.rows if slot in row.slots]
            for heat in dict.fromkeys(row.temperature for row in mine):
                readers = [row for row in mine if row.temperature == heat]
                if not any(row.cited for row in readers):
                    together.setdefault((frozenset(readers), heat), []).append(slot)
                    continue
                tokens = self._readers(slot, heat)
                first = slot.window.start
                for span, length in enumerate(slot.spans):
                    made.append(
                        Segment(
                            first,
                            first + length - 1,
                            tokens=tokens,
                            temperature=heat,
                            layers=slot.layers(span),
                        )
                    )
                    self._spans.append((slot, span))
                    first += length
        for (_, heat), group in together.items():
            windows = [slot.window for slot in group]
            positions = torch.cat([torch.arange(w.start, w.end) for w in windows])
            made.append(
                Segment(
                    int(positions.min()),
                    int(positions.max()),
                    tokens=self._readers(group[0], heat),
                    positions=positions,
                    temperature=heat,
                    layers=_Joined(group),
                )
            )
        return Segments("context", made, self._tokens, static=True) if made else None

    def _readers(self, slot: Slot, heat: float | None) -> torch.Tensor:
        """Places of the tokens that read a slot at a temperature."""
        return torch.cat(
            [
                self._places[row]
                for row in self.rows
                if slot in row.slots and (heat is None or row.temperature == heat)
            ]
        )

    def _owner(self, role: Role) -> torch.Tensor:
        """(results,): the row of each result of a role."""
        found = next((one for one in self.shared if one.role == role), None)
        return self._owners if found is None or found.index is None else self._owners[found.index]

    def _measuring(self, role: Role) -> torch.Tensor:
        """Places among a role's results of the newest tokens of cited rows."""
        found = next((one for one in self.shared if one.role == role), None)
        newest = torch.zeros(self._tokens, dtype=torch.bool)
        newest[self.newest[torch.tensor([row.cited for row in self.rows])]] = True
        if found is not None and found.index is not None:
            newest = newest[found.index]
        return newest.nonzero().squeeze(1)

    def _span(self, place: int) -> tuple[Slot, int]:
        """The slot and span of a result of the context."""
        context = next(one for one in self.shared if one.role == "context")
        if not self._slots:
            sizes = [one.readers(self._tokens) for one in context.segments]
            for known, size in zip(self._spans, sizes, strict=False):
                self._slots += [known] * size
        found = self._slots[place]
        if found is None:
            raise RuntimeError("A cited row reads a window that is not told apart.")
        return found


class _Joined:
    """Several windows as one segment of several parts.

    Args:
        slots: of the windows; at least one.
    """

    __slots__ = ("_slots",)

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = tuple(slots)

    def __getitem__(self, layer: int) -> list[Part]:
        windows = [slot.window for slot in self._slots]
        return [(w.keys[layer].unsqueeze(0), w.values[layer].unsqueeze(0)) for w in windows]


class BatchLayout:
    """One forward pass over the tokens of all rows, one behind the other in one batch row.

    Args:
        reach: see `rag_windows.attention.layout.Layout`.
        plan: which tokens read what.
        caches: of the rows, which already count this pass's tokens.
        positions: (tokens,) int64, on the CPU.
    """

    capture = None

    def __init__(
        self,
        reach: tuple[int | None, ...],
        plan: Plan,
        caches: RowCaches,
        positions: torch.Tensor,
    ) -> None:
        self.reach = reach
        self.weighs = plan.cited
        self._plan = plan
        self._caches = caches
        self._where: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        tokens, old = len(positions), plan.old
        own: list[Segment] = []
        if old:
            lengths = torch.tensor(caches.lengths[:old])
            self._old = Segment(
                first=int((positions[:old] - lengths).min()) + 1,
                last=int(positions[:old].max()),
                tokens=torch.arange(old),
                positions=(positions[:old] - lengths + 1).unsqueeze(-1)
                + torch.arange(int(lengths.max())),
                seen=lengths,
                newest=True,
            )
            own.append(self._old)
        self._fresh: list[tuple[Segment, int, int, int]] = []
        first = old
        for length, run in groupby(plan.lengths[old:]):
            groups = sum(1 for _ in run)
            place = slice(first, first + groups * length)
            at = positions[place].view(groups, length)
            segment = Segment(
                first=int(at.min()),
                last=int(at.max()),
                tokens=torch.arange(place.start, place.stop),
                positions=at,
                seen="causal",
            )
            self._fresh.append((segment, place.start, groups, length))
            own.append(segment)
            first = place.stop
        made = [Segments("query", own, tokens), *plan.shared]
        self._reading = Reading(Rows.at(positions), made, plan.slope, plan.shift, plan.query_bias)

    def reading(
        self, layer: int, batch: int, rows: int, key: torch.Tensor, value: torch.Tensor
    ) -> Reading:
        """Write the fed tokens into their rows' KV caches, and say what they read."""
        old, device = self._plan.old, key.device
        key, value = key[0], value[0]
        keys, values = self._caches.room(layer, key, value)
        if old:
            if device not in self._where:
                ends = torch.tensor(self._caches.lengths[:old], device=device) - 1
                self._where[device] = torch.arange(old, device=device), ends
            index, ends = self._where[device]
            keys[index, :, ends] = key[:, :old].transpose(0, 1)
            values[index, :, ends] = value[:, :old].transpose(0, 1)
            longest = max(self._caches.lengths[:old])
            self._old.layers = {layer: [(keys[:old, :, :longest], values[:old, :, :longest])]}
        row = old
        for segment, first, groups, length in self._fresh:
            place = slice(first, first + groups * length)
            own = tuple(
                tensor[:, place].unflatten(1, (groups, length)).transpose(0, 1)
                for tensor in (key, value)
            )
            keys[row : row + groups, :, :length] = own[0]
            values[row : row + groups, :, :length] = own[1]
            segment.layers = {layer: [(own[0], own[1])]}
            row += groups
        return self._reading

    def record(self, layer: int, reading: Reading, weights: Sequence[torch.Tensor]) -> None:
        """See `Plan.record`."""
        self._plan.record(reading.segments, weights)
