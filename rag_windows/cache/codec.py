"""What the cache keeps for one window, and in which form: as computed, or in 8 bits a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from rag_windows.errors import CacheError, InputError, NonFiniteError
from rag_windows.kv import Window


@dataclass(frozen=True, slots=True)
class Entry:
    """One encoded window with what the tiers need to know about it.

    Its tensors are never written to after it was made: several requests read them at once.

    Attributes:
        window: the keys and values; on any device. One that was on disk has 0 for every token id,
            as files do not hold them.
        cost_s: seconds that encoding it took, its share of the batch that it was encoded in.
        labels: digests of the document and passage ids that it belongs to, for `invalidate`.
        created: unix time, in seconds, at which it was encoded.
        expires: unix time from which it may no longer be used; None if never.
    """

    window: Window
    cost_s: float
    labels: tuple[str, ...]
    created: float
    expires: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all its keys and values."""
        return sum(t.nbytes for t in self.window.keys) + sum(t.nbytes for t in self.window.values)

    def expired(self, now: float) -> bool:
        """Whether it may no longer be used at unix time `now`."""
        return self.expires is not None and now >= self.expires


@dataclass(frozen=True, slots=True)
class Stored:
    """A window's tensors as a tier keeps them.

    Attributes:
        tensors: in an order that only the codec knows; any shapes and dtypes, contiguous or not.
        description: what decoding needs beside them; only JSON values.
    """

    tensors: tuple[torch.Tensor, ...]
    description: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


class Codec(Protocol):
    """Turns windows into what is stored, and back.

    Attributes:
        name: what users and files call it.
        exact: whether decoding gives back the very bits.
    """

    name: ClassVar[str]
    exact: ClassVar[bool]

    def encode(self, window: Window) -> Stored:
        """Give the stored form; its tensors may be the window's own.

        Raises:
            NonFiniteError: if a key or value is NaN or infinite.
            CacheError: if the window can't be stored in this form.
        """

    def decode(self, stored: Stored, ids: tuple[int, ...], start: int) -> Window:
        """Give the window, in its first dtype; its tensors may be the stored ones.

        Raises:
            CacheError: if tensors and description don't belong together or to so many tokens.
        """


class AsComputed:
    """The tensors as they are: all keys, layer by layer, then all values. Copies nothing."""

    name: ClassVar[str] = "as computed"
    exact: ClassVar[bool] = True

    def encode(self, window: Window) -> Stored:
        """See `Codec`."""
        require_finite(window)
        return Stored((*window.keys, *window.values), {"layers": len(window.keys)})

    def decode(self, stored: Stored, ids: tuple[int, ...], start: int) -> Window:
        """See `Codec`."""
        return _window_of(stored.tensors, stored.description, ids, start)


class Int8:
    """x is kept as round(x / peak * 127) in 8 bits, where peak = max |x| over the tokens.

    There is one peak a channel: a dimension of one key/value head of one layer. Keys have channels
    much larger than others, whatever the token, so a scale per channel loses far less than one per
    token would (KIVI, https://arxiv.org/abs/2402.02750).

    Layers of one shape and dtype are stored as one tensor (n, heads, tokens, width), beside their
    peaks (n, heads, 1, width) in float32, so that decoding a window takes a few operations however
    many layers there are. A channel's peak comes back as it was, so what was decoded once can be
    encoded and decoded again, on its way between tiers, without changing any more.
    """

    name: ClassVar[str] = "int8"
    exact: ClassVar[bool] = False

    def encode(self, window: Window) -> Stored:
        """See `Codec`."""
        require_finite(window)
        tensors = (*window.keys, *window.values)
        groups: dict[tuple[torch.dtype, torch.Size, torch.device], list[int]] = {}
        for index, tensor in enumerate(tensors):
            if _name(tensor.dtype) not in _DTYPES:
                raise CacheError(f"keys and values in {tensor.dtype} can't be kept as {self.name}.")
            groups.setdefault((tensor.dtype, tensor.shape, tensor.device), []).append(index)
        stored: list[torch.Tensor] = []
        for indices in groups.values():
            wide = torch.stack([tensors[index] for index in indices]).to(torch.float32)
            # A channel of zeros, or of numbers too small to divide by, becomes zeros.
            tiny = torch.finfo(torch.float32).tiny
            peak = wide.abs().amax(dim=2, keepdim=True).clamp_(min=tiny)
            stored += [(wide / peak).mul_(_LARGEST).round_().to(torch.int8), peak]
        described = {
            "layers": len(window.keys),
            "groups": list(groups.values()),
            "dtypes": [_name(dtype) for dtype, _, _ in groups],
        }
        return Stored(tuple(stored), described)

    def decode(self, stored: Stored, ids: tuple[int, ...], start: int) -> Window:
        """See `Codec`."""
        groups, dtypes = _described(stored.description)
        if len(stored.tensors) != 2 * len(groups):
            raise CacheError(f"stored are {len(stored.tensors)} tensors for {len(groups)} groups.")
        count = sum(len(indices) for indices in groups)
        if sorted(index for indices in groups for index in indices) != list(range(count)):
            raise CacheError("the stored groups name a layer twice or not at all.")
        tensors: dict[int, torch.Tensor] = {}
        for number, (indices, dtype) in enumerate(zip(groups, dtypes, strict=True)):
            small, peak = stored.tensors[2 * number : 2 * number + 2]
            expected = (len(indices), *small.shape[1:2], 1, *small.shape[3:4])
            if small.ndim != 4 or small.dtype != torch.int8 or small.shape[0] != len(indices):
                raise CacheError(f"stored is a {small.dtype} tensor of shape {tuple(small.shape)}.")
            if tuple(peak.shape) != expected or peak.dtype != torch.float32:
                raise CacheError(f"peaks of shape {expected} belong to it, not {peak.shape}.")
            whole = small.to(torch.float32).div_(_LARGEST).mul_(peak).to(dtype)
            tensors.update(zip(indices, whole.unbind(), strict=True))
        ordered = [tensors[index] for index in range(count)]
        return _window_of(ordered, stored.description, ids, start)


