"""GGUF files: transformers reads them, in less time and memory than by itself.

By itself it parses the header with its vocabulary several times, derives the names of tensors once
for each module, and unpacks all weights before the first of them enters the model, so that memory
holds them twice. Here the header is parsed once, the names are derived once, and each tensor is
unpacked when it enters the model.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import torch
from transformers import modeling_gguf_pytorch_utils as loader

from rag_windows import packed_weights

_lock = threading.Lock()

_CHANGED: dict[type, tuple[str, ...]] = {
    loader.TensorProcessor: (),
    loader.LlamaTensorProcessor: (".attn_q.", ".attn_k."),
    loader.Gemma2TensorProcessor: ("norm.weight",),
}
"""For each of transformers' processors under which a tensor of a file is one of the model's, parts
of the names of those whose numbers it changes. Files for the others are unpacked at once."""

_PIECE = 2**18
"""Numbers that are unpacked at a time: what is computed between stays in a processor's cache."""


@contextmanager
def reading(kwargs: Mapping[str, Any], *, int8: bool = False) -> Iterator[None]:
    """Let transformers read a GGUF file as above, if ``kwargs`` name one by ``gguf_file``.

    With ``int8`` weights are packed (`packed_weights`) as they enter the model, where that can be.
    """
    if kwargs.get("gguf_file") is None:
        yield
        return
    with _lock:
        package: Any = import_module("gguf")
        usual = package.GGUFReader, package.get_tensor_name_map, loader.load_gguf_checkpoint
        reader = functools.cache(_reader_class(package))
        described = functools.cache(usual[2])

        def load(
            path: Any,
            return_tensors: bool = False,
            model_to_load: Any = None,
            torch_dtype: torch.dtype | None = None,
        ) -> dict[str, Any]:
            made = {key: dict(part) for key, part in described(path).items()}
            if return_tensors:
                file = _File(package, reader(path), path, torch_dtype or torch.float32)
                tensors = file.tensors(made["config"], model_to_load, int8=int8)
                if tensors is None:
                    return usual[2](path, True, model_to_load, torch_dtype)
                made["tensors"] = tensors
            return made

        package.GGUFReader = reader
        package.get_tensor_name_map = functools.cache(usual[1])
        loader.load_gguf_checkpoint = load
        try:
            yield
        finally:
            package.GGUFReader, package.get_tensor_name_map, loader.load_gguf_checkpoint = usual


def _reader_class(package: Any) -> Any:
    """`gguf.GGUFReader` for vocabularies of some hundred thousand entries.

    Each entry is two slices of a memory map there, which take numpy several times as long as slices
    of an array over the same memory, and many times as long as bytes.
    """
    usual: Any = package.GGUFReader
    types: Any = package.GGUFValueType

    class Reader(usual):
        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = mapped.view(np.ndarray)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != types.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = struct.unpack_from("<IQ", self._data, orig_offs)
            width = self.gguf_scalar_to_np.get(kind)
            if kind != types.STRING and width is None:
                return super()._get_field_parts(orig_offs, raw_type)
            at, parts = orig_offs + 12, [kind, count]
            if width is None:
                memory = memoryview(self._data)
                for _ in range(count):
                    (length,) = struct.unpack_from("<Q", memory, at)
                    parts.append(bytes(memory[at + 8 : at + 8 + length]))
                    at += 8 + length
            else:
                numbers = np.frombuffer(self._data, width, count, at)
                parts += [(number,) for number in numbers.tolist()]
                at += numbers.nbytes
            found = [types.ARRAY] if count == 0 else [types.ARRAY, types(kind)]
            return at - orig_offs, parts, list(range(2, 2 + count)), found

    return Reader


