"""Linked windows against the dense reference, and their two ends: parallel and sequential."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rag_windows import APE, PCW, Linked, Sequential
from rag_windows.attention import segments
from rag_windows.prefill import EncodedContext, ToEncode, complete
from rag_windows.steps import recompute as linker
from rag_windows.steps.recompute import encode_again, key_deviation

from . import dense, engine, linked, tolerances, zoo
from .cases import RULES, Case, case

NAMES = ("llama", "qwen3", "gpt2", "gemma3", "gpt_oss", "mistral-sliding", "gemma2")
CASES = {"ragged": case(5, (7, 12, 1, 20), 6), "no prefix": case(0, (9, 4, 15), 5)}


def first(one: Case, count: int) -> list[int]:
    """Indices of the first tokens of each window but the first one."""
    chosen, start = [], 0
    for number, window in enumerate(one.windows):
        chosen += [start + i for i in range(min(count, len(window))) if number]
        start += len(window)
    return chosen


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("which", "ruled"), [("ragged", "as used"), ("no prefix", "pcw")])
def test_first_tokens(name: str, ruled: str, which: str) -> None:
    entry, model, one, rule = zoo.BY_NAME[name], zoo.shared(name), CASES[which], RULES[ruled]
    lm = engine.shared(name)
    context = lm.encode_ids(one.prefix, one.windows, method=Linked(3, reader=engine.method(rule)))
    reference, _ = linked.run(model, entry.sliding, one, first(one, 3), rule)
    assert tolerances.gap(lm.logits(context, one.query), reference) <= tolerances.fp32(reference)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("which", CASES)
def test_tokens_of_largest_deviation(name: str, which: str) -> None:
    entry, model, one = zoo.BY_NAME[name], zoo.shared(name), CASES[which]
    lm = engine.shared(name)
    expected = linked.deviations(model, entry.sliding, one)
    encoder = lm.engine.encoder.runner
    encoded = complete(lm.engine.encoder.prefill(ToEncode(one.prefix, one.windows, Linked())))
    measured = key_deviation(encoder, encoded.windows, encoded.prefix)
    assert tolerances.gap(measured, expected.float()) <= 1e-4 * float(expected.max())
    behind = len(one.windows[0])
    assert float(measured[:behind].max()) <= 1e-4 * float(expected.max())
    count = sum(-(-len(window) // 4) for window in one.windows[1:])
    chosen = (expected[behind:].topk(count).indices + behind).tolist()
    context = lm.encode_ids(one.prefix, one.windows, method=Linked(0.25, "deviation"))
    reference, _ = linked.run(model, entry.sliding, one, chosen)
    assert tolerances.gap(lm.logits(context, one.query), reference) <= tolerances.fp32(reference)
    if None in entry.sliding:  # else the query reaches too few of them to tell
        other, _ = linked.run(model, entry.sliding, one, first(one, 3))
        assert tolerances.gap(other, reference) > tolerances.MATTERS


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_each_decoded_step(name: str) -> None:
    entry, model, one = zoo.BY_NAME[name], zoo.shared(name), CASES["ragged"]
    forced = zoo.ids(9, 99)
    lm = engine.shared(name)
    context = lm.encode_ids(one.prefix, one.windows, method=Linked(0.2))
    _, steps = engine.decode(lm, context, one.query, len(forced), forced)
    longer = Case(one.prefix, one.windows, [*one.query, *forced[:-1]])
    chosen = [
        start + i
        for start, window in ((7, one.windows[1]), (19, one.windows[2]), (20, one.windows[3]))
        for i in range(-(-len(window) // 5))
    ]
    reference, _ = linked.run(model, entry.sliding, longer, chosen)
    assert tolerances.gap(steps, reference[len(one.query) - 1 :]) <= tolerances.fp32(reference)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("tokens", "choose"), [("all", "deviation"), (20, "first")])
def test_all_tokens_are_sequential(name: str, tokens: object, choose: object) -> None:
    model, one = zoo.shared(name), CASES["ragged"]
    lm = engine.shared(name)
    method = Linked(tokens, choose, reader=APE())  # type: ignore[arg-type] # parametrized
    context = lm.encode_ids(one.prefix, one.windows, method=method)
    plain = dense.plain_logits(model, one.flat, len(one.query))
    assert tolerances.gap(lm.logits(context, one.query), plain) <= tolerances.fp32(plain)
    ordinary = lm.encode_ids(one.prefix, one.windows, method=Sequential())
    tokens_of = [lm.generate_ids(each, one.query, max_new_tokens=6) for each in (context, ordinary)]
    assert tokens_of[0] == tokens_of[1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mask", [segments.MAX_MASK, 7 * 45])
def test_every_token_encoded_again_is_sequential(
    name: str, mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the pass itself, also in several pieces, not by the shortcut for all tokens."""
    monkeypatch.setattr(linker, "MAX_MASK", mask)
    model, one = zoo.shared(name), CASES["ragged"]
    lm = engine.shared(name)
    encoded = complete(lm.engine.encoder.prefill(ToEncode(one.prefix, one.windows, Linked())))
    total = sum(len(window) for window in one.windows)
    windows = encode_again(
        lm.engine.encoder.runner, encoded.windows, encoded.prefix, torch.arange(7, total)
    )
    context = lm.encode_ids(one.prefix, one.windows, method=Linked(1))
    packed = context.narrowed(windows, range(len(windows)))
    plain = dense.plain_logits(model, one.flat, len(one.query))
    rows = lm.logits(replace(packed, method=PCW()), one.query)
    assert tolerances.gap(rows, plain) <= tolerances.fp32(plain)


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens_are_parallel_bit_for_bit(name: str) -> None:
    one, reader = CASES["ragged"], engine.method(RULES["as used"])
    lm = engine.shared(name)

    def logits(context: EncodedContext) -> torch.Tensor:
        return lm.logits(context, one.query)

    unlinked = logits(lm.encode_ids(one.prefix, one.windows, method=reader))
    none = lm.encode_ids(one.prefix, one.windows, method=Linked(0, reader=reader))
    assert torch.equal(logits(none), unlinked)
    some = lm.encode_ids(one.prefix, one.windows, method=Linked(1, reader=reader))
    if None in zoo.BY_NAME[name].sliding:  # else the query reaches the last window only
        assert tolerances.gap(logits(some), unlinked) > tolerances.MATTERS


@pytest.mark.parametrize("choose", ["first", "deviation"])
def test_one_window_is_left_as_it_is(choose: object) -> None:
    lm, one = engine.shared("llama"), case(5, (9,), 4)
    method = Linked(3, choose)  # type: ignore[arg-type] # parametrized
    rows = lm.logits(lm.encode_ids(one.prefix, one.windows, method=method), one.query)
    alone = lm.logits(lm.encode_ids(one.prefix, one.windows, method=PCW()), one.query)
    assert torch.equal(rows, alone)
