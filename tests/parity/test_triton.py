"""The matrix of the engine with the Triton kernels, which run in an interpreter without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rag_windows.attention import backends, mix
from rag_windows.attention.mass import MassRecorder

from . import dense, engine, tolerances, zoo
from .cases import CASES, RULES, case

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are compiled, and these models are on the CPU"
)

# Grouped heads, a soft cap and sliding layers, attention sinks, learned positions.
NAMES = ("llama", "gemma2", "gpt_oss", "gpt2")


# All of them with one rule, one of them with the others.
PREFILLS = [*((name, "as used") for name in NAMES), ("llama", "pcw"), ("llama", "as printed")]


class Reading:
    """What is read here is read by Triton wherever it serves.

    Attributes:
        merged: each answer of a layer that the kernels merged themselves.
    """

    def __init__(self) -> None:
        self.merged: list[Tensor] = []

    def attend_merged(self, *args: Any) -> Tensor | None:
        answer = backends.attend_merged(*args)
        if answer is not None:
            self.merged.append(answer)
        return answer


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Reading:
    made = Reading()
    monkeypatch.setattr(mix, "attend_merged", made.attend_merged)
    return made


def layers(model: PreTrainedModel) -> int:
    return int(model.config.num_hidden_layers)


@pytest.mark.parametrize(("name", "ruled"), PREFILLS)
def test_prefill(name: str, ruled: str, reading: Reading) -> None:
    entry, model, one, rule = zoo.BY_NAME[name], zoo.shared(name), CASES["ragged"], RULES[ruled]
    lm = engine.shared(name)
    context = lm.encode_ids(one.prefix, one.windows, method=engine.method(rule))
    with backends.forced("triton"):
        rows = lm.logits(context, one.query)
    reference = dense.logits(model, entry.sliding, one.prefix, one.windows, one.query, rule)
    assert tolerances.gap(rows, reference) <= tolerances.fp32(reference)
    assert len(reading.merged) == layers(model)


@pytest.mark.parametrize("name", NAMES[:3])
def test_each_decoded_step(name: str, reading: Reading) -> None:
    entry, model, rule = zoo.BY_NAME[name], zoo.shared(name), RULES["as used"]
    one = case(5, (1, 7, 12), 3, seed=31)
    tokens = zoo.ids(2, 99)
    lm = engine.shared(name)
    context = lm.encode_ids(one.prefix, one.windows, method=engine.method(rule))
    with backends.forced("triton"):
        _, steps = engine.decode(lm, context, one.query, len(tokens), tokens)
    reference = dense.logits(
        model, entry.sliding, one.prefix, one.windows, [*one.query, *tokens[:-1]], rule
    )
    assert tolerances.gap(steps, reference[len(one.query) - 1 :]) <= tolerances.fp32(reference)
    assert len(reading.merged) == layers(model) * len(tokens)


def test_rows_of_a_batch(reading: Reading) -> None:
    """They are folded into the rows that read the context, and come out in order."""
    lm = engine.shared("llama")
    one, rule = CASES["ragged"], RULES["as used"]
    context = lm.encode_ids(one.prefix, one.windows, method=engine.method(rule))
    answers = []
    for name in ("triton", "cpu"):
        with backends.forced(name):
            answers.append(lm.generate_ids(context, one.query, max_new_tokens=2, num_beams=2))
    assert answers[0] == answers[1]
    assert {answer.shape[0] for answer in reading.merged} >= {2}


def test_masses_are_recorded_beside_the_kernel(reading: Reading) -> None:
    """Citations need the context's own lse, so then the merge takes steps."""
    lm = engine.shared("llama")
    one = CASES["ragged"]
    context = lm.encode_ids(one.prefix, one.windows, method=engine.method(RULES["as used"]))
    ids = torch.tensor([one.query])
    shares = []
    for name in ("triton", "cpu"):
        recorder = MassRecorder(context.query_start)
        with backends.forced(name):
            lm._decoder.forward(context, ids, mass=recorder)
        shares.append(recorder.average([context.query_start + 1], [0]))
    assert reading.merged == []
    torch.testing.assert_close(shares[0], shares[1], atol=1e-5, rtol=0)
