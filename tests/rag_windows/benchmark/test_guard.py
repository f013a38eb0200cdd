"""A guard against slowing down: ratios to plain transformers in one run, with wide margins."""

from __future__ import annotations

import torch

from rag_windows import WindowedLM
from rag_windows.benchmark.crowd import ALONE, measure_crowd
from rag_windows.benchmark.load import load
from rag_windows.benchmark.shape import Shape
from rag_windows.benchmark.way import MEMORY, SEQUENTIAL, all_ways

SMALL = Shape(
    "small",
    "llama",
    {
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    },
)
TOKENS, ROUNDS = 16, 2


def test_windows_stay_faster_than_one_prompt() -> None:
    """Margins are wide, and the quickest round counts, so that a noisy machine is no failure."""
    lm = WindowedLM(SMALL.build("cpu", torch.float32))
    asked = load(1000, 6144, 128)
    first: dict[str, float] = {}
    speed: dict[str, float] = {}
    with all_ways(lm, device=False) as ways:
        chosen = [way for way in ways if way.name in (SEQUENTIAL, MEMORY)]
        for _ in range(ROUNDS):
            for way in chosen:
                timing = way.run(asked, TOKENS)
                first[way.name] = min(first.get(way.name, 1e9), timing.first_s)
                speed[way.name] = max(speed.get(way.name, 0.0), timing.tokens_per_s)
    assert first[SEQUENTIAL] > 5 * first[MEMORY]
    assert speed[MEMORY] > 1.3 * speed[SEQUENTIAL]


def test_questions_together_stay_faster_than_one_by_one() -> None:
    lm = WindowedLM(SMALL.build("cpu", torch.float32))
    crowds = {one.way: min(one.seconds) for one in measure_crowd(lm, 8, 1024, 128, 12, ROUNDS)}
    together = next(seconds for way, seconds in crowds.items() if way != ALONE)
    assert crowds[ALONE] > 1.2 * together
