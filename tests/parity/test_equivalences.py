"""Identities that hold without any reference but the plain model."""

from __future__ import annotations

import itertools

import pytest
import torch

from rag_windows import Sequential

from . import dense, engine, tolerances, zoo
from .cases import CASES, RULES, Case, case
from .dense import Rule


@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("prefix", [0, 5])
def test_one_window_is_full_attention(name: str, prefix: int) -> None:
    model, one = zoo.shared(name), case(prefix, (21,), 6)
    plain = dense.plain_logits(model, one.flat, len(one.query))
    rows = engine.rows(engine.shared(name), one, Rule())
    assert tolerances.gap(rows, plain) <= tolerances.fp32(plain)


@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("ruled", ["pcw", "as used"])
def test_no_window_is_the_plain_model(name: str, ruled: str) -> None:
    model, one = zoo.shared(name), case(9, (), 6)
    plain = dense.plain_logits(model, one.flat, len(one.query))
    rows = engine.rows(engine.shared(name), one, RULES[ruled])
    assert tolerances.gap(rows, plain) <= tolerances.fp32(plain)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_no_window_generates_bit_for_bit_as_the_plain_model(name: str) -> None:
    model, one = zoo.shared(name), case(9, (), 6)
    lm = engine.shared(name)
    context = lm.encode_ids(one.prefix, [])
    tokens, steps = engine.decode(lm, context, one.query, 8)
    plain = model.generate(
        torch.tensor([one.flat]),
        max_new_tokens=8,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert tokens == plain.sequences[0, len(one.flat) :].tolist()
    assert torch.equal(steps, torch.cat(plain.logits))


@pytest.mark.parametrize("name", zoo.NAMES)
def test_sequential_is_the_plain_model(name: str) -> None:
    model, one = zoo.shared(name), CASES["ragged"]
    lm = engine.shared(name)
    context = lm.encode_ids(one.prefix, one.windows, method=Sequential())
    plain = dense.plain_logits(model, one.flat, len(one.query))
    assert tolerances.gap(lm.logits(context, one.query), plain) <= tolerances.fp32(plain)


@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("ruled", ["as used"])
def test_order_of_windows_does_not_matter(name: str, ruled: str) -> None:
    lm, one = engine.shared(name), CASES["ragged"]
    first = engine.rows(lm, one, RULES[ruled])
    for order in itertools.islice(itertools.permutations(one.windows), 1, None, 7):
        other = engine.rows(lm, Case(one.prefix, list(order), one.query), RULES[ruled])
        assert tolerances.gap(other, first) <= tolerances.fp32(first)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_a_window_given_twice(name: str) -> None:
    """A passage given twice counts twice; S = 1/2 of "fixed ratio" takes just that back."""
    lm, one = engine.shared(name), case(5, (9,), 4)
    single = engine.rows(lm, one, Rule())
    twice = Case(one.prefix, one.windows * 2, one.query)
    halved = engine.rows(lm, twice, Rule(1.0, 0.5, "fixed ratio"))
    assert tolerances.gap(engine.rows(lm, twice, Rule()), single) > tolerances.MATTERS
    assert tolerances.gap(halved, single) <= tolerances.fp32(single)


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gpt_oss"])
def test_a_context_can_be_read_again(name: str) -> None:
    lm, one = engine.shared(name), CASES["ragged"]
    context = lm.encode_ids(one.prefix, one.windows, method=engine.method(RULES["as used"]))
    first = lm.logits(context, one.query)
    tokens = lm.generate_ids(context, one.query, max_new_tokens=4)
    lm.logits(context, zoo.ids(17, 5))
    assert tolerances.gap(lm.logits(context, one.query), first) == 0.0
    assert lm.generate_ids(context, one.query, max_new_tokens=4) == tokens


@pytest.mark.parametrize("name", ["llama", "gemma3_text-sliding"])
def test_long_decode_through_many_windows(name: str) -> None:
    """Forty windows and a decode longer than any of them keep to the reference."""
    entry, model, rule = zoo.BY_NAME[name], zoo.shared(name), RULES["as used"]
    one = case(3, tuple(1 + i * 5 % 11 for i in range(40)), 4, seed=57)
    forced = zoo.ids(40, 3)
    lm = engine.shared(name)
    context = lm.encode_ids(one.prefix, one.windows, method=engine.method(rule))
    _, steps = engine.decode(lm, context, one.query, len(forced), forced)
    reference = dense.logits(
        model, entry.sliding, one.prefix, one.windows, [*one.query, *forced[:-1]], rule
    )
    assert tolerances.gap(steps, reference[len(one.query) - 1 :]) <= tolerances.fp32(reference)
