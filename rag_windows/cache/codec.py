"""In which form a tier keeps the tensors of a window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rag_windows.errors import CacheError, InputError, NonFiniteError
from rag_windows.kv import Window


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
    """Turns windows into what is stored, and back."""

    @property
    def name(self) -> str:
        """What users and files call it."""

    @property
    def exact(self) -> bool:
        """Whether decoding gives back the very bits."""

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


@dataclass(frozen=True, slots=True)
class AsComputed:
    """The tensors as they are: all keys, layer by layer, then all values. Copies nothing."""

    name: str = "as computed"
    exact: bool = True

    def encode(self, window: Window) -> Stored:
        """See `Codec`."""
        require_finite(window)
        return Stored((*window.keys, *window.values), {"layers": len(window.keys)})

    def decode(self, stored: Stored, ids: tuple[int, ...], start: int) -> Window:
        """See `Codec`."""
        return window_of(stored.tensors, stored.description, ids, start)


def codec_named(name: str) -> Codec:
    """Return the codec "as computed", "fp8" or "int8".

    Raises:
        InputError: if there is none of that name.
    """
    from rag_windows.cache.quantized import FP8, INT8  # builds on this module

    makers: dict[str, Callable[[], Codec]] = {
        "as computed": AsComputed,
        "fp8": lambda: FP8,
        "int8": lambda: INT8,
    }
    if name not in makers:
        raise InputError(f"no stored form is called {name!r}; use one of {', '.join(makers)}.")
    return makers[name]()


def settle(codec: Codec, window: Window) -> Window:
    """Return the window as a later hit will give it, so that cold and warm answers are the same."""
    if codec.exact:
        return window
    return codec.decode(codec.encode(window), window.ids, window.start)


def require_finite(window: Window) -> None:
    """Refuse NaN and infinity, in one pass over the bytes.

    Raises:
        NonFiniteError: naming the layer.
    """
    parts = [("keys", window.keys), ("values", window.values)]
    extremes = [
        torch.stack(torch.aminmax(tensor.detach()))
        for _, tensors in parts
        for tensor in tensors
        if tensor.numel()
    ]
    # One wait for the device instead of one per tensor.
    if not extremes or all(bool(torch.isfinite(group).all()) for group in _by_device(extremes)):
        return
    for part, tensors in parts:
        for layer, tensor in enumerate(tensors):
            if not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(
                    f"the {part} of layer {layer} hold NaN or infinity, so the window is not kept. "
                    "Load the model in bfloat16 or float32, or look for damaged weights."
                )


def _by_device(extremes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for pair in extremes:
        groups.setdefault(pair.device, []).append(pair.float())
    return [torch.stack(group) for group in groups.values()]


def window_of(
    tensors: Sequence[torch.Tensor],
    description: Mapping[str, Any],
    ids: tuple[int, ...],
    start: int,
) -> Window:
    """Put a window together from its keys, layer by layer, and its values.

    Raises:
        CacheError: if the tensors aren't those of so many layers and tokens.
    """
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
