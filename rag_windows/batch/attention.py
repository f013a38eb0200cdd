"""Attention of a batch: each row over its own tail, rows together over what they share."""

from __future__ import annotations

import torch

from rag_windows.attention.layout import Layout
from rag_windows.attention.merge import merge, merge_weights
from rag_windows.attention.packed import attend_own
from rag_windows.batch.ask import Ask, Part
from rag_windows.batch.mass import record
from rag_windows.batch.plan import Plan
from rag_windows.batch.scratch import Scratch
from rag_windows.batch.sight import Sight
from rag_windows.batch.tails import Tails


class BatchAttention:
    """Attention of one forward pass over the tokens of all rows; a layout's override.

    The tokens stand one behind the other in one batch row, as windows do while they are encoded.

    Args:
        plan: which tokens read what.
        tails: of the rows, which already count this pass's tokens.
        positions: (tokens,) int64, on the CPU.
    """

    def __init__(self, plan: Plan, tails: Tails, positions: torch.Tensor) -> None:
        self._plan = plan
        self._tails = tails
        self._sight = Sight(positions)
        self._scratch = Scratch()

    def attend(
        self,
        layout: Layout,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of all rows' tokens; see `rag_windows.attention.layout.Override`.

        Args:
            layout: of this call; says how far the layer reaches.
            layer: its number.
            query: (1, heads, tokens, head dim).
            key: (1, kv heads, tokens, head dim).
            value: (1, kv heads, tokens, value dim).
            scale: multiplies the logits.
            softcap: caps them, or None.
            sinks: (heads,) logits of attention sinks, or None.

        Returns:
            (1, heads, tokens, value dim) in the query's dtype.
        """
        plan, reach = self._plan, layout.reach[layer]
        by_token = query[0].transpose(0, 1)
        ask = Ask(layer, by_token, scale, softcap, reach, self._sight, self._scratch)
        tail, tail_lse = self._own(ask, key, value)
        if plan.biases is not None:
            tail_lse = tail_lse + plan.biases.to(tail_lse).unsqueeze(-1)
        parts: list[Part] = [(tail, tail_lse)]
        prefix = context = None
        if plan.prefixes:
            prefix = plan.prefixes.attend(ask)
            parts.append(prefix)
        if plan.contexts:
            context = plan.contexts.attend(ask)
            parts.append((context[0], _rescaled(plan, context[1])))
        if len(parts) == 1 and sinks is None:
            return tail.transpose(0, 1).unsqueeze(0)
        sink = None if sinks is None else sinks.to(tail_lse.dtype).view(1, -1)
        weights = merge_weights([lse for _, lse in parts], sink)
        if plan.own is not None and context is not None:
            record(plan, ask, context[1], weights, prefix is not None)
        mixed = merge([output for output, _ in parts], weights)
        return mixed.transpose(0, 1).unsqueeze(0)

    def _own(self, ask: Ask, key: torch.Tensor, value: torch.Tensor) -> Part:
        """Each token over its row's tail, into which its key and value are written."""
        plan, layer, query = self._plan, ask.layer, ask.query
        old, made = plan.old, []
        if old:
            made.append(
                self._tails.attend(
                    layer,
                    query[:old],
                    key[0, :, :old],
                    value[0, :, :old],
                    ask.scale,
                    ask.softcap,
                    ask.reach,
                )
            )
        if old < len(plan.rows):
            lengths = plan.lengths[old:]
            key, value = key[:, :, old:], value[:, :, old:]
            self._tails.fill(layer, old, lengths, key[0], value[0])
            fresh = query[old:].transpose(0, 1).unsqueeze(0)
            output, lse = attend_own(lengths, fresh, key, value, ask.scale, ask.softcap, ask.reach)
            made.append((output[0].transpose(0, 1), lse[0].transpose(0, 1)))
        if len(made) == 1:
            return made[0]
        return torch.cat([one[0] for one in made]), torch.cat([one[1] for one in made])


def _rescaled(plan: Plan, lse: torch.Tensor) -> torch.Tensor:
    """Each method's own ``context_lse``, on the tokens of its rows."""
    method, tokens = plan.methods[0]
    if tokens is None:
        return method.context_lse(lse)
    made = lse.clone()
    for method, tokens in plan.methods:
        if tokens is not None:
            index = tokens.to(lse.device)
            made[index] = method.context_lse(lse[index])
    return made
