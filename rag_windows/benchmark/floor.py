"""What the machine can do at best, measured in the same run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from rag_windows.benchmark.clock import synchronize
from rag_windows.benchmark.shape import linears, token_bytes, weight_bytes

_ROWS = 4096
_REPEATS = 5
_STREAM_BYTES = 1 << 29


@dataclass(frozen=True, slots=True)
class Floor:
    """The least that a prompt and a generated token can cost on this machine.

    Attributes:
        flops: of the linear layers, per prompt token.
        flops_per_s: of matrix products of these layers' sizes.
        seconds_per_token: what the linear layers take for a prompt token at that rate.
        bytes_per_s: of reading memory.
        weights: bytes of all weights that every generated token reads: all but an embedding table
            apart from the vocabulary layer.
        token: bytes of keys and values of one token.
    """

    flops: float
    flops_per_s: float
    seconds_per_token: float
    bytes_per_s: float
    weights: int
    token: int

    def prefill_s(self, tokens: int) -> float:
        """Linear layers of a prompt; its attention and its vocabulary layer come on top."""
        return tokens * self.seconds_per_token

    def decode_s(self, context: int) -> float:
        """A generated token: all weights and all keys and values are read once."""
        return (self.weights + context * self.token) / self.bytes_per_s


def measure_floor(model: PreTrainedModel) -> Floor:
    """Time matrix products of the model's own sizes, and the reading of memory."""
    weight = next(model.parameters())
    seconds = flops = 0.0
    for (inputs, outputs), count in Counter(linears(model)).items():
        rows = torch.randn(_ROWS, inputs, device=weight.device, dtype=weight.dtype)
        matrix = torch.randn(outputs, inputs, device=weight.device, dtype=weight.dtype)
        took = _best(lambda a=rows, b=matrix: torch.nn.functional.linear(a, b))  # type: ignore[misc] # bound now
        seconds += count * took / _ROWS
        flops += count * 2.0 * inputs * outputs
    return Floor(
        flops=flops,
        flops_per_s=flops / seconds,
        seconds_per_token=seconds,
        bytes_per_s=_bandwidth(weight.device),
        weights=weight_bytes(model) - _unread(model),
        token=token_bytes(model),
    )


def _unread(model: PreTrainedModel) -> int:
    """Bytes of an embedding table that is not the vocabulary layer: one row of it is read."""
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    return 0 if head is not None and head.weight is table else table.nbytes


def _bandwidth(device: torch.device) -> float:
    """Bytes per second of a sum over fp32 numbers, which reads each once and writes nothing."""
    numbers = torch.ones(_STREAM_BYTES // 4, device=device)
    return _STREAM_BYTES / _best(numbers.sum)


def _best(work: Callable[[], object]) -> float:
    """Seconds of the quickest of several runs, after one that warms up."""
    work()
    took = []
    for _ in range(_REPEATS):
        synchronize()
        begun = time.perf_counter()
        work()
        synchronize()
        took.append(time.perf_counter() - begun)
    return min(took)
