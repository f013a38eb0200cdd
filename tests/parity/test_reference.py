"""The dense reference itself, against the models as transformers runs them. Needs no engine."""

from __future__ import annotations

import pytest
import torch

from . import dense, tolerances, zoo
from .cases import CASES, RULES, case, expected, plain


@pytest.mark.parametrize("name", zoo.NAMES)
def test_one_window_is_the_plain_model(name: str) -> None:
    one = case(5, (20,), 6)
    tolerances.agree(expected(name, one), plain(name, one))


@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("which", CASES)
def test_explicit_softmax_is_the_masked_forward(name: str, which: str) -> None:
    entry, one = zoo.BY_NAME[name], CASES[which]
    packed = dense.pack(one.prefix, one.windows, one.query)
    masked = dense.masked_logits(zoo.shared(name), entry.sliding, packed, entry.mask_by_type)
    tolerances.agree(masked, expected(name, one))


@pytest.mark.parametrize("name", zoo.NAMES)
def test_rules_move_the_logits(name: str) -> None:
    rows = [expected(name, CASES["ragged"], rule) for rule in RULES.values()]
    for i, first in enumerate(rows):
        for second in rows[:i]:
            assert tolerances.gap(first, second) > tolerances.MATTERS


@pytest.mark.parametrize("name", [n for n in zoo.NAMES if any(zoo.BY_NAME[n].sliding)])
def test_sliding_layers_matter(name: str) -> None:
    model, one = zoo.shared(name), CASES["ragged"]
    wide = dense.logits(model, [None] * 9, one.prefix, one.windows, one.query)
    assert tolerances.gap(expected(name, one), wide) > tolerances.MATTERS


def test_twin_leaves_the_model_alone() -> None:
    model = zoo.build(zoo.BY_NAME["llama"])
    one = CASES["ragged"]
    before = dense.plain_logits(model, one.flat, 5)
    dense.logits(model, (None, None), one.prefix, one.windows, one.query)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(dense.plain_logits(model, one.flat, 5), before)


def test_rule_by_hand() -> None:
    """Two context keys and one of the query, one head, worked out on paper."""
    packed = dense.pack([], [[1], [2]], [3])
    rule = dense.Rule(temperature=0.5, scale=0.8)
    logits = torch.tensor([[[[0.0, 0, 0], [0, 0, 0], [0.3, -0.2, 0.1]]]], dtype=torch.float64)
    row = dense.weights(logits, None, packed.visible(None), packed, rule)[0, 0, 2]
    sharp = torch.tensor([0.6, -0.4], dtype=torch.float64).exp()
    mass = sharp.sum() ** 0.8
    own = torch.tensor(0.1, dtype=torch.float64).exp()
    expected = torch.cat([mass * sharp / sharp.sum(), own[None]]) / (mass + own)
    torch.testing.assert_close(row, expected, rtol=1e-12, atol=1e-12)
