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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import torch
from transformers import modeling_gguf_pytorch_utils as loader

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
def reading(kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Let transformers read a GGUF file as above, if ``kwargs`` name one by ``gguf_file``."""
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
                dtype = torch_dtype or torch.float32
                tensors = _tensors(
                    package, reader(path), path, made["config"], model_to_load, dtype
                )
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


def _tensors(
    package: Any, reader: Any, path: Any, config: Mapping[str, Any], model: Any, dtype: torch.dtype
) -> dict[str, _Deferred] | None:
    """The file's tensors by the model's names, none of them read; None if some are rearranged."""
    architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    processor = loader.TENSOR_PROCESSORS.get(architecture, loader.TensorProcessor)(config=config)
    changed = _CHANGED.get(type(processor))
    if changed is None or reader.byte_order != "I":
        return None
    names = loader.get_gguf_hf_weights_map(model, processor)
    made = {}
    for one in reader.tensors:
        if one.name in names:
            own = processor if any(part in one.name for part in changed) else None
            made[names[one.name]] = _Deferred(package, path, one, dtype, own)
    return made


class _Deferred:
    """A tensor of a file, unpacked when transformers asks for it.

    It has what transformers takes from slices of safetensors files. ``processor`` changes its
    numbers, if there is one.
    """

    def __init__(
        self, package: Any, path: Any, stored: Any, dtype: torch.dtype, processor: Any
    ) -> None:
        self._package, self._path, self._stored = package, path, stored
        self._dtype, self._processor = dtype, processor
        self.shape = tuple(int(size) for size in reversed(stored.shape))

    def get_dtype(self) -> str:
        """Its type by safetensors' name, which says only that it may be cast to the model's."""
        return "F32"

    def __getitem__(self, place: Any) -> torch.Tensor:
        if self._processor is None:
            return self._unpacked(self._dtype)[place]
        numbers = self._unpacked(torch.float32).numpy()
        made = self._processor.process(weights=numbers, name=self._stored.name).weights
        return torch.from_numpy(np.ascontiguousarray(made)).to(self._dtype)[place]

    def _unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """All numbers; in pieces, so that those in float32 never take much memory."""
        size, block_bytes = self._package.GGML_QUANT_SIZES[self._stored.tensor_type]
        blocks = self._stored.n_bytes // block_bytes
        numbers = torch.empty(blocks * size, dtype=dtype)
        step = max(1, _PIECE // size)
        for first in range(0, blocks, step):
            at = self._stored.data_offset + first * block_bytes
            # Pages of a memory map that were read would count as memory of this process.
            some = np.fromfile(
                self._path, np.uint8, min(step, blocks - first) * block_bytes, offset=at
            )
            # gguf goes row by row, so a piece is one row.
            made = self._package.dequantize(some[None], self._stored.tensor_type).reshape(-1)
            numbers[first * size :][: len(made)] = torch.from_numpy(made)
        return numbers.view(self.shape)
