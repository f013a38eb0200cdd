"""The engine in bf16, within a bound taken from the model's own bf16 error on the same tokens."""

from __future__ import annotations

import copy

import pytest
import torch

from . import dense, engine, tolerances, zoo
from .cases import CASES, RULES


@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("ruled", ["pcw", "as used"])
def test_bf16(name: str, ruled: str) -> None:
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
