"""The eager attention that returns lse: the specification of every backend."""

from __future__ import annotations

import torch

from rag_windows.attention.backends.request import Request

SCORE_BYTES = 256 * 2**20
"""Scores of one chunk of rows take at most this many bytes."""


def serves(request: Request) -> bool:
    """True: whatever can be asked."""
    return True


def attend(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by explicit scores, in fp32 (fp64 for fp64 inputs), on any device.

    Returns:
        Output (batch, heads, rows, value dim) in the query's dtype, zero where a row sees no key;
        lse (batch, heads, rows), fp32 (fp64 for fp64 inputs), ``-inf`` there.
    """
    query, key, value = request.query, request.key, request.value
    batch, heads, rows, _ = query.shape
    kv_heads, n_keys = key.shape[1], key.shape[2]
    exact = torch.promote_types(query.dtype, torch.float32)
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))
    wide_key, wide_value = key.to(exact).unsqueeze(2), value.to(exact).unsqueeze(2)
    step = max(1, SCORE_BYTES // (4 * batch * heads * max(n_keys, 1)))
    outputs, lses = [], []
    for start in range(0, rows, step):
        part = grouped[:, :, :, start : start + step].to(exact)
        scores = part @ wide_key.transpose(-1, -2) * request.scale
        if request.softcap is not None:
            scores = torch.tanh(scores / request.softcap) * request.softcap
        scores = scores / request.temperature
        visible = request.visible(start, min(start + step, rows))
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
        outputs.append((weights @ wide_value).to(query.dtype))
        lses.append(lse)
    return torch.cat(outputs, dim=3).flatten(1, 2), torch.cat(lses, dim=3).flatten(1, 2)
