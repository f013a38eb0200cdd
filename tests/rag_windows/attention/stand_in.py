"""PyTorch's `varlen_attn` on the CPU, as `attention.cuda` relies on it.

It computes each sequence by explicit softmax, and refuses what the documentation, or the
kernels in ATen's flash_api.cpp, do not allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rag_windows.attention import backends, cuda

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""With fp32, in which models of tests are, and the kernels are not."""


class Varlen:
    """`varlen_attn` that counts its calls; ``heads_first`` is how its log-sum-exps lie."""

    def __init__(self, *, heads_first: bool = True) -> None:
        self.heads_first = heads_first
        self.sequences: list[list[tuple[int, int]]] = []
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        kv_heads, dim = key.shape[1:]
        groups = query.shape[1] // kv_heads
        check(query.dtype == key.dtype == value.dtype in DTYPES, "dtypes")
        check(query.dim() == key.dim() == 3 and key.shape == value.shape, "shapes")
        check(query.shape[2] == dim <= 256 and dim % 8 == 0, "head size")
        check(query.shape[1] % kv_heads == 0 and (enable_gqa or groups == 1), "heads")
        check(window_size in ((-1, -1), (-1, 0)), "window")
        for one in (query, key, value):
            check(one.stride(2) == 1 and one.data_ptr() % 16 == 0, "last stride, or address")
            check(all(one.stride(i) * one.element_size() % 16 == 0 for i in (0, 1)), "strides")
            end = one.storage_offset() + sum(
                (size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True)
            )
            check(end * one.element_size() < one.untyped_storage().nbytes(), "storage")
        used = cu_seq_k.diff() if seqused_k is None else seqused_k
        for one in (cu_seq_q, cu_seq_k, used):
            check(one.dtype == torch.int32 and one.is_contiguous(), "int32")
            check(one.device == query.device, "device of places")
        check(bool((cu_seq_q.diff() > 0).all() and (cu_seq_k.diff() >= 0).all()), "places fall")
        check(bool((used > 0).all() and (used <= cu_seq_k.diff()).all()), "keys of others")
        check(len(cu_seq_q) == len(cu_seq_k) == len(used) + 1 <= 65536, "sequences")
        check(int(cu_seq_q[0]) == 0 and int(cu_seq_q[-1]) == len(query), "rows")
        check(int(cu_seq_k[0]) >= 0 and int(cu_seq_k[-1]) <= len(key), "keys")
        check(max_q >= int(cu_seq_q.diff().max()) and max_k >= int(used.max()), "max")
        causal = window_size == (-1, 0)
        output, lse = torch.empty_like(query), query.new_empty(query.shape[:2]).float()
        rows, starts = cu_seq_q.tolist(), cu_seq_k.tolist()
        for i, length in enumerate(used.tolist()):
            own = slice(rows[i], rows[i + 1])
            keys, values = (one[starts[i] : starts[i] + length] for one in (key, value))
            keys, values = (one.float().repeat_interleave(groups, 1) for one in (keys, values))
            logits = torch.einsum("qhd,khd->hqk", query[own].float(), keys)
            logits = logits * (dim**-0.5 if scale is None else scale)
            if causal:
                # Aligned at the bottom right.
                seen = torch.ones(logits.shape[1:], dtype=torch.bool)
                logits = logits.masked_fill(~seen.tril(length - logits.shape[1]), -torch.inf)
            output[own] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values).to(query.dtype)
            lse[own] = logits.logsumexp(-1).T
        self.calls.append({"rows": rows, "used": used.tolist(), "heads": query.shape[1]})
        return output, lse.T.contiguous() if self.heads_first else lse


def check(right: bool, what: str) -> None:
    if not right:
        raise RuntimeError(f"varlen_attn was asked for what it does not take: {what}.")


@contextmanager
def forced(name: str, varlen: Callable[..., Any] | None = None) -> Iterator[None]:
    """Tensors of the CPU are served by one backend, and by the reference for the rest.

    In all threads; the backend "cuda" is this stand-in.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cuda.DEVICES, "cpu", cuda.Functions(varlen or Varlen(), DTYPES))
        patch.setattr(backends, "ORDER", {**backends.ORDER, "cpu": (name,)})
        yield


serving = partial(forced, "cuda")
