"""Refined windows against the update written out on dense caches, one window at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rag_windows import PCW, DeepThinking, Method, Sequential, StructuredPrompting, WindowedLM

from . import dense, engine, float64, tolerances, zoo
from .cases import Case, case
from .zoo import Entry

Layers = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, (kv heads, tokens, dim) float64."""


@dataclass(frozen=True, slots=True)
class Update:
    """The numbers of the update."""

    steps: int
    eta: float
    momentum: float
    continued: bool


@torch.no_grad()
def refined(
    model: PreTrainedModel,
    entry: Entry,
    prefix: Sequence[int],
    window: Sequence[int],
    rule: Update,
    start: int | None = None,
) -> Layers:
    """Keys and values of one window after all passes, by the plain model in float64.

    It stands at `start`, right behind the prefix by default. With `KV_0` the plain encoding behind
    the prefix and `G_t` what pass t makes of the window's tokens behind [prefix | KV_{t-1}]:

        m_t  = (G_t - KV_{t-1}) + momentum * m_{t-1},   m_0 = 0
        KV_t = KV_{t-1} + eta * m_t
    """
    start, length = len(prefix) if start is None else start, len(window)
    known = list(range(len(prefix)))
    before: Layers = []
    if prefix:
        before = _run(model, entry, [], [], prefix, known)
    places = list(range(start, start + length))
    state = _run(model, entry, before, known, window, places)
    moving: Layers | None = None
    for _ in range(rule.steps):
        first = start + length if rule.continued else start
        made = _run(
            model,
            entry,
            _joined(before, state),
            [*known, *places],
            window,
            list(range(first, first + length)),
        )
        gradient = [(k - a, v - b) for (k, v), (a, b) in zip(made, state, strict=True)]
        if moving is None:
            moving = gradient
        else:
            moving = [
                (k + rule.momentum * a, v + rule.momentum * b)
                for (k, v), (a, b) in zip(gradient, moving, strict=True)
            ]
        state = [
            (a + rule.eta * k, b + rule.eta * v)
            for (k, v), (a, b) in zip(moving, state, strict=True)
        ]
    return state


@torch.no_grad()
def reference(name: str, one: Case, windows: Sequence[Sequence[int]], rule: Update) -> Tensor:
    """(len(query), vocab) fp32 logits of a query that reads prefix and refined windows."""
    model, entry, prefix = zoo.shared(name), zoo.BY_NAME[name], one.prefix
    start = len(prefix)
    places = list(range(start))
    known: Layers = []
    if prefix:
        known = _run(model, entry, [], [], prefix, places)
    for window in windows:
        known = _joined(known, refined(model, entry, prefix, window, rule))
        places = [*places, *range(start, start + len(window))]
    first = start + max(len(window) for window in windows)
    positions = list(range(first, first + len(one.query)))
    output = _call(model, entry, _cache(known), places, one.query, positions)
    return torch.as_tensor(output.logits)[0].float()


def _joined(one: Layers, other: Layers) -> Layers:
    if not one:
        return other
    return [
        (torch.cat([k, a], dim=1), torch.cat([v, b], dim=1))
        for (k, v), (a, b) in zip(one, other, strict=True)
    ]


def _cache(known: Layers) -> DynamicCache:
    cache = DynamicCache()
    for layer, (key, value) in enumerate(known):
        cache.update(key[None], value[None], layer)
    return cache


def _run(
    model: PreTrainedModel,
    entry: Entry,
    known: Layers,
    places: list[int],
    tokens: Sequence[int],
    positions: list[int],
) -> Layers:
    """What one pass over `tokens` makes behind `known`, whose positions are `places`."""
    cache = _cache(known)
    _call(model, entry, cache, places, tokens, positions)
    return [
        (layer.keys[0, :, -len(tokens) :], layer.values[0, :, -len(tokens) :])
        for layer in cache.layers
    ]


def _call(
    model: PreTrainedModel,
    entry: Entry,
    cache: DynamicCache,
    places: list[int],
    tokens: Sequence[int],
    positions: list[int],
) -> Any:
    new = torch.tensor(positions)
    old = torch.tensor(places, dtype=torch.int64)

    def visible(reach: int | None) -> Tensor:
        earlier = torch.ones(len(new), len(old), dtype=torch.bool)
        own = torch.ones(len(new), len(new), dtype=torch.bool).tril()
        seen = torch.cat([earlier, own], dim=1)
        if reach is not None:
            seen &= new[:, None] - torch.cat([old, new])[None, :] < reach
        return seen

    masks = dense.masks(visible, entry.sliding, entry.mask_by_type)
    return float64.cached(model, cache, tokens, position_ids=new[None], attention_mask=masks)


NAMES = ("llama", "qwen3", "gpt2", "gemma3")
# What else can differ: sliding layers all over, learned positions with an offset, partly rotated
# keys, and soft caps and sinks, which another kernel serves.
MORE = (
    ("mistral-sliding", True),
    ("mistral-sliding", False),
    ("gemma2", False),
    ("gpt_oss", True),
    ("opt", True),
    ("gpt_neox", True),
)
UPDATES = {
    f"{positions}, momentum {momentum}": Update(3, 0.1, momentum, positions == "continue")
    for positions in ("continue", "reuse")
    for momentum in (0.0, 0.9)
}
LAYOUTS = {
    # Lengths near each other share a batch, padded; the last is longer than the sliding reach.
    "prefix": case(5, (7, 9, 10, 13), 6),
    "no prefix": case(0, (3, 5, 12), 4),
    "long prefix": case(19, (3, 1, 21), 5),
}
FEW = case(5, (9, 11), 4)


