"""Identities that hold without any reference but the plain model."""

from __future__ import annotations

import itertools

import pytest
import torch

from rag_windows import PCW, Sequential

from . import engine, tolerances, zoo
from .cases import CASES, RULES, Case, case, expected_steps, plain
from .dense import Rule


@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("prefix", [0, 5])
def test_one_window_is_full_attention(name: str, prefix: int) -> None:
    one = case(prefix, (21,), 6)
    tolerances.agree(engine.logits(name, one, PCW()), plain(name, one))


@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("ruled", ["pcw", "as used"])
def test_no_window_is_the_plain_model(name: str, ruled: str) -> None:
    one = case(9, (), 6)
    tolerances.agree(engine.logits(name, one, engine.method(RULES[ruled])), plain(name, one))


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
    one = CASES["ragged"]
    tolerances.agree(engine.logits(name, one, Sequential()), plain(name, one))


@pytest.mark.parametrize("name", zoo.NAMES)
def test_order_of_windows_does_not_matter(name: str) -> None:
    one, method = CASES["ragged"], engine.method(RULES["as used"])
    first = engine.logits(name, one, method)
    for order in itertools.islice(itertools.permutations(one.windows), 1, None, 7):
        other = Case(one.prefix, list(order), one.query)
        tolerances.agree(engine.logits(name, other, method), first)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_a_window_given_twice(name: str) -> None:
    """A passage given twice counts twice; S = 1/2 of "fixed ratio" takes just that back."""
    lm, one = engine.shared(name), case(5, (9,), 4)
    single = engine.rows(lm, one, Rule())
    twice = Case(one.prefix, one.windows * 2, one.query)
    halved = engine.rows(lm, twice, Rule(1.0, 0.5, "fixed ratio"))
    assert tolerances.gap(engine.rows(lm, twice, Rule()), single) > tolerances.MATTERS
    tolerances.agree(halved, single)


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
    rule, forced = RULES["as used"], zoo.ids(40, 3)
    one = case(3, tuple(1 + i * 5 % 11 for i in range(40)), 4, seed=57)
    steps = engine.steps(name, one, engine.method(rule), forced)
    tolerances.agree(steps, expected_steps(name, one, rule, forced))
