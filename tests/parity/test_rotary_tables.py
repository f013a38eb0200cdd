"""Rotary tables that a model rewrites as prompts grow belong to the plain model and to it alone."""

from __future__ import annotations

import contextlib

import pytest
import torch

from rag_windows import LimitError

from . import engine, tolerances, zoo
from .architectures import GQA, Entry
from .cases import case
from .dense import Rule

GROWING = {
    "dynamic": Entry(
        "llama-dynamic",
        {
            **GQA,
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        },
    ),
    "longrope": Entry(
        "phi3-longrope",
        {
            **GQA,
            "sliding_window": None,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0 + i for i in range(8)],
            },
        },
    ),
}
SHORT = torch.tensor([zoo.ids(10, 1)])
LONG = torch.tensor([zoo.ids(60, 2)])


@pytest.mark.parametrize("kind", GROWING)
@torch.no_grad()
def test_plain_model_after_a_long_prompt_of_ours(kind: str) -> None:
    model = zoo.build(GROWING[kind])
    before = model(SHORT).logits
    # To refuse what makes the tables grow is an answer too.
    with contextlib.suppress(LimitError):
        engine.rows(engine.wrap(model), case(5, (40, 3), 9), Rule())
    assert torch.equal(model(SHORT).logits, before)
    assert torch.equal(model(LONG).logits, zoo.build(GROWING[kind])(LONG).logits)


@pytest.mark.parametrize("kind", GROWING)
@torch.no_grad()
def test_ours_after_a_long_prompt_of_the_plain_model(kind: str) -> None:
    model, one = zoo.build(GROWING[kind]), case(5, (12, 3), 6)
    lm = engine.wrap(model)
    before = engine.rows(lm, one, Rule())
    model(LONG)
    assert tolerances.gap(engine.rows(lm, one, Rule()), before) == 0.0
