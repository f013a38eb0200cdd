"""Recorded steps give what ordinary steps give."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from rag_windows import APE, PCW, StructuredPrompting
from rag_windows.attention import backends, mix
from rag_windows.attention.backends import choice
from rag_windows.rescaling import Method
from rag_windows.step.graphs import Run
from tests.parity.cases import CASES, Case
from tests.rag_windows import small

from . import models

COUNT = 12
METHODS = {
    "pcw": PCW(),
    "ape": APE(temperature=0.7, scale=0.8),
    "weighed query": StructuredPrompting(),
}
TOLERANCE = 1e-5


def compared(name: str, case: Case, method: Method) -> None:
    plain = models.ordinary(name)
    expected, wanted = models.decode(
        plain,
        plain.encode_ids(case.prefix, case.windows, method=method),
        case.query,
        COUNT,
    )
    lm, tapes = models.recorded(name)
    context = lm.encode_ids(case.prefix, case.windows, method=method)
    ids, logits = models.decode(lm, context, case.query, COUNT)
    assert tapes.recorded == 1
    assert tapes.played > COUNT // 2
    assert ids == expected
    scale = wanted.abs().amax()
    assert ((logits - wanted).abs().amax() / scale).item() <= TOLERANCE


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("name", models.NAMES)
def test_on_every_layout(name: str, case: Case) -> None:
    compared(name, case, METHODS["ape"])


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
@pytest.mark.parametrize("name", ["llama", "gemma3_text-sliding"])
def test_with_every_kind_of_merge(name: str, method: Method) -> None:
    compared(name, CASES["ragged"], method)


def test_the_tail_is_what_an_ordinary_one_would_be() -> None:
    case = CASES["ragged"]
    tails = []
    for lm in (models.ordinary("llama"), models.recorded("llama")[0]):
        context = lm.encode_ids(case.prefix, case.windows)
        raw = lm._decoder.generate(
            context, case.query, options={"max_new_tokens": COUNT, "do_sample": False}
        ).raw
        tails.append(raw.past_key_values)
    expected, tail = tails
    assert tail.session is None
    assert not tail.placed
    assert tail.get_seq_length() == expected.get_seq_length()
    for mine, other in zip(tail.layers, expected.layers, strict=True):
        torch.testing.assert_close(mine.keys, other.keys, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(mine.values, other.values, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("method", ["ape", "structured-prompting"])
def test_citations_are_measured_in_recorded_steps(method: str) -> None:
    passages = ["The crown is made of gold.", "Rain fell all day.", "A queen wore it."]
    question = "What is the crown made of?"
    options: dict[str, Any] = {
        "max_new_tokens": 20,
        "do_sample": False,
        "method": method,
        "min_new_tokens": 20,
    }
    expected = small.lm().generate(question, passages, **options)
    lm, tapes = models.recorded_small()
    answer = lm.generate(question, passages, **options)
    assert tapes.played > 10
    assert answer.text == expected.text
    for mine, other in zip(answer.citations or (), expected.citations or (), strict=True):
        assert mine.mass == pytest.approx(other.mass, abs=1e-5)
    assert answer.prefix_mass == pytest.approx(expected.prefix_mass, abs=1e-5)
    assert answer.query_mass == pytest.approx(expected.query_mass, abs=1e-5)


def test_sampled_tokens_are_the_same_with_a_seed() -> None:
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "seed": 5, "top_p": 0.9}
    expected = small.lm().generate("Why?", ["Because of rain.", "No."], **options)
    lm, tapes = models.recorded_small()
    answer = lm.generate("Why?", ["Because of rain.", "No."], **options)
    assert tapes.recorded == 1
    assert answer.token_ids == expected.token_ids


class Again:
    """Takes the step once more, with Triton: what its interpreter does is on no tape."""

    device = torch.device("cpu")
    errors = (RuntimeError,)
    played = 0

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self, run: Run) -> Run:
        def replay() -> tuple[torch.Tensor, ...]:
            self.played += 1
            with backends.forced("triton"):
                return run()

        return replay


# Grouped heads, a soft cap and sliding layers, attention sinks.
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles, and the models are here")
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_with_the_triton_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    merged: list[Any] = []

    def attend_merged(*args: Any) -> torch.Tensor | None:
        output = backends.attend_merged(*args)
        if choice.names("cpu") == ("triton",):
            merged.append(output)
        return output

    monkeypatch.setattr(mix, "attend_merged", attend_merged)
    case, method = CASES["ragged"], METHODS["ape"]
    plain = models.ordinary(name)
    context = plain.encode_ids(case.prefix, case.windows, method=method)
    expected, wanted = models.decode(plain, context, case.query, 5)
    lm, again = models.recorded(name, Again())
    context = lm.encode_ids(case.prefix, case.windows, method=method)
    ids, logits = models.decode(lm, context, case.query, 5)
    assert again.played == 2
    assert merged
    assert all(output is not None for output in merged)
    assert ids == expected
    scale = wanted.abs().amax()
    assert ((logits - wanted).abs().amax() / scale).item() <= 2 * TOLERANCE
