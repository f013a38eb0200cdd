"""The engine's fp32 logits against the dense reference: every architecture, layout and rule."""

from __future__ import annotations

import copy

import pytest
import torch

from . import dense, engine, tolerances, zoo
from .cases import CASES, RULES, case

# All rules where every kind of window occurs; the other layouts with those that weigh it most.
PREFILLS = [
    *(("ragged", ruled) for ruled in RULES),
    ("no prefix", "as printed"),
    ("no prefix", "as used"),
    ("long prefix", "as used, sharp"),
    ("one-token query", "as used"),
]
STEPS = [
    *((name, "as used") for name in zoo.NAMES),
    *((name, ruled) for name in ("llama", "gemma2", "gpt_oss", "gpt2") for ruled in RULES),
]


@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize(("which", "ruled"), PREFILLS)
def test_prefill(name: str, which: str, ruled: str) -> None:
    entry, model, one, rule = zoo.BY_NAME[name], zoo.shared(name), CASES[which], RULES[ruled]
    rows = engine.rows(engine.shared(name), one, rule)
    reference = dense.logits(model, entry.sliding, one.prefix, one.windows, one.query, rule)
    assert rows.dtype == torch.float32
    assert tolerances.gap(rows, reference) <= tolerances.fp32(reference)


@pytest.mark.parametrize(("name", "ruled"), dict.fromkeys(STEPS))
def test_each_decoded_step(name: str, ruled: str) -> None:
    """Steps run one token at a time through the cache; far enough to leave a sliding reach."""
    entry, model, rule = zoo.BY_NAME[name], zoo.shared(name), RULES[ruled]
    one = case(5, (1, 7, 12), 3, seed=31)
    forced = zoo.ids(12, 99)
    lm = engine.shared(name)
    context = lm.encode_ids(one.prefix, one.windows, method=engine.method(rule))
    tokens, steps = engine.decode(lm, context, one.query, len(forced), forced)
    reference = dense.logits(
        model, entry.sliding, one.prefix, one.windows, [*one.query, *forced[:-1]], rule
    )
    assert tokens == forced
    assert tolerances.gap(steps, reference[len(one.query) - 1 :]) <= tolerances.fp32(reference)
    teacher_forced = lm.logits(context, [*one.query, *forced[:-1]])
    assert tolerances.gap(teacher_forced, reference) <= tolerances.fp32(reference)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_greedy_tokens(name: str) -> None:
    entry, model, one, rule = zoo.BY_NAME[name], zoo.shared(name), CASES["ragged"], RULES["as used"]
    lm = engine.shared(name)
    context = lm.encode_ids(one.prefix, one.windows, method=engine.method(rule))
    tokens = lm.generate_ids(context, one.query, max_new_tokens=5)
    assert len(tokens) == 5
    reference = dense.logits(
        model, entry.sliding, one.prefix, one.windows, [*one.query, *tokens[:-1]], rule
    )
    assert reference[len(one.query) - 1 :].argmax(-1).tolist() == tokens


@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("ruled", ["pcw", "as used"])
def test_bf16(name: str, ruled: str) -> None:
    """Within a bound taken from the model's own bf16 error on the same tokens."""
    entry, one, rule = zoo.BY_NAME[name], CASES["ragged"], RULES[ruled]
    model = zoo.build(entry, dtype=torch.bfloat16)
    exact = copy.deepcopy(model).float()
    rows = engine.rows(engine.wrap(model), one, rule)
    reference = dense.logits(exact, entry.sliding, one.prefix, one.windows, one.query, rule)
    own = dense.plain_logits(model, one.flat, len(one.flat))
    own_exact = dense.plain_logits(exact, one.flat, len(one.flat))
    assert rows.dtype == torch.float32
    bound = tolerances.BF16_FACTOR * tolerances.rms(own, own_exact)
    assert tolerances.rms(rows, reference) <= bound
    assert tolerances.gap(rows, reference) <= tolerances.BF16_FACTOR * tolerances.gap(
        own, own_exact
    )
