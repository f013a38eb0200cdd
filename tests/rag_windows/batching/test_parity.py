"""Each row of a batch against the same question asked alone."""

from __future__ import annotations

import pytest
import torch

from tests.parity import tolerances
from tests.rag_windows.batching import questions

NAMES = ("llama", "qwen3", "gpt2", "gemma3_text-sliding", "gpt_oss", "gemma2", "mistral-sliding")


@pytest.mark.parametrize("name", NAMES)
def test_answers_and_logits_are_those_of_generate(name: str) -> None:
    model = questions.lm(name)
    single, batched = questions.mixed(), questions.mixed()
    theirs = [questions.Recorder() for _ in single]
    ours = [questions.Recorder() for _ in single]
    for request, recorder in zip(single, theirs, strict=True):
        request["logits_processor"] = [recorder]
    for request, recorder in zip(batched, ours, strict=True):
        request["logits_processor"] = [recorder]
    expected = questions.alone(model, single)
    # Four at a time: the others join while some are in the middle of their answers.
    questions.assert_same(model.generate_batch(batched, max_rows=4), expected)
    for mine, other in zip(ours, theirs, strict=True):
        reference = torch.stack(other.seen)
        gap = tolerances.gap(torch.stack(mine.seen), reference)
        assert gap <= tolerances.fp32(reference)