_LARGEST = 127.0
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_CODECS: dict[str, Codec] = {"as computed": AsComputed(), "int8": Int8()}
STORES = tuple(_CODECS)
"""Names of the stored forms."""


def codec_named(name: str) -> Codec:
    """Return the codec of a stored form.

    Raises:
        InputError: if there is none of that name.
    """
    if name not in _CODECS:
        raise InputError(f"store={name!r} is unknown; choose one of {list(STORES)}.")
    return _CODECS[name]


def settle(codec: Codec, window: Window) -> Window:
    """Return the window as a later hit will give it, so that cold and warm answers are the same."""
    if codec.exact:
        return window
    return codec.decode(codec.encode(window), window.ids, window.start)


def is_finite(window: Window) -> bool:
    """Whether no key or value is NaN or infinite: one pass over them, one wait per device."""
    verdicts: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in (*window.keys, *window.values):
        # A sum is NaN or infinite if anything in it is, and needs no mask of the tensor's size. It
        # may overflow by itself where all is well, so only a bad one is looked at closely.
        verdicts.setdefault(tensor.device, []).append(tensor.sum(dtype=torch.float32))
    if all(bool(torch.stack(sums).isfinite().all()) for sums in verdicts.values()):
        return True
    return all(bool(t.isfinite().all()) for t in (*window.keys, *window.values))


def require_finite(window: Window) -> None:
    """Refuse NaN and infinity.

    Raises:
        NonFiniteError: naming the layer.
    """
    if is_finite(window):
        return
    for part, tensors in (("keys", window.keys), ("values", window.values)):
        for layer, tensor in enumerate(tensors):
            if not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(
                    f"the {part} of layer {layer} hold NaN or infinity, so the window is not kept. "
                    "Load the model in bfloat16 or float32, or look for damaged weights."
                )


def _window_of(
    tensors: Sequence[torch.Tensor],
    description: Mapping[str, Any],
    ids: tuple[int, ...],
    start: int,
) -> Window:
    """Put a window together from its keys, layer by layer, and its values."""
    layers = description.get("layers")
    if not isinstance(layers, int) or isinstance(layers, bool) or len(tensors) != 2 * layers:
        raise CacheError(f"stored are {len(tensors)} tensors, but {layers!r} layers are described.")
    for tensor in tensors:
        if tensor.ndim != 3 or tensor.shape[1] != len(ids) or not tensor.is_floating_point():
            raise CacheError(
                f"stored is a {tensor.dtype} tensor of shape {tuple(tensor.shape)}; "
                f"(heads, {len(ids)} tokens, width) of a float dtype were expected."
            )
    return Window(ids, start, keys=tuple(tensors[:layers]), values=tuple(tensors[layers:]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _described(
    description: Mapping[str, Any],
) -> tuple[Sequence[Sequence[int]], list[torch.dtype]]:
    groups, dtypes = description.get("groups"), description.get("dtypes")
    if not isinstance(groups, list) or not isinstance(dtypes, list) or len(groups) != len(dtypes):
        raise CacheError("the stored tensors have no description of groups and dtypes.")
    for indices in groups:
        if not isinstance(indices, list) or not all(type(index) is int for index in indices):
            raise CacheError("the stored groups are no lists of numbers.")
    if not all(isinstance(name, str) and name in _DTYPES for name in dtypes):
        raise CacheError(f"the stored dtypes {dtypes} are not among {', '.join(_DTYPES)}.")
    return groups, [_DTYPES[name] for name in dtypes]
