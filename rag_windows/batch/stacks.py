"""Windows that the same rows read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from rag_windows.adjacency import follows, side_by_side
from rag_windows.batch.apart import stand_apart
from rag_windows.batch.scratch import Kind, Scratch
from rag_windows.batch.slots import Slot
from rag_windows.windows import Window

if TYPE_CHECKING:
    from rag_windows.batch.row import Row

Segments = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""Keys (kv heads, n, head dim) and values (kv heads, n, value dim) of tokens that stand side by
side, then of those behind them; the lengths n add up to that of a stack."""


class Stack:
    """Windows of which every reader reads all, so that they are read as one.

    Attributes:
        slots: in the order in which they are read.
        segments: per layer; a single one unless the stack stands apart.
        positions: (N,) int64, on the first layer's device; N is the length of all.
        parts: (N,) int64, there too: which part of which slot each token belongs to, counted
            through all of them.
        first_position: the smallest position of any token.
        last_position: the largest.
        prefix: whether it is a prefix.
        apart: whether its windows stay where they are.

    Args:
        slots: at least one; unless they stay apart, only the stack's tensors of their windows
            remain.
        apart: see there.
    """

    def __init__(self, slots: Sequence[Slot], *, apart: bool = False) -> None:
        self.slots = tuple(slots)
        self.prefix = slots[0].prefix
        self.apart = apart
        if not apart:
            _put_side_by_side(slots)
        windows = [slot.window for slot in slots]
        self.segments = tuple(_segments(windows, layer) for layer in range(len(windows[0].keys)))
        device = self.segments[0][0][0].device
        positions = [torch.arange(w.start, w.start + len(w.ids)) for w in windows]
        self.positions = torch.cat(positions).to(device)
        spans = torch.tensor([length for slot in slots for length in slot.spans])
        self.parts = torch.arange(len(spans)).repeat_interleave(spans).to(device)
        self.first_position = min(window.start for window in windows)
        self.last_position = max(w.start + len(w.ids) for w in windows) - 1

    @property
    def readers(self) -> frozenset[Row]:
        """The rows that read it."""
        return frozenset(self.slots[0].readers)

    @property
    def n_parts(self) -> int:
        """How many parts are cited by themselves."""
        return sum(len(slot.spans) for slot in self.slots)

    def joined(self, layer: int, scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (kv heads, N, head dim) and values (kv heads, N, value dim) of a layer.

        Args:
            layer: its number.
            scratch: where they are joined if they stand apart; so they hold until its next use.
        """
        keys, values = zip(*self.segments[layer], strict=True)
        return scratch.joined(Kind.KEYS, keys), scratch.joined(Kind.VALUES, values)


def stacked(stacks: Iterable[Stack], slots: Iterable[Slot], heads: int) -> list[Stack]:
    """Stack windows anew after rows have come or gone.

    A stack whose windows still have the same readers stays as it is; what others read in part is
    split. What nobody reads is let go. Where windows stand side by side already, nothing is copied;
    their memory is then free when the last window goes that was encoded with them. Nor is it where
    they may stay apart, see `stand_apart`.

    Args:
        stacks: those of before.
        slots: all that is read now.
        heads: of a query.
    """
    wanted = {id(slot): slot for slot in slots if slot.readers}
    made: list[Stack] = []
    for stack in stacks:
        if (
            all(id(slot) in wanted for slot in stack.slots)
            and len(_classes(stack.slots)) == 1
            and (not stack.apart or stand_apart(stack.slots, heads))
        ):
            made.append(stack)
            for slot in stack.slots:
                del wanted[id(slot)]
    made += [Stack(group, apart=stand_apart(group, heads)) for group in _classes(wanted.values())]
    return made


def _put_side_by_side(slots: Sequence[Slot]) -> None:
    windows = [slot.window for slot in slots]
    layers = range(len(windows[0].keys))
    keys = [side_by_side([window.keys[layer] for window in windows]) for layer in layers]
    values = [side_by_side([window.values[layer] for window in windows]) for layer in layers]
    ends = accumulate(len(window.ids) for window in windows)
    for slot, window, end in zip(slots, windows, ends, strict=True):
        place = slice(end - len(window.ids), end)
        slot.window = replace(
            window,
            keys=tuple(key[:, place] for key in keys),
            values=tuple(value[:, place] for value in values),
        )


def _segments(windows: Sequence[Window], layer: int) -> Segments:
    """Windows of a layer; those that stand side by side are one segment."""
    runs: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for window in windows:
        key, value = window.keys[layer], window.values[layer]
        if runs and follows(runs[-1][-1][0], key) and follows(runs[-1][-1][1], value):
            runs[-1].append((key, value))
        else:
            runs.append([(key, value)])
    return tuple(
        (side_by_side([key for key, _ in run]), side_by_side([value for _, value in run]))
        for run in runs
    )


def _classes(slots: Iterable[Slot]) -> list[list[Slot]]:
    """Slots with the same readers together; a prefix is alone."""
    classes: dict[tuple[int, frozenset[Row]], list[Slot]] = {}
    for slot in slots:
        mark = id(slot) if slot.prefix else 0
        classes.setdefault((mark, frozenset(slot.readers)), []).append(slot)
    return list(classes.values())
