"""What the cache stores for one window, and its forms: as computed, or 8 bits a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rag_windows.errors import CacheError, InputError
from rag_windows.kv import PackedLayers, PackedTensors, Window, pack, unpacked

EXACT, INT8 = STORES = ("as computed", "int8")
"""Names of the stored forms."""

_SHORTEST_ROW = 16  # of a state, in numbers: the scale of a shorter one would take too much


@dataclass(frozen=True, slots=True)
class Entry:
    """One encoded window with what the tiers need to know about it; never written to.

    An entry from disk has 0 for every token id. `cost_s` is its share of the batch that it was
    encoded in, `created` and `expires` are unix times; the catalog may know `more_labels`. What is
    `exact` is stored as computed in every store: a prefix, which all windows and answers read.
    """

    window: Window
    cost_s: float
    labels: tuple[str, ...]
    created: float
    expires: float | None = None
    more_labels: bool = False
    exact: bool = False

    def form(self, store: str) -> str:
        """How a store of this form holds it."""
        return EXACT if self.exact else store

    @property
    def nbytes(self) -> int:
        """Bytes of all its keys and values."""
        return self.window.nbytes

    def expired(self, now: float) -> bool:
        """Whether it may no longer be used at unix time `now`; always if its time is NaN."""
        return self.expires is not None and not now < self.expires


@dataclass(frozen=True, slots=True)
class Stored:
    """A window's tensors as a tier stores them, and what else decoding needs, as JSON."""

    tensors: tuple[torch.Tensor, ...]
    description: Mapping[str, Any]


def check_store(store: str) -> str:
    """Return the name of a stored form."""
    if store not in STORES:
        raise InputError(f"store must be one of {list(STORES)}, not {store!r}.")
    return store


def encode(store: str, window: Window) -> Stored:
    """The stored form of a window without NaN and infinity; its tensors may be the window's own."""
    layers = len(window.keys)
    if store == INT8 and window.packed is not None:
        return _of_packed(window.packed, layers)
    # What is of the model's own cache says of which layer it is.
    more = {"of": window.layers} if window.layers else {}
    if store == EXACT:
        return Stored(window.tensors, {"layers": layers, **more})
    small, described = _as_int8(window.tensors, 2 * layers)
    return Stored(small, {"layers": layers, **described, **more})


def decode(store: str, stored: Stored, ids: tuple[int, ...], start: int) -> Window:
    """A window in its first dtype; its tensors may be the stored ones.

    On a CPU, keys and values of 8 bits stay packed until they are read.
    """
    layers: Any = stored.description.get("layers")
    if store == INT8 and (packed := _packed(stored, layers, len(ids))) is not None:
        keys_of, values_of = PackedLayers(packed, 0, layers), PackedLayers(packed, layers, layers)
        return Window(ids, start, keys_of, values_of)
    try:
        tensors = stored.tensors if store == EXACT else _from_int8(stored)
        of = tuple(map(int, stored.description.get("of", ())))
        fits = type(layers) is int and len(tensors) == (len(of) or 2 * layers)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise CacheError(f"The stored tensors can't be decoded: {error}") from error
    for index, tensor in enumerate(tensors):
        state = fits and index >= 2 * layers
        fits = fits and (state or (tensor.ndim == 3 and tensor.shape[1] == len(ids)))
        fits = fits and tensor.is_floating_point()
    if not fits:
        shapes = sorted({(str(tensor.dtype), *tensor.shape) for tensor in tensors})
        raise CacheError(
            f"The stored tensors {shapes} do not match {layers!r} layers of {len(ids)} tokens."
        )
    keys, values, states = tensors[:layers], tensors[layers : 2 * layers], tensors[2 * layers :]
    return Window(ids, start, tuple(keys), tuple(values), tuple(states), of)


def settle(store: str, window: Window) -> Window:
    """The window as a later hit will give it, so that cold and warm answers are the same."""
    return decode(store, encode(store, window), window.ids, window.start)


