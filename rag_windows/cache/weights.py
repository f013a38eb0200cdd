"""Which tensors a model computes with, what they hold, and whether that changed."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.utils.weak import WeakIdKeyDictionary

from rag_windows.cache.keys import fields
from rag_windows.threads import Lock

State = tuple[int, int, int]
"""Of a tensor: the object, where its memory is, and PyTorch's count of in-place changes."""

STRETCH = 256 << 10
"""Bytes that are summed together."""

_SAMPLES = 16
"""Bytes of a tensor that every check reads."""

_CHUNK = 64 << 20
_DEEPEST = 3
_HASHERS = 8


@dataclass(frozen=True, slots=True)
class Digest:
    """What one tensor held when it was read whole.

    Attributes:
        state: of the tensor then.
        sums: checksum of each `STRETCH` of its bytes; order counts.
        sample: some of its bytes, see `samples`.
        sha256: of its bytes.
    """

    state: State
    sums: tuple[int, ...]
    sample: bytes
    sha256: bytes


_lock = Lock()
_digests: WeakIdKeyDictionary = WeakIdKeyDictionary()


def version_of(tensor: torch.Tensor) -> int:
    """PyTorch's count of in-place changes; -1 for a tensor of inference mode, which has none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def state_of(tensor: torch.Tensor) -> State:
    """See `State`."""
    return id(tensor), tensor.data_ptr(), version_of(tensor)


def plain_tensors(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The ordinary tensors that a value is made of.

    Quantized weights are tensor subclasses with parts (`__tensor_flatten__`), or carry their
    scales in attributes (bitsandbytes' ``quant_state``); both count.
    """
    if isinstance(value, torch.Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        inner = () if flatten is None else flatten()[0]
        for part in inner:
            yield from plain_tensors(f"{name}.{part}", getattr(value, part), depth + 1)
        if not inner:
            yield name, value
    if depth >= _DEEPEST or isinstance(value, torch.nn.Module):
        return
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        for key in sorted(attributes, key=str):
            part = attributes[key]
            if isinstance(part, torch.Tensor) or (key == "quant_state" and part is not None):
                yield from plain_tensors(f"{name}.{key}", part, depth + 1)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes in row-major order, uint8 (bytes,); no copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def stretches(tensor: torch.Tensor) -> list[Callable[[], int]]:
    """What sums each `STRETCH` of a tensor's bytes, as they are when it is called."""

    def elsewhere(start: int) -> int:
        stretch = flat(tensor)[start : start + STRETCH]
        return xxhash.xxh3_64_intdigest(stretch.cpu().numpy().data)

    starts = range(0, tensor.nbytes, STRETCH)
    if not _is_in_reach(tensor):
        return [functools.partial(elsewhere, start) for start in starts]
    numbers = flat(tensor).numpy()
    return [
        functools.partial(xxhash.xxh3_64_intdigest, numbers[start : start + STRETCH].data)
        for start in starts
    ]


def samples(tensors: Sequence[torch.Tensor]) -> list[Callable[[], bytes]]:
    """What reads about `_SAMPLES` bytes, spread evenly, of each tensor that stands in one piece."""
    read: list[Callable[[], bytes]] = []
    elsewhere: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.is_contiguous() and tensor.device.type != "meta":
            numbers = flat(tensor)
            # An odd step meets all bytes of a number in turn.
            some = numbers[:: max(1, numbers.numel() // _SAMPLES) | 1]
            if _is_in_reach(tensor):
                read.append(some.numpy().tobytes)
            else:
                elsewhere.setdefault(tensor.device, []).append(some)
    read.extend(functools.partial(_together, some) for some in elsewhere.values())
    return read


def _together(some: list[torch.Tensor]) -> bytes:
    return torch.cat(some).cpu().numpy().tobytes()


def _is_in_reach(tensor: torch.Tensor) -> bool:
    """Whether its bytes can be read where they stand."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def digests(tensors: Sequence[torch.Tensor], *, trusted: bool = False) -> list[Digest]:
    """Read tensors whole; one that was read before and is unchanged is only summed again.

    Args:
        tensors: of any device and layout.
        trusted: of those that were read before and are unchanged by PyTorch's count, look only at
            its `samples`.
    """
    read = functools.partial(_digest, trusted=trusted)
    workers = min(_HASHERS, os.cpu_count() or 1, max(1, len(tensors)))
    if sum(tensor.nbytes for tensor in tensors) < _CHUNK:
        return [read(tensor) for tensor in tensors]
    with ThreadPoolExecutor(workers, thread_name_prefix="rag-windows-hash") as pool:
        return list(pool.map(read, tensors))


def _digest(tensor: torch.Tensor, *, trusted: bool) -> Digest:
    state = state_of(tensor)
    with _lock:
        known: Digest | None = _digests.get(tensor)
    if known is not None and known.state != state:
        known = None
    with torch.no_grad():
        some = b"".join(read() for read in samples([tensor]))
        if known is not None and trusted and known.sample == some:
            return known
        sums = tuple(read() for read in stretches(tensor))
        if known is not None and known.sums == sums:
            return known
        made = Digest(state, sums, some, _sha256(tensor))
    with _lock:
        _digests[tensor] = made
    return made


def _sha256(tensor: torch.Tensor) -> bytes:
    """Of the dtype, the shape, and the bytes in row-major order."""
    described = fields(str(tensor.dtype).encode(), str(tuple(tensor.shape)).encode())
    digest = hashlib.sha256(described)
    numbers = flat(tensor)
    for start in range(0, numbers.numel(), _CHUNK):
        digest.update(numbers[start : start + _CHUNK].cpu().numpy().data)
    return digest.digest()
