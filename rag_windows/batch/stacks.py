"""Windows that the same rows read, side by side in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from rag_windows.adjacency import side_by_side
from rag_windows.batch.slots import Slot

if TYPE_CHECKING:
    from rag_windows.batch.row import Row


class Stack:
    """Windows of which every reader reads all, so that one kernel call serves all of its readers.

    Attributes:
        slots: in the order in which they stand.
        keys: per layer, (kv heads, N, head dim); N is the length of all.
        values: per layer, (kv heads, N, value dim).
        positions: (N,) int64, on the first layer's device.
        parts: (N,) int64, there too: which part of which slot each token belongs to, counted
            through all of them.
        first_position: the smallest position of any token.
        last_position: the largest.
        prefix: whether it is a prefix.

    Args:
        slots: at least one; of their windows' tensors, only those of the stack remain.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self.prefix = slots[0].prefix
        windows = [slot.window for slot in slots]
        layers = range(len(windows[0].keys))
        lengths = [len(window.ids) for window in windows]
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for layer in layers:
            keys.append(side_by_side([window.keys[layer] for window in windows]))
            values.append(side_by_side([window.values[layer] for window in windows]))
        self.keys, self.values = tuple(keys), tuple(values)
        for slot, end in zip(slots, accumulate(lengths), strict=True):
            place = slice(end - len(slot.window.ids), end)
            slot.window = replace(
                slot.window,
                keys=tuple(key[:, place] for key in self.keys),
                values=tuple(value[:, place] for value in self.values),
            )
        device = self.keys[0].device
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


def stacked(stacks: Iterable[Stack], slots: Iterable[Slot]) -> list[Stack]:
    """Stack windows anew after rows have come or gone.

    A stack whose windows still have the same readers stays as it is; what others read in part is
    split. What nobody reads is let go. Where windows stand side by side already, nothing is copied;
    their memory is then free when the last window goes that was encoded with them.

    Args:
        stacks: those of before.
        slots: all that is read now.
    """
    wanted = {id(slot): slot for slot in slots if slot.readers}
    made: list[Stack] = []
    for stack in stacks:
        if all(id(slot) in wanted for slot in stack.slots) and len(_classes(stack.slots)) == 1:
            made.append(stack)
            for slot in stack.slots:
                del wanted[id(slot)]
    made += [Stack(group) for group in _classes(wanted.values())]
    return made


def _classes(slots: Iterable[Slot]) -> list[list[Slot]]:
    """Slots with the same readers together; a prefix is alone."""
    classes: dict[tuple[int, frozenset[Row]], list[Slot]] = {}
    for slot in slots:
        mark = id(slot) if slot.prefix else 0
        classes.setdefault((mark, frozenset(slot.readers)), []).append(slot)
    return list(classes.values())