def _as_int8(
    tensors: Sequence[torch.Tensor], of_tokens: int
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """X is stored as round(x / peak * 127) in 8 bits, where peak = max |x| over a channel's tokens.

    Keys have channels much larger than others, whatever the token, so a scale per channel loses
    less than one per token would (KIVI, https://arxiv.org/abs/2402.02750). Layers of one shape and
    dtype are one tensor (n, heads, tokens, width), beside their peaks (n, heads, 1, width) in
    float32. A peak comes back as it was, so decoding and encoding again changes nothing any more.

    Behind the first ``of_tokens`` tensors stand states, which have no tokens: their peaks are those
    of each row, and where a row is short, they are stored as they are.
    """
    groups: dict[tuple[torch.dtype, torch.Size, torch.device, int], list[int]] = {}
    left = []
    for index, tensor in enumerate(tensors):
        if not tensor.is_floating_point():
            raise CacheError(
                f"Keys and values in {tensor.dtype} can't be stored as {INT8}. Use store='as "
                "computed', or load the model in bfloat16, float16 or float32."
            )
        axis = 2 if index < of_tokens else tensor.ndim
        if index >= of_tokens and (tensor.ndim < 2 or tensor.shape[-1] < _SHORTEST_ROW):
            left.append(index)
            continue
        kind = tensor.dtype, tensor.shape, tensor.device, axis
        groups.setdefault(kind, []).append(index)
    stored: list[torch.Tensor] = []
    for (*_, axis), indices in groups.items():
        wide = torch.stack([tensors[index] for index in indices]).to(torch.float32)
        stored += pack(wide, axis)
    described = {
        "groups": list(groups.values()),
        "dtypes": [str(dtype).removeprefix("torch.") for dtype, *_ in groups],
        **({"left": left} if left else {}),
    }
    return (*stored, *(tensors[index] for index in left)), described


def _from_int8(stored: Stored) -> tuple[torch.Tensor, ...]:
    groups, dtypes = stored.description["groups"], stored.description["dtypes"]
    left = stored.description.get("left", ())
    packed = stored.tensors[: 2 * len(groups)]
    tensors = dict(zip(left, stored.tensors[2 * len(groups) :], strict=True))
    pairs = zip(packed[::2], packed[1::2], strict=True)
    for indices, name, (small, peak) in zip(groups, dtypes, pairs, strict=True):
        whole = unpacked(small, peak, getattr(torch, name))
        tensors.update(zip(indices, whole.unbind(), strict=True))
    return tuple(tensors[index] for index in range(len(tensors)))


def _of_packed(packed: PackedTensors, layers: int) -> Stored:
    """The stored form of what is packed already, as `_as_int8` makes it."""
    groups: list[list[int]] = [[] for _ in packed.groups]
    for index, (group, _) in enumerate(packed.places):
        groups[group].append(index)
    dtypes = [str(dtype).removeprefix("torch.") for *_, dtype in packed.groups]
    tensors = tuple(tensor for *both, _ in packed.groups for tensor in both)
    return Stored(tensors, {"layers": layers, "groups": groups, "dtypes": dtypes})


def _packed(stored: Stored, layers: Any, tokens: int) -> PackedTensors | None:
    """Keys and values that can be read as they are stored; None for what is to be unpacked.

    That is what is no entry of keys and values alone, lies on an accelerator, or can't be right.
    """
    about, tensors = stored.description, stored.tensors
    if type(layers) is not int or "of" in about or about.get("left"):
        return None
    try:
        groups, dtypes = about["groups"], [getattr(torch, name) for name in about["dtypes"]]
        pairs = [*zip(tensors[::2], tensors[1::2], dtypes, strict=True)]
        places = {
            index: (group, place)
            for group, indices in enumerate(groups)
            for place, index in enumerate(indices)
        }
        sizes = [len(indices) for indices in groups]
    except (TypeError, ValueError, KeyError, AttributeError):
        return None
    for (numbers, peaks, dtype), size in zip(pairs, sizes, strict=False):
        fits = numbers.ndim == peaks.ndim == 4 and numbers.shape[0] == size
        fits = fits and numbers.shape[2] == tokens and numbers.dtype == torch.int8
        fits = fits and peaks.shape == (*numbers.shape[:2], 1, numbers.shape[3])
        fits = fits and peaks.dtype == torch.float32 and numbers.device.type == "cpu"
        if not (fits and isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            return None
    if len(sizes) != len(pairs) or sum(sizes) != 2 * layers or {*places} != {*range(2 * layers)}:
        return None
    return PackedTensors(tuple(pairs), tuple(places[index] for index in range(2 * layers)))


def is_finite(window: Window) -> bool:
    """Whether no key or value is NaN or infinite: one pass over them, one wait per device."""
    verdicts: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in window.tensors:
        # A sum is NaN or infinite if anything in it is, and needs no mask of the tensor's size. It
        # may overflow where all are finite, so each number is checked only then.
        verdicts.setdefault(tensor.device, []).append(tensor.sum(dtype=torch.float32))
    if all(bool(torch.stack(sums).isfinite().all()) for sums in verdicts.values()):
        return True
    return all(bool(t.isfinite().all()) for t in window.tensors)
