"""Containers of keys and values: a window, all that a query reads, the members of an ensemble."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import overload

import torch

LARGEST = 127.0
"""What the largest number of a channel is stored as, in 8 bits."""


def pack(tensor: torch.Tensor, axis: int = -2) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers in fp32 as int8, and their peaks along an axis: of keys, each channel's."""
    # A channel of zeros, or of numbers too small to divide by, becomes zeros.
    tiny = torch.finfo(torch.float32).tiny
    peaks = tensor.abs().amax(dim=axis, keepdim=True).clamp_(min=tiny)
    return (tensor / peaks).mul_(LARGEST).round_().to(torch.int8), peaks


def unpacked(numbers: torch.Tensor, peaks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of 8 bits as they are read: each is a 127th of its channel's peak."""
    exact = torch.promote_types(dtype, torch.float32)
    return numbers.to(exact).div_(LARGEST).mul_(peaks).to(dtype)


@dataclass(frozen=True, slots=True)
class PackedTensors:
    """Keys and values in 8 bits a number, those of one shape and dtype side by side.

    Attributes:
        groups: int8 numbers (n, kv heads, tokens, dim), their peaks (n, kv heads, 1, dim) in fp32,
            and the dtype that they are read in.
        places: of each tensor, keys before values, its group and its place in that.
    """

    groups: tuple[tuple[torch.Tensor, torch.Tensor, torch.dtype], ...]
    places: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of numbers and peaks."""
        return sum(numbers.nbytes + peaks.nbytes for numbers, peaks, _ in self.groups)

    def numbers(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers (kv heads, tokens, dim) and peaks (kv heads, 1, dim) of a tensor, views."""
        group, place = self.places[index]
        numbers, peaks, _ = self.groups[group]
        return numbers[place], peaks[place]

    def tensor(self, index: int) -> torch.Tensor:
        """A tensor as it is read."""
        return unpacked(*self.numbers(index), self.groups[self.places[index][0]][2])


@dataclass(frozen=True, slots=True)
class PackedLayers(Sequence[torch.Tensor]):
    """Keys or values by layer, each unpacked anew whenever it is asked for.

    Attributes:
        packed: where they are, and the others.
        first: the place of the first layer among the tensors there.
        layers: how many these are.
    """

    packed: PackedTensors
    first: int
    layers: int

    def __len__(self) -> int:
        return self.layers

    @overload
    def __getitem__(self, layer: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, layer: slice) -> tuple[torch.Tensor, ...]: ...

    def __getitem__(self, layer: int | slice) -> torch.Tensor | tuple[torch.Tensor, ...]:
        places = range(self.first, self.first + self.layers)[layer]
        if isinstance(places, range):
            return tuple(map(self.packed.tensor, places))
        return self.packed.tensor(places)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Window:
    """One encoded window.

    It depends only on the model, the prefix, the window's own tokens and position, those that it
    saw in front of itself, and how the method encodes windows, so it can be reused in any order and
    for any question.

    Where rows go on from the model's own cache (`ModelCache`), it is a part of that cache: not
    every layer has keys and values, which are then what the layer's cache holds of a token, and
    some have states of all tokens so far.

    Attributes:
        ids: its tokens.
        start: position of its first token: the prefix's length, or further where windows are not
            aligned on the left.
        keys: per layer, (kv heads, tokens, head dim), in the model's dtype, rotated; `PackedLayers`
            where they are held in 8 bits a number.
        values: per layer, (kv heads, tokens, value dim), as the keys.
        states: of layers, in any shape, behind the window's last token.
        layers: of a part of the model's own cache, which layer each of `tensors` is of; else empty.
    """

    ids: tuple[int, ...]
    start: int
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    states: tuple[torch.Tensor, ...] = ()
    layers: tuple[int, ...] = ()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Keys, values and states."""
        return *self.keys, *self.values, *self.states

    @property
    def packed(self) -> PackedTensors | None:
        """Keys and values in 8 bits a number, on the CPU; None where they are held as computed."""
        return self.keys.packed if isinstance(self.keys, PackedLayers) else None

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds."""
        packed = self.packed
        held = sum(tensor.nbytes for tensor in (self.tensors if packed is None else self.states))
        return held + (0 if packed is None else packed.nbytes)

    def holding(self, tensors: Sequence[torch.Tensor]) -> Window:
        """The same with other tensors in place of these, such as copies of them."""
        keys, values, states = len(self.keys), 2 * len(self.keys), len(tensors)
        return replace(
            self,
            keys=tuple(tensors[:keys]),
            values=tuple(tensors[keys:values]),
            states=tuple(tensors[values:states]),
        )

    def placed_on(self, devices: Sequence[torch.device]) -> list[torch.device]:
        """Where each of `tensors` belongs, by the device of each of the model's layers."""
        if not self.layers:
            return [*devices, *devices]
        return [devices[layer] for layer in self.layers]

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.start + len(self.ids)

    @property
    def whole(self) -> list[tuple[Window, slice]]:
        """All of it as the only one of a list of stretches, see `Windows.stretches`."""
        return [(self, slice(0, len(self.ids)))]

    def stretch(self, first: int, last: int) -> Window:
        """Some of its tokens, as views; itself if they are all."""
        if (first, last) == (0, len(self.ids)):
            return self
        keys = tuple(one[:, first:last] for one in self.keys)
        values = tuple(one[:, first:last] for one in self.values)
        return Window(self.ids[first:last], self.start + first, keys, values)


@dataclass(frozen=True, slots=True)
class Windows:
    """All windows that a query reads together, each where it stands in memory.

    Attributes:
        windows: at least one, in order.
        spans: lengths of stretches whose attention is measured separately; they add up to those of
            the windows, and none reaches over a window's end.
        span_groups: (spans, groups) fp32, on the CPU: for which citation groups the attention on a
            span counts, and how much for each.
    """

    windows: tuple[Window, ...]
    spans: tuple[int, ...]
    span_groups: torch.Tensor

    @property
    def count(self) -> int:
        """How many windows these are."""
        return len(self.windows)

    @property
    def n_groups(self) -> int:
        """Number of citation groups."""
        return self.span_groups.shape[1]

    @classmethod
    def of(
        cls,
        windows: Sequence[Window],
        groups: Sequence[int],
        n_groups: int,
        spans: Sequence[int] | None = None,
    ) -> Windows:
        """Windows of which each span counts for one citation group.

        Args:
            windows: at least one.
            groups: the citation group of each span.
            n_groups: number of groups; a group without a span gets no attention.
            spans: see `spans`; by default the windows' own lengths.
        """
        span_groups = torch.zeros(len(groups), n_groups, dtype=torch.float32)
        span_groups[torch.arange(len(groups)), torch.tensor(list(groups), dtype=torch.int64)] = 1.0
        lengths = tuple(len(w.ids) for w in windows) if spans is None else tuple(spans)
        return cls(tuple(windows), lengths, span_groups)

    def stretches(self) -> Iterator[tuple[Window, slice]]:
        """Each span's window, and where in it the span is."""
        lengths = iter(self.spans)
        for window in self.windows:
            first = 0
            while first < len(window.ids):
                last = first + next(lengths)
                yield window, slice(first, last)
                first = last


class WindowBuffer:
    """Windows of given lengths side by side in memory, each head's tokens in a row.

    They are read fastest so. Each forward pass is copied in as it ends, and its own tensors are
    freed: memory never holds all keys and values twice.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._ends = tuple(accumulate(lengths))
        self._starts = (0, *self._ends[:-1])
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def put(self, index: int, window: Window) -> Window:
        """Copy a window in; returns the same window, as views of the buffer."""
        place = slice(self._starts[index], self._ends[index])
        keys = self._copied(self._keys, place, window.keys)
        values = self._copied(self._values, place, window.values)
        return Window(window.ids, window.start, keys, values)

    def _copied(
        self, buffer: list[torch.Tensor], place: slice, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        if not buffer:
            buffer += [one.new_empty(one.shape[0], self._ends[-1], one.shape[2]) for one in tensors]
        return tuple(whole[:, place].copy_(one) for whole, one in zip(buffer, tensors, strict=True))


@dataclass(frozen=True, slots=True)
class Members:
    """Windows of an ensemble, which answer each for itself, each beside a batch row of its own.

    Attributes:
        windows: in order; with a prior, one batch row more reads no window.
        prior: whether there is that further row.
        fixed: (count,) fp32 weights that no step changes, or None.
        groups: (count,) int64, the citation group of each window.
        n_groups: number of citation groups.
    """

    windows: tuple[Window, ...]
    prior: bool
    fixed: torch.Tensor | None
    groups: torch.Tensor
    n_groups: int

    @property
    def count(self) -> int:
        """How many windows these are."""
        return len(self.windows)

    @property
    def per_query(self) -> int:
        """Batch rows that one query takes."""
        return self.count + self.prior
