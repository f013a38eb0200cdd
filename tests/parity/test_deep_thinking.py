"""Refined windows against the update written out on dense caches, one window at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rag_windows import PCW, DeepThinking, Sequential, StructuredPrompting
from rag_windows.kv import PackedWindows
from rag_windows.prefill import EncodedContext

from . import deep_thinking, dense, engine, tolerances, zoo
from .cases import Case, case
from .deep_thinking import Update

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


def method(rule: Update) -> DeepThinking:
    positions = "continue" if rule.continued else "reuse"
    return DeepThinking(
        steps=rule.steps,
        eta=rule.eta,
        momentum=rule.momentum,
        positions=positions,  # type: ignore[arg-type]  # one of the two literals
        reader=PCW(),
    )


def windows_of(context: EncodedContext, one: Case) -> list[deep_thinking.Layers]:
    """Keys and values of each window, out of the packed ones."""
    assert isinstance(context.windows, PackedWindows)
    lengths = [len(window) for window in one.windows]
    keys = [key.split(lengths, dim=1) for key in context.windows.keys]
    values = [value.split(lengths, dim=1) for value in context.windows.values]
    return [
        [(key[index], value[index]) for key, value in zip(keys, values, strict=True)]
        for index in range(len(lengths))
    ]


def check(name: str, one: Case, rule: Update) -> None:
    context = engine.shared(name).encode_ids(one.prefix, one.windows, method=method(rule))
    model, entry = zoo.shared(name), zoo.BY_NAME[name]
    for window, layers in zip(one.windows, windows_of(context, one), strict=True):
        compare(layers, deep_thinking.refined(model, entry, one.prefix, window, rule))


def compare(layers: deep_thinking.Layers, expected: deep_thinking.Layers) -> None:
    for (key, value), (true_key, true_value) in zip(layers, expected, strict=True):
        assert key.dtype == value.dtype == torch.float32
        tolerances.agree(key, true_key)
        tolerances.agree(value, true_value)


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
    reader = replace(method(rule), reader=StructuredPrompting())
    context = engine.shared(name).encode_ids(one.prefix, one.windows, method=reader)
    end = len(one.prefix) + max(len(window) for window in one.windows)
    for window, layers in zip(one.windows, windows_of(context, one), strict=True):
        expected = deep_thinking.refined(
            zoo.shared(name), zoo.BY_NAME[name], one.prefix, window, rule, end - len(window)
        )
        compare(layers, expected)


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_a_query(name: str) -> None:
    one, rule = FEW, UPDATES["continue, momentum 0.9"]
    lm = engine.shared(name)
    rows = lm.logits(lm.encode_ids(one.prefix, one.windows, method=method(rule)), one.query)
    expected = deep_thinking.logits(
        zoo.shared(name), zoo.BY_NAME[name], one.prefix, one.windows, one.query, rule
    )
    tolerances.agree(rows, expected)
    plain = lm.logits(lm.encode_ids(one.prefix, one.windows, method=PCW()), one.query)
    assert tolerances.gap(rows, plain) > 100 * tolerances.MATTERS


def test_the_reference_without_steps_is_the_dense_one() -> None:
    """Two references written apart agree, so neither is wrong alone."""
    one = FEW
    for name in NAMES:
        model, entry = zoo.shared(name), zoo.BY_NAME[name]
        none = Update(0, 0.1, 0.0, True)
        rows = deep_thinking.logits(model, entry, one.prefix, one.windows, one.query, none)
        expected = dense.logits(model, entry.sliding, one.prefix, one.windows, one.query)
        tolerances.agree(rows, expected)


def test_each_number_matters() -> None:
    """A pass, its step, its momentum and its positions all show in the keys."""
    one, lm = LAYOUTS["prefix"], engine.shared("llama")
    rules = [
        Update(2, 0.1, 0.0, True),
        Update(3, 0.1, 0.0, True),
        Update(2, 0.2, 0.0, True),
        Update(2, 0.1, 0.9, True),
        Update(2, 0.1, 0.0, False),
    ]
    first, *others = [
        windows_of(lm.encode_ids(one.prefix, one.windows, method=method(rule)), one)
        for rule in rules
    ]
    for other in others:
        assert tolerances.gap(other[0][1][0], first[0][1][0]) > tolerances.MATTERS


def test_a_whole_step_takes_the_pass_itself() -> None:
    check("llama", FEW, Update(2, 1.0, 0.0, True))


@pytest.mark.parametrize("continued", [True, False])
def test_read_one_after_the_other_the_passages_are_one_refined_window(continued: bool) -> None:
    one, rule = LAYOUTS["prefix"], Update(2, 0.2, 0.5, continued)
    flat = [token for window in one.windows for token in window]
    positions = "continue" if continued else "reuse"
    lm = engine.shared("qwen3")
    refined = DeepThinking(2, 0.2, 0.5, positions, reader=Sequential())  # type: ignore[arg-type]  # as above
    rows = lm.logits(lm.encode_ids(one.prefix, one.windows, method=refined), one.query)
    expected = deep_thinking.logits(
        zoo.shared("qwen3"), zoo.BY_NAME["qwen3"], one.prefix, [flat], one.query, rule
    )
    tolerances.agree(rows, expected)


def test_a_window_is_refined_alone_whatever_stands_beside_it() -> None:
    one, rule = LAYOUTS["prefix"], UPDATES["continue, momentum 0.9"]
    lm = engine.shared("llama")
    together = windows_of(lm.encode_ids(one.prefix, one.windows, method=method(rule)), one)
    for index, window in enumerate(one.windows):
        single = Case(one.prefix, [window], one.query)
        context = lm.encode_ids(one.prefix, [window], method=method(rule))
        compare(together[index], windows_of(context, single)[0])


def test_bf16_moves_by_steps_that_bf16_alone_would_round_away() -> None:
    """Ten steps of 0.001: summed in bf16 most of them would be lost."""
    rule = Update(10, 0.001, 0.0, True)
    one = FEW
    model = zoo.build(zoo.BY_NAME["llama"], dtype=torch.bfloat16)
    lm = engine.wrap(model)
    plain = windows_of(lm.encode_ids(one.prefix, one.windows, method=PCW()), one)
    moved = windows_of(lm.encode_ids(one.prefix, one.windows, method=method(rule)), one)
    # The exact update, on the same rounded weights.
    entry = zoo.BY_NAME["llama"]
    errors, ways = [], []
    for index, window in enumerate(one.windows):
        start = deep_thinking.refined(model, entry, one.prefix, window, Update(0, 0.001, 0.0, True))
        end = deep_thinking.refined(model, entry, one.prefix, window, rule)
        for layer in range(len(end)):
            for part in (0, 1):
                assert moved[index][layer][part].dtype == torch.bfloat16
                way = end[layer][part] - start[layer][part]
                made = moved[index][layer][part].double() - plain[index][layer][part].double()
                errors.append((made - way).square().mean())
                ways.append(way.square().mean())
    assert sum(errors) < 0.1 * sum(ways)
