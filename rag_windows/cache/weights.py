"""Which tensors a model computes with, what they hold, and whether that changed."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from rag_windows.cache.keys import fields

State = tuple[int, int, int]
"""Of a tensor: the object, where its memory is, and PyTorch's count of in-place changes."""

_ROW = 512
"""64-bit words in one partial sum of a checksum."""

_SAMPLES = 1024
"""64-bit words of a large tensor that every check reads."""

_CHUNK = 64 << 20
_DEEPEST = 3
_HASHERS = 8


@dataclass(frozen=True, slots=True)
class Digest:
    """What one tensor held when it was read whole.

    Attributes:
        state: of the tensor then.
        sums: checksum of its bytes: sums of consecutive stretches, int64.
        sample: sum over words spread evenly over it.
        sha256: of its bytes.
    """

    state: State
    sums: torch.Tensor
    sample: torch.Tensor
    sha256: bytes


_lock = threading.Lock()
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


def words(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor's bytes as int64 words and the bytes that are left over; no copy if contiguous."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    aligned = flat[:whole]
    if aligned.storage_offset() % 8:
        aligned = aligned.clone()
    return aligned.view(torch.int64), flat[whole:]


def checksum(numbers: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Sums of stretches of `_ROW` words, one of what is left, and one of the left-over bytes."""
    rows = numbers.numel() // _ROW
    return torch.cat(
        [
            numbers[: rows * _ROW].view(rows, _ROW).sum(dim=1),
            numbers[rows * _ROW :].sum().view(1),
            rest.sum(dtype=torch.int64).view(1),
        ]
    )


def sample(numbers: torch.Tensor) -> torch.Tensor:
    """Sum over at most about `_SAMPLES` words spread evenly."""
    step = max(1, numbers.numel() // _SAMPLES)
    return numbers[::step].sum().view(1)


def digests(tensors: Sequence[torch.Tensor]) -> list[Digest]:
    """Read tensors whole; one that was read before and is unchanged is only summed again."""
    workers = min(_HASHERS, os.cpu_count() or 1, max(1, len(tensors)))
    if sum(tensor.nbytes for tensor in tensors) < _CHUNK:
        return [_digest(tensor) for tensor in tensors]
    with ThreadPoolExecutor(workers, thread_name_prefix="rag-windows-hash") as pool:
        return list(pool.map(_digest, tensors))


def same(tensor: torch.Tensor, known: Digest, *, whole: bool) -> torch.Tensor:
    """Whether a tensor still holds what it held: a boolean on its device, shape (1,)."""
    numbers, rest = words(tensor)
    if not whole:
        return sample(numbers) == known.sample
    sums = checksum(numbers, rest)
    return (sums == known.sums).all().view(1)


def _digest(tensor: torch.Tensor) -> Digest:
    state = state_of(tensor)
    with torch.no_grad():
        numbers, rest = words(tensor)
        sums = checksum(numbers, rest)
        with _lock:
            known: Digest | None = _digests.get(tensor)
        if known is not None and known.state == state and torch.equal(known.sums, sums):
            return known
        made = Digest(state, sums, sample(numbers), _sha256(tensor))
    with _lock:
        _digests[tensor] = made
    return made


def _sha256(tensor: torch.Tensor) -> bytes:
    """Of the dtype, the shape, and the bytes in row-major order."""
    described = fields(str(tensor.dtype).encode(), str(tuple(tensor.shape)).encode())
    digest = hashlib.sha256(described)
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _CHUNK):
        digest.update(flat[start : start + _CHUNK].cpu().numpy().data)
    return digest.digest()
