"""A further token taken apart."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rag_windows import WindowedLM
from rag_windows.benchmark import profile
from rag_windows.benchmark.load import load
from rag_windows.benchmark.plan import Place
from rag_windows.benchmark.profile import profile_step
from rag_windows.benchmark.result import Part, Step
from rag_windows.benchmark.shape import shape_named


@pytest.mark.timing
def test_attention_over_many_windows_is_told_apart_from_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profile, "_TOKENS", 5)  # reading what was recorded takes most of the time
    lm = WindowedLM(shape_named("tiny").build("cpu", torch.float32))
    place = Place(8192, 256, ragged=False)
    step = profile_step(lm, place, load(512, place.context, place.window))
    assert step.windows > step.tail > 0
    assert step.linear > 0
    assert step.place == place


def test_it_is_kept_with_the_other_parts() -> None:
    step = Step(64, 16, ragged=False, linear=1.0, windows=2.0, tail=3.0, rest=4.0)
    part = Part.from_json(dataclasses.asdict(Part(steps=[step])))
    assert part.steps == [step]
    assert part.steps[0].total == 10.0
