"""The engine's logits against the dense reference: every architecture, layout and rule."""

from __future__ import annotations

import copy

import pytest
import torch

from . import dense, engine, tolerances, zoo
from .cases import CASES, RULES, case, expected, expected_steps

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
    one, rule = CASES[which], RULES[ruled]
    rows = engine.logits(name, one, engine.method(rule))
    assert rows.dtype == torch.float32
    tolerances.agree(rows, expected(name, one, rule))


@pytest.mark.parametrize(("name", "ruled"), dict.fromkeys(STEPS))
def test_each_decoded_step(name: str, ruled: str) -> None:
    """Steps run one token at a time through the cache; far enough to leave a sliding reach."""
    rule, forced = RULES[ruled], zoo.ids(12, 99)
    one = case(5, (1, 7, 12), 3, seed=31)
    steps = engine.steps(name, one, engine.method(rule), forced)
    tolerances.agree(steps, expected_steps(name, one, rule, forced))
    context = engine.encoded(name, one, engine.method(rule))
    teacher_forced = engine.shared(name).logits(context, [*one.query, *forced[:-1]])
    tolerances.agree(teacher_forced, expected(name, one, rule, forced[:-1]))


@pytest.mark.parametrize("name", zoo.NAMES)
def test_greedy_tokens(name: str) -> None:
    one, rule = CASES["ragged"], RULES["as used"]
    context = engine.encoded(name, one, engine.method(rule))
    tokens = engine.shared(name).generate_ids(context, one.query, max_new_tokens=5)
    assert len(tokens) == 5
    assert expected_steps(name, one, rule, tokens).argmax(-1).tolist() == tokens


@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("ruled", ["pcw", "as used"])
def test_bf16(name: str, ruled: str) -> None:
    """Within a bound taken from the model's own bf16 error on the same tokens."""
    entry, one, rule = zoo.BY_NAME[name], CASES["ragged"], RULES[ruled]
    model = zoo.build(entry, dtype=torch.bfloat16)
    exact = copy.deepcopy(model).float()
    rows = engine.rows(engine.wrap(model), one, rule)
    assert rows.dtype == torch.float32
    reference = dense.logits(exact, entry.sliding, one.prefix, one.windows, one.query, rule)
    tolerances.agree_in_bf16(rows, reference, model, exact, one.flat)
