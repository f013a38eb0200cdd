"""Linear layers on CPUs, where PyTorch is slow: few rows, and many rows of 16-bit numbers.

Few rows are answered by a kernel in C that reads weights at memory's speed.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from rag_windows.attention.native import build

logger = logging.getLogger(__name__)

NAME = "rag_windows::linear"
"""What a profiler shows it as."""

MOST_ROWS = 8
MOST_PAIRED_ROWS = 48
"""Rows up to which the kernel is faster than PyTorch, without and with products of pairs."""

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
_NEAR_ZERO = 1e-4
_KINDS = {torch.Tensor, torch.nn.Parameter}


@dataclass(frozen=True, slots=True)
class LinearKernel:
    """``rag_windows_linear`` of ``linear.c`` for one dtype, and how many rows it is asked for."""

    run: Callable[..., None]
    most_rows: int


class Linear(torch.nn.Linear):
    """A view of a ``torch.nn.Linear``, which it shares everything with.

    On a CPU few rows are answered by the kernel where it can, many rows in bf16 or fp16 through
    fp32 where that is faster, all else by PyTorch.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Output (..., out) of an input (..., in)."""
        parameters = self._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        made = None if weight is None else product(input, weight, bias)
        if made is None and weight is not None:
            made = product_in_fp32(input, weight, bias)
        return super().forward(input) if made is None else made


def class_of_view(module: torch.nn.Module) -> type[torch.nn.Module]:
    """`Linear` for what it can be a view of, else the module's own class."""
    kind, weight = type(module), module._parameters.get("weight")
    if kind is not torch.nn.Linear or weight is None or not weight.is_cpu:
        return kind
    written = getattr(kind.forward, "__globals__", {}).get("__name__")
    return Linear if written == kind.__module__ else kind  # nobody replaced PyTorch's forward


def class_of_viewed(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The class of what a module is a view of."""
    return torch.nn.Linear if type(module) is Linear else type(module)


def product(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """Output (..., out) of an input (..., in), a weight (out, in) and a bias (out,).

    None where the kernel does not answer: it would be no faster, or not the same.
    """
    rows = input.numel() // max(1, weight.shape[-1])
    if not 0 < rows <= MOST_PAIRED_ROWS or not _fit(input, weight, bias):
        return None
    made = kernel(input.dtype)
    if made is None or rows > made.most_rows:
        return None
    if not _profiler_enabled():
        return _asked(made.run, input, weight, bias)
    with record_function(NAME):  # which takes as long as a small layer
        return _asked(made.run, input, weight, bias)


LEAST_ROWS_IN_FP32 = 24
"""Rows from which `product_in_fp32` is faster than PyTorch's loop."""

MOST_WEIGHTS = 2**22
"""Weights that `product_in_fp32` holds in fp32 at a time, one output's at least: 16 MiB."""


def product_in_fp32(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """The same for many rows in bf16 or fp16: summed in fp32, rounded once.

    Without instructions for 16-bit numbers PyTorch multiplies them by a plain loop, six times as
    slowly as it does in fp32, to which turning a weight's numbers adds little. None where PyTorch
    has a product of its own.
    """
    if not _without_product(input.dtype):
        return None
    if input.numel() < LEAST_ROWS_IN_FP32 * weight.shape[-1] or not _fit(input, weight, bias):
        return None
    outs, ins = weight.shape
    rows = input.reshape(-1, ins).float()
    output = input.new_empty(len(rows), outs)
    step = max(1, MOST_WEIGHTS // ins)
    for start in range(0, outs, step):
        part = slice(start, start + step)
        added = None if bias is None else bias[part].float()
        output[:, part] = torch.nn.functional.linear(rows, weight[part].float(), added)
    return output.view(*input.shape[:-1], outs)


@functools.cache
def _without_product(dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies matrices of a 16-bit dtype by a plain loop on this processor."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    supported = getattr(torch.ops.mkldnn, name.get(dtype, ""), None)
    return supported is not None and not supported()


def _fit(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether they are plain numbers of one dtype and of sizes that fit, and nothing else counts.

    Gradients and autocast are PyTorch's.
    """
    size, dtype = weight.shape, input.dtype
    if len(size) != 2 or input.shape[-1:] != size[1:] or not input.numel() or not weight.numel():
        return False
    if not (_plain(input, dtype) and _plain(weight, dtype)):
        return False
    if bias is not None and not (bias.shape == size[:1] and _plain(bias, dtype)):
        return False
    return not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))


def _asked(
    run: Callable[..., None], input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    outs, ins = weight.shape
    output = input.new_empty(*input.shape[:-1], outs)
    run(
        input.data_ptr(),
        input.numel() // ins,
        weight.data_ptr(),
        outs,
        ins,
        None if bias is None else bias.data_ptr(),
        output.data_ptr(),
        torch.get_num_threads(),
    )
    return output


def _plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether numbers of this dtype stand without gaps in memory that a CPU reads."""
    return (
        tensor.is_cpu
        and tensor.dtype is dtype
        and type(tensor) in _KINDS
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )


def kernel(dtype: torch.dtype) -> LinearKernel | None:
    """The kernel for one dtype, built by the first call; for any thread.

    None where it is switched off (`build.VARIABLE`), can't be built on this machine, or errs.
    """
    return None if build.switched_off() else _kernels(dtype)


def _checked(dtype: torch.dtype) -> LinearKernel | None:
    if dtype not in build.ELEMENTS:
        return None
    loaded = build.library("linear.c", ELEMENT=build.ELEMENTS[dtype])
    if loaded is None:
        return None
    run: Any = loaded.rag_windows_linear
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    run.restype = None
    run.argtypes = [pointer, number, pointer, number, number, pointer, pointer, ctypes.c_int]
    if not _agrees(run, dtype):
        logger.warning("The CPU kernel of linear layers in %s differs from PyTorch.", dtype)
        return None
    paired = bool(ctypes.c_int.in_dll(loaded, "rag_windows_paired").value)
    return LinearKernel(run, MOST_PAIRED_ROWS if paired else MOST_ROWS)


def _agrees(run: Callable[..., None], dtype: torch.dtype) -> bool:
    """Ask small questions: with bias and without, sizes of whole vectors and others."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(dtype)

    for rows, outs, ins, biased in ((1, 64, 256, False), (1, 13, 75, True), (7, 13, 75, False)):
        input, weight = drawn(rows, ins), drawn(outs, ins)
        bias = drawn(outs) if biased else None
        wanted = torch.nn.functional.linear(
            input.double(), weight.double(), None if bias is None else bias.double()
        )
        made = _asked(run, input, weight, bias).double()
        if not torch.allclose(made, wanted, rtol=_TOLERANCE[dtype], atol=_NEAR_ZERO):
            return False
    return True


_kernels = build.SingleFlight(_checked)
