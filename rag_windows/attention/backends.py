"""Attention over one segment with its log-sum-exp: the contract and its backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch

Answer = tuple[torch.Tensor, torch.Tensor]
"""Output (batch, heads, rows, value dim) in the query's dtype, zero where a row sees no key; and
lse (batch, heads, rows), fp32 (fp64 for fp64 inputs), ``-inf`` there."""

SCORE_BYTES = 256 * 2**20
"""Largest size, in bytes, of the reference's scores of one chunk of rows."""

CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(slots=True)
class AttentionRequest:
    """Attention of some rows over one segment.

    Attributes:
        query: (batch, heads, rows, head dim).
        key: (batch, kv heads, keys, head dim); heads is a multiple of kv heads.
        value: (batch, kv heads, keys, value dim).
        scale: multiplies the logits, which ``softcap`` then caps and ``temperature`` divides.
        causal: row i sees keys 0..i; only where rows == keys, and without ``mask``.
        mask: bool, (rows, keys) or (batch, 1, rows, keys), True where a row sees a key; or None.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    temperature: float = 1.0
    softcap: float | None = None
    causal: bool = False
    mask: torch.Tensor | None = None


def reference(request: AttentionRequest) -> Answer:
    """Explicit scores in fp32 (fp64 for fp64), on any device: the specification of the others."""
    query, key, value = request.query, request.key, request.value
    batch, heads, rows, _ = query.shape
    kv_heads, n_keys = key.shape[1], key.shape[2]
    exact = torch.promote_types(query.dtype, torch.float32)
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))
    wide_key, wide_value = key.to(exact).unsqueeze(2), value.to(exact).unsqueeze(2)
    step = max(1, SCORE_BYTES // (4 * batch * heads * max(n_keys, 1)))
    seen = request.mask
    if request.causal:
        seen = torch.ones(rows, n_keys, dtype=torch.bool, device=query.device).tril()
    if seen is not None and seen.dim() == 4:
        seen = seen.unsqueeze(2)
    outputs, lses = [], []
    for start in range(0, rows, step):
        part = grouped[:, :, :, start : start + step].to(exact)
        scores = part @ wide_key.transpose(-1, -2) * request.scale
        if request.softcap is not None:
            scores = torch.tanh(scores / request.softcap) * request.softcap
        scores = scores / request.temperature
        if seen is not None:
            scores = scores.masked_fill(~seen[..., start : start + step, :], -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
        outputs.append((weights @ wide_value).to(query.dtype))
        lses.append(lse)
    return torch.cat(outputs, dim=3).flatten(1, 2), torch.cat(lses, dim=3).flatten(1, 2)


def _everything(_: AttentionRequest) -> bool:
    return True


def _cpu_serves(request: AttentionRequest) -> bool:
    return (
        request.softcap is None
        and request.key.shape[-1] == request.value.shape[-1]
        and request.query.dtype in CPU_DTYPES
        and request.key.shape[2] > 0
    )


def _cpu(request: AttentionRequest) -> Answer:
    """PyTorch's fused CPU attention."""
    query, groups = request.query, request.query.shape[1] // request.key.shape[1]
    if groups == 1 or request.causal or request.mask is not None:
        return _cpu_fused(request, query)
    # The kernel reads keys once for each head that it is given; as rows, heads share one reading.
    batch, heads, rows, dim = query.shape
    folded = query.reshape(batch, heads // groups, groups * rows, dim)
    output, lse = _cpu_fused(request, folded)
    return output.reshape(batch, heads, rows, dim), lse.reshape(batch, heads, rows)


def _cpu_fused(request: AttentionRequest, query: torch.Tensor) -> Answer:
    bias, mask = None, request.mask
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    # A matrix product with one bf16 vector takes twice the time of one with two columns.
    twice = query.dtype == torch.bfloat16 and query.shape[2] == 1
    twice = twice and mask is None and not request.causal
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.expand(-1, -1, 2, -1) if twice else query,
        request.key,
        request.value,
        0.0,
        request.causal,
        attn_mask=bias,
        scale=request.scale / request.temperature,
    )
    if mask is not None:
        # The kernel reports 0 instead of -inf for a row that sees nothing.
        lse = lse.masked_fill(~mask.any(dim=-1), -torch.inf)
    return (output[:, :, :1], lse[:, :, :1]) if twice else (output, lse)


class Backend(NamedTuple):
    """Whether it serves a request correctly on its device, and what answers it."""

    serves: Callable[[AttentionRequest], bool]
    attend: Callable[[AttentionRequest], Answer]


BACKENDS: Mapping[str, Backend] = {
    "reference": Backend(_everything, reference),
    "cpu": Backend(_cpu_serves, _cpu),
}

KERNELS = ("native", "cuda")
"""Kernels that answer several segments at once: `attention.native.kernel` and `attention.cuda`."""

ORDER: Mapping[str, tuple[str, ...]] = {"cpu": ("native", "cpu"), "cuda": ("cuda",)}
"""For each type of device, the backends that are asked before the reference, fastest first."""

_FORCED: ContextVar[tuple[str, ...] | None] = ContextVar("rag_windows_backend", default=None)


def names(device: str) -> tuple[str, ...]:
    """Backends that are asked on a type of device, before the reference."""
    forced = _FORCED.get()
    return ORDER.get(device, ()) if forced is None else forced


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Use one of `BACKENDS` or `KERNELS`, and the reference for the rest, in this thread."""
    token = _FORCED.set((name,))
    try:
        yield
    finally:
        _FORCED.reset(token)


def attend(request: AttentionRequest) -> Answer:
    """Answer with the fastest backend that serves the request."""
    for name in names(request.query.device.type):
        backend = BACKENDS.get(name)
        if backend is not None and backend.serves(request):
            return backend.attend(request)
    return reference(request)