class _File:
    """A file whose tensors are read for a model of one dtype."""

    def __init__(self, package: Any, reader: Any, path: Any, dtype: torch.dtype) -> None:
        self._package, self._reader, self._path, self._dtype = package, reader, path, dtype

    def tensors(
        self, config: Mapping[str, Any], model: Any, *, int8: bool
    ) -> dict[str, _Deferred] | None:
        """Tensors by the model's names, none of them read; None if some would be rearranged."""
        architecture = bytes(self._reader.fields["general.architecture"].parts[-1]).decode()
        processor = loader.TENSOR_PROCESSORS.get(architecture, loader.TensorProcessor)(config)
        changed = _CHANGED.get(type(processor))
        if changed is None or self._reader.byte_order != "I":
            return None
        names = loader.get_gguf_hf_weights_map(model, processor)
        tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
        scales = packed_weights.prepare(model, tied, self._dtype) if int8 else {}
        made = {}
        for stored in self._reader.tensors:
            name = names.get(stored.name)
            if name is None:
                continue
            own = processor if any(part in stored.name for part in changed) else None
            if name in scales:
                both = _Once(functools.partial(self._packed, stored, own))
                made[name] = _Deferred(functools.partial(both, 0))
                made[scales[name]] = _Deferred(functools.partial(both, 1))
            else:
                made[name] = _Deferred(functools.partial(self._unpacked, stored, own))
        return made

    def _unpacked(self, stored: Any, processor: Any) -> torch.Tensor:
        """A tensor in the model's dtype."""
        if processor is not None:
            return self._processed(stored, processor).to(self._dtype)
        rows, width = _size(stored)
        numbers = torch.empty(rows, width, dtype=self._dtype)
        for first, some in self._pieces(stored):
            numbers[first : first + len(some)] = some
        return numbers.view(_shape(stored))

    def _packed(self, stored: Any, processor: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers and scales of a matrix."""
        if processor is not None:
            return packed_weights.quantized(self._processed(stored, processor), self._dtype)
        rows, width = _size(stored)
        numbers = torch.empty(rows, width, dtype=torch.int8)
        scales = torch.empty(rows, dtype=self._dtype)
        for first, some in self._pieces(stored):
            piece = slice(first, first + len(some))
            numbers[piece], scales[piece] = packed_weights.quantized(some, self._dtype)
        return numbers, scales

    def _processed(self, stored: Any, processor: Any) -> torch.Tensor:
        """A tensor in fp32 as transformers changes it."""
        whole = torch.cat([some for _, some in self._pieces(stored)]).view(_shape(stored))
        made = processor.process(weights=whole.numpy(), name=stored.name).weights
        return torch.from_numpy(np.ascontiguousarray(made))

    def _pieces(self, stored: Any) -> Iterator[tuple[int, torch.Tensor]]:
        """Rows in fp32 (some, width) with the number of the first; never many at a time."""
        rows, width = _size(stored)
        row_bytes, step = stored.n_bytes // rows, max(1, _PIECE // width)
        for first in range(0, rows, step):
            count = min(step, rows - first) * row_bytes
            # Pages of a memory map that were read would count as memory of this process.
            at = stored.data_offset + first * row_bytes
            some = np.fromfile(self._path, np.uint8, count, offset=at)
            # gguf goes row by row, so a piece is one row.
            made = self._package.dequantize(some[None], stored.tensor_type)
            yield first, torch.from_numpy(made.reshape(-1, width))


def _shape(stored: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(stored.shape))


def _size(stored: Any) -> tuple[int, int]:
    """Rows and numbers of a row; a vector is one row."""
    width = int(stored.shape[0])
    return int(stored.n_elements) // width, width


class _Once:
    """Tensors that the first thread that asks for one of them makes, for the others as well."""

    def __init__(self, make: Callable[[], tuple[torch.Tensor, ...]]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._made: tuple[torch.Tensor, ...] | None = None

    def __call__(self, which: int) -> torch.Tensor:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made[which]


class _Deferred:
    """A tensor that is made when transformers asks for it; it looks like a slice of safetensors."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make

    def get_dtype(self) -> str:
        """Its type by safetensors' name, which says only that it may be cast to the model's."""
        return "F32"

    def __getitem__(self, place: Any) -> torch.Tensor:
        return self._make()[place]