def method(rule: Update, reader: Method | None = None) -> DeepThinking:
    return DeepThinking(
        steps=rule.steps,
        eta=rule.eta,
        momentum=rule.momentum,
        positions="continue" if rule.continued else "reuse",
        reader=reader or PCW(),
    )


def windows_of(lm: WindowedLM, one: Case, by: Method) -> list[Layers]:
    """Keys and values of each window."""
    context = lm.encode_ids(one.prefix, one.windows, method=by)
    assert [len(window.ids) for window in context.each] == [len(ids) for ids in one.windows]
    return [list(zip(window.keys, window.values, strict=True)) for window in context.each]


def check(name: str, one: Case, rule: Update) -> None:
    check_windows(name, one, rule, method(rule), [len(one.prefix)] * len(one.windows))


def check_windows(
    name: str, one: Case, rule: Update, by: DeepThinking, starts: Sequence[int]
) -> None:
    """The windows are the reference's, each at its position."""
    found = windows_of(engine.shared(name), one, by)
    for window, start, layers in zip(one.windows, starts, found, strict=True):
        model, entry = zoo.shared(name), zoo.BY_NAME[name]
        compare(layers, refined(model, entry, one.prefix, window, rule, start))


def compare(layers: Layers, right: Layers) -> None:
    for pair, right_pair in zip(layers, right, strict=True):
        for tensor, wanted in zip(pair, right_pair, strict=True):
            assert tensor.dtype == torch.float32
            tolerances.agree(tensor, wanted)


@pytest.mark.parametrize("ruled", UPDATES)
@pytest.mark.parametrize("name", NAMES)
def test_keys_and_values(name: str, ruled: str) -> None:
    check(name, LAYOUTS["prefix"], UPDATES[ruled])


@pytest.mark.parametrize(
    ("which", "ruled"),
    [("no prefix", "reuse, momentum 0.9"), ("long prefix", "continue, momentum 0.9")],
)
@pytest.mark.parametrize("name", NAMES)
def test_keys_and_values_behind_other_prefixes(name: str, which: str, ruled: str) -> None:
    check(name, LAYOUTS[which], UPDATES[ruled])


@pytest.mark.parametrize(("name", "continued"), MORE)
def test_keys_and_values_of_other_attentions(name: str, continued: bool) -> None:
    check(name, FEW, Update(2, 0.3, 0.5, continued))


@pytest.mark.parametrize("continued", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_windows_that_end_together(name: str, continued: bool) -> None:
    """Each row of a batch then starts at a position of its own."""
    one, rule = LAYOUTS["prefix"], Update(2, 0.2, 0.5, continued)
    end = len(one.prefix) + max(len(window) for window in one.windows)
    starts = [end - len(window) for window in one.windows]
    check_windows(name, one, rule, method(rule, StructuredPrompting()), starts)


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_a_query(name: str) -> None:
    rule = UPDATES["continue, momentum 0.9"]
    rows = engine.logits(name, FEW, method(rule))
    tolerances.agree(rows, reference(name, FEW, FEW.windows, rule))
    assert tolerances.gap(rows, engine.logits(name, FEW, PCW())) > 100 * tolerances.MATTERS


@pytest.mark.parametrize("continued", [True, False])
def test_read_one_after_the_other_the_passages_are_one_refined_window(continued: bool) -> None:
    one, rule = LAYOUTS["prefix"], Update(2, 0.2, 0.5, continued)
    flat = [token for window in one.windows for token in window]
    rows = engine.logits("qwen3", one, method(rule, Sequential()))
    tolerances.agree(rows, reference("qwen3", one, [flat], rule))


def test_bf16_moves_by_steps_that_bf16_alone_would_round_away() -> None:
    """Ten steps of 0.001: summed in bf16 most of them would be lost."""
    rule = Update(10, 0.001, 0.0, True)
    one = FEW
    model = zoo.build(zoo.BY_NAME["llama"], dtype=torch.bfloat16)
    lm = engine.wrap(model)
    plain = windows_of(lm, one, PCW())
    moved = windows_of(lm, one, method(rule))
    # The exact update, on the same rounded weights.
    entry = zoo.BY_NAME["llama"]
    errors, ways = [], []
    for index, window in enumerate(one.windows):
        start = refined(model, entry, one.prefix, window, Update(0, 0.001, 0.0, True))
        end = refined(model, entry, one.prefix, window, rule)
        for layer in range(len(end)):
            for part in (0, 1):
                assert moved[index][layer][part].dtype == torch.bfloat16
                way = end[layer][part] - start[layer][part]
                made = moved[index][layer][part].double() - plain[index][layer][part].double()
                errors.append((made - way).square().mean())
                ways.append(way.square().mean())
    assert sum(errors) < 0.1 * sum(ways)
