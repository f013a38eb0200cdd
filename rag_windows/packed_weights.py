"""Weights of linear layers and embeddings as 8-bit numbers on a CPU, with a scale for each row.

PyTorch's own kernel multiplies few rows by them (``_weight_int8pack_mm``, which torchao and
torch.compile call, too); many rows are multiplied by weights that are unpacked in pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch.nn.functional import linear

MOST_ROWS = 16
"""Rows up to which the kernel is faster than unpacking."""

_KERNEL_WIDTH = 32
"""The kernel reads past the end of rows whose length is no multiple of 16 (PyTorch 2.13); 32 leaves
a margin for processors with other vectors."""

_PIECE = 2**22
"""Weights that are unpacked at a time, one output's at least."""

_LARGEST = 127.0


def quantized(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (out, in) in fp32 as int8 (out, in) and scales (out,) in ``dtype``.

    A weight is its number times its row's scale: ``max |w| / 127``, rounded to ``dtype`` first, so
    that rounding it costs nothing.
    """
    scale = (rows.abs().amax(dim=1) / _LARGEST).to(dtype)
    # A row of zeros, or of numbers too small to divide by, becomes zeros.
    divisor = scale.float().clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
    packed = (rows / divisor).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    return packed, scale


class _Packed(torch.nn.Module):
    """Holds ``weight``, int8 (out, in), and ``scale`` (out,), in the dtype that is computed in."""

    def __init__(self, outs: int, ins: int, dtype: torch.dtype) -> None:
        super().__init__()
        numbers = torch.empty(outs, ins, dtype=torch.int8)
        self.weight = torch.nn.Parameter(numbers, requires_grad=False)
        self.scale = torch.nn.Parameter(torch.empty(outs, dtype=dtype), requires_grad=False)


class Int8Linear(_Packed):
    """A ``torch.nn.Linear`` whose weight is packed."""

    def __init__(self, outs: int, ins: int, bias: torch.nn.Parameter | None, dtype: torch.dtype):
        super().__init__(outs, ins, dtype)
        self.register_parameter("bias", bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Output (..., out) of an input (..., in)."""
        outs, ins = self.weight.shape
        rows = input.reshape(-1, ins)
        if 0 < len(rows) <= MOST_ROWS and ins % _KERNEL_WIDTH == 0:
            made = torch.ops.aten._weight_int8pack_mm(rows.contiguous(), self.weight, self.scale)
        else:
            made = self._unpacked_product(rows)
        if self.bias is not None:
            made = made + self.bias
        return made.view(*input.shape[:-1], outs)

    def _unpacked_product(self, rows: torch.Tensor) -> torch.Tensor:
        outs, ins = self.weight.shape
        wide = rows.to(_product_dtype(rows.dtype))
        made = rows.new_empty(len(rows), outs)
        step = max(1, _PIECE // ins)
        for first in range(0, outs, step):
            piece = slice(first, first + step)
            product = linear(wide, self.weight[piece].to(wide.dtype))
            made[:, piece] = product.mul_(self.scale[piece])
        return made


class Int8Embedding(_Packed):
    """A ``torch.nn.Embedding`` whose weight is packed."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows (..., in) of token ids (...)."""
        return self.weight[input].to(self.scale.dtype) * self.scale[input].unsqueeze(-1)


@functools.cache
def _product_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what many rows are multiplied: in fp32 where PyTorch has only a plain loop for 16 bits."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    supported = getattr(torch.ops.mkldnn, name.get(dtype, ""), None)
    return torch.float32 if supported is not None and not supported() else dtype


def _places(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Parent, name and module of each layer that is packed: plain ones alone."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) in (torch.nn.Linear, torch.nn.Embedding):
                yield parent, name, module


def _emptied(module: torch.nn.Module, dtype: torch.dtype) -> _Packed:
    """The packed layer for a plain one, without its numbers, on the same device."""
    weight = module.get_parameter("weight")
    outs, ins = weight.shape
    with weight.device:
        if isinstance(module, torch.nn.Linear):
            return Int8Linear(outs, ins, module.bias, dtype)
        return Int8Embedding(outs, ins, dtype)


def prepare(model: torch.nn.Module, tied: set[str], dtype: torch.dtype) -> dict[str, str]:
    """Put packed layers, to be filled, into a model without weights; for those that are not tied.

    Args:
        model: on the meta device.
        tied: names of weights that several layers share, which are packed when they are loaded.
        dtype: of the scales.

    Returns:
        For each packed weight's name the name of its scale.
    """
    names = {id(module): name for name, module in model.named_modules()}
    made = {}
    for parent, name, module in _places(model):
        whole = names[id(module)]
        if f"{whole}.weight" not in tied:
            setattr(parent, name, _emptied(module, dtype))
            made[f"{whole}.weight"] = f"{whole}.scale"
    return made


@torch.no_grad()
def pack(model: torch.nn.Module) -> None:
    """Pack a loaded model's layers, one after the other; layers that share a weight still do."""
    shared: dict[int, _Packed] = {}
    for parent, name, module in _places(model):
        weight = module.get_parameter("weight")
        if not weight.is_floating_point():
            continue
        made = _emptied(module, weight.dtype)
        known = shared.get(id(weight))
        if known is None:
            step = max(1, _PIECE // weight.shape[1])
            for first in range(0, len(weight), step):
                piece = slice(first, first + step)
                numbers, scale = quantized(weight[piece].float(), weight.dtype)
                made.weight[piece], made.scale[piece] = numbers, scale
        else:
            made.weight, made.scale = known.weight, known.scale
        shared[id(weight)] = made
        setattr(parent, name, made)
