"""The codebook against dense computations: what it chooses, and what is read of it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rag_windows import Codebook

from . import dense, engine, float64, tolerances, zoo
from .cases import Case, case, expected

# The last one has a sliding layer, out of whose reach the first positions are.
MODELS = ("llama", "qwen3", "gpt2", "gemma3_text-sliding")
RAGGED = case(5, (7, 12, 3, 12, 9, 26), 6, seed=41)
NO_PREFIX = case(0, (5, 8, 8), 4, seed=43)
SHARP = dense.Rule(0.7, 0.8)


@pytest.mark.parametrize(
    ("name", "rule"), [*((one, SHARP) for one in MODELS), ("llama", dense.PLAIN)]
)
def test_reading_all_is_the_reader_bit_for_bit(name: str, rule: dense.Rule) -> None:
    reader = engine.method(rule)
    methods = reader, Codebook(reader=reader)
    assert torch.equal(*(engine.logits(name, RAGGED, method) for method in methods))
    lm = engine.shared(name)
    contexts = [engine.encoded(name, RAGGED, method) for method in methods]
    whole, chosen = (lm.generate_ids(one, RAGGED.query, max_new_tokens=6) for one in contexts)
    assert whole == chosen


def _keys(model: PreTrainedModel, prefix: list[int], tokens: list[int]) -> list[Tensor]:
    """Each layer's (heads, tokens, dim) of tokens behind the prefix, by the model alone."""
    cache = DynamicCache()
    float64.cached(model, cache, [*prefix, *tokens])
    return [layer.keys[0, :, len(prefix) :] for layer in cache.layers]


def similarity(kind: str, query: list[Tensor], window: list[Tensor], page: int) -> float:
    """The formula of `Codebook`, one number after the other."""
    tokens = []
    for t in range(query[0].shape[1]):
        pages = []
        for first in range(0, window[0].shape[1], page):
            parts = []
            for q, k in zip(query, window, strict=True):
                for head in range(q.shape[0]):
                    one, other = q[head, t], k[head, first : first + page].mean(0)
                    if kind == "cosine":
                        parts.append(one @ other / one.norm() / other.norm())
                    elif kind == "dot":
                        parts.append(one @ other)
                    else:
                        parts.append(-(one - other).square().sum())
            pages.append(sum(parts) / len(parts))
        tokens.append(max(pages))
    return float(sum(tokens) / len(tokens))


@pytest.mark.parametrize(
    ("name", "kind", "page", "layers"),
    [
        *((one, "cosine", 4, None) for one in MODELS),
        ("llama", "dot", 1, (0,)),
        ("gpt2", "euclidean", 5, (0, -1)),
    ],
)
def test_reads_the_most_similar_windows(
    name: str, kind: Any, page: int, layers: tuple[int, ...] | None
) -> None:
    model, lm = zoo.shared(name), engine.shared(name)
    depth = model.config.num_hidden_layers
    wanted = sorted({depth // 2, depth - 1} if layers is None else {at % depth for at in layers})
    query = [_keys(model, RAGGED.prefix, RAGGED.query)[at] for at in wanted]
    alike = [
        similarity(kind, query, [_keys(model, RAGGED.prefix, window)[at] for at in wanted], page)
        for window in RAGGED.windows
    ]
    best = sorted(sorted(range(6), key=lambda i: -alike[i])[:3])
    method = Codebook(
        retrieve=3, similarity=kind, layers=layers, page=page, reader=engine.method(SHARP)
    )
    context = lm.encode_ids(RAGGED.prefix, RAGGED.windows, method=method)
    narrow = lm.engine.decoder.for_query(context, RAGGED.query)
    assert narrow.chosen == tuple(best)
    read = Case(RAGGED.prefix, [RAGGED.windows[index] for index in best], RAGGED.query)
    tolerances.agree(lm.logits(context, RAGGED.query), expected(name, read, SHARP))


@dataclass(frozen=True, slots=True)
class _Fusion:
    packed: dense.Packed
    lengths: tuple[int, ...]
    rule: dense.Rule
    mean: bool


def _fused(states: Tensor, call: _Fusion) -> Tensor:
    """(1, heads, longest, dim) from the windows' tokens of (1, heads, tokens, dim)."""
    prefix = int((call.packed.segments == dense.PREFIX).sum())
    rows = []
    for place in range(max(call.lengths)):
        there, first = [], prefix
        for length in call.lengths:
            if place < length:
                there.append(states[:, :, first + place])
            first += length
        total = torch.stack(there).sum(0)
        rows.append(total / len(there) if call.mean else total)
    return torch.stack(rows, dim=2)


def _mixed(layer: float64.Layer, call: _Fusion) -> Tensor:
    packed, rule, keys, values = call.packed, call.rule, layer.keys, layer.values
    assert layer.softcap is None
    assert layer.sinks is None
    plain = layer.logits.masked_fill(~layer.seen, -torch.inf)
    output = plain.softmax(-1) @ values

    asking = layer.query.double()[:, :, packed.rows]
    start = int(packed.positions[packed.segments == 1][0])
    places = torch.arange(start, start + max(call.lengths))
    context = asking @ _fused(keys, call).mT * layer.factor / rule.temperature
    if layer.reach is not None:
        far = packed.positions[packed.rows][:, None] - places[None, :] >= layer.reach
        context = context.masked_fill(far, -torch.inf)
    lse = context.logsumexp(-1, keepdim=True)
    lse = lse.masked_fill(lse.isinf(), 0.0)
    context = context - lse + rule.context_lse(lse)
    tail = plain[:, :, packed.rows].masked_fill(packed.context, -torch.inf)
    weights = torch.cat([context, tail], dim=-1).softmax(-1)
    output[:, :, packed.rows] = weights @ torch.cat([_fused(values, call), values], dim=2)
    return output


def fused_logits(name: str, one: Case, rule: dense.Rule, *, mean: bool) -> Tensor:
    """(len(query), vocab) fp32 logits over fused windows: the dense reference with other keys.

    Rows of prefix and windows see what they always see. In each layer a row of the query sees the
    prefix, the query up to itself, and instead of the windows one key and value a position: the
    mean or the sum of those that the windows have there, token by token.
    """
    packed = dense.pack(one.prefix, one.windows, one.query)
    lengths = tuple(len(window) for window in one.windows)
    mix = functools.partial(_mixed, call=_Fusion(packed, lengths, rule, mean))
    return float64.forward(zoo.shared(name), zoo.BY_NAME[name].sliding, packed, mix)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("fusion", "rule"), [("mean", SHARP), ("sum", dense.PLAIN)])
def test_fused_windows(name: str, fusion: Any, rule: dense.Rule) -> None:
    method = Codebook(fusion=fusion, reader=engine.method(rule))
    for one in (RAGGED, NO_PREFIX):
        reference = fused_logits(name, one, rule, mean=fusion == "mean")
        found = engine.logits(name, one, method)
        tolerances.agree(found, reference)
        side_by_side = engine.logits(name, one, replace(method, fusion="concat"))
        assert tolerances.gap(found, side_by_side) > tolerances.MATTERS


def test_each_decoded_step_reads_the_fused_windows() -> None:
    name, forced = MODELS[-1], zoo.ids(9, 5)
    steps = engine.steps(name, RAGGED, Codebook(fusion="mean"), forced)
    longer = replace(RAGGED, query=[*RAGGED.query, *forced[:-1]])
    reference = fused_logits(name, longer, dense.PLAIN, mean=True)
    tolerances.agree(steps, reference[len(RAGGED.query) - 1 :])
