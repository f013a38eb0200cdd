"""What the released APE code gives, against the reference and the engine."""

from __future__ import annotations

import pytest
import torch

from rag_windows import APE

from . import dense, engine, golden_ape, tolerances

NUMBERS = range(golden_ape.COUNT)


@pytest.mark.parametrize("number", NUMBERS)
def test_reference_meets_the_released_code(number: int) -> None:
    golden = golden_ape.load(number)
    rule = dense.Rule(golden.temperature, golden.temperature * golden.scale)
    one = golden.case
    rows = dense.logits(
        golden_ape.model(),
        (None, None),
        one.prefix,
        one.windows,
        [*one.query, *golden.greedy],
        rule,
    )
    assert tolerances.gap(rows, golden.logits) <= tolerances.GOLDEN


@pytest.mark.parametrize("number", NUMBERS)
def test_engine_prefill_and_decoded_rows(number: int) -> None:
    golden = golden_ape.load(number)
    one = golden.case
    method = APE.from_released(golden.temperature, golden.scale)
    lm = engine.wrap(golden_ape.model())
    context = lm.encode_ids(one.prefix, one.windows, method=method)
    rows = lm.logits(context, [*one.query, *golden.greedy])
    assert tolerances.gap(rows, golden.logits) <= tolerances.GOLDEN
    assert tolerances.gap(lm.logits(context, one.query), golden.logits[: len(one.query)]) <= (
        tolerances.GOLDEN
    )


@pytest.mark.parametrize("number", NUMBERS)
def test_engine_generates_the_same_tokens(number: int) -> None:
    golden = golden_ape.load(number)
    one = golden.case
    method = APE.from_released(golden.temperature, golden.scale)
    lm = engine.wrap(golden_ape.model())
    context = lm.encode_ids(one.prefix, one.windows, method=method)
    tokens, steps = engine.decode(lm, context, one.query, len(golden.greedy))
    assert tokens == golden.greedy
    last = len(one.query) - 1
    expected = golden.logits[last : last + len(tokens)]
    assert tolerances.gap(steps, expected) <= tolerances.GOLDEN
    assert torch.equal(steps.argmax(-1), torch.tensor(golden.greedy))
