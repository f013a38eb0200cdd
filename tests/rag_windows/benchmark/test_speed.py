"""A guard against slowing down: ratios to plain transformers in one run, with wide margins.

One model is nearly all keys and values, the other nearly all weights, so that ratios don't hang on
what Python costs on a machine. One thread computes, and its processor time counts: other work on
the machine hardly changes that.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rag_windows import WindowedLM
from rag_windows.benchmark.result import ALONE, MEMORY, SEQUENTIAL, TOGETHER, Place
from rag_windows.benchmark.run import measure_crowd
from rag_windows.benchmark.workload import all_ways, load

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 96,
}
HEAVY = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
CONTEXT, WINDOW, TOKENS, ROUNDS = 3072, 128, 12, 2


pytestmark = pytest.mark.timing


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def lm(sizes: dict[str, int]) -> WindowedLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, max_position_embeddings=8192, eos_token_id=None, pad_token_id=0, **sizes
    )
    return WindowedLM(LlamaForCausalLM(config).eval())


def test_windows_stay_faster_than_one_prompt() -> None:
    """The quickest first token and the quickest step of all rounds count, for either way.

    On 2 cores with two busy loops beside it, a step is about 4 times as fast; where each step
    copies the context, as plain generate does, 0.8 times.
    """
    asked = load(1000, Place(CONTEXT, WINDOW, ragged=False))
    first = {SEQUENTIAL: torch.inf, MEMORY: torch.inf}
    step = dict(first)
    with all_ways(lm(SMALL), device=False) as ways:
        for name in [*first] * ROUNDS:
            stamps = ways[name](asked, TOKENS).stamps
            gaps = [late - soon for soon, late in itertools.pairwise(stamps)]
            first[name] = min(first[name], stamps[0])
            step[name] = min(step[name], *gaps)
    sooner, faster = first[SEQUENTIAL] / first[MEMORY], step[SEQUENTIAL] / step[MEMORY]
    print(f"first token {sooner:.1f}x sooner, a step {faster:.1f}x faster")
    assert sooner > 4
    assert faster > 1.4


def test_questions_together_stay_faster_than_one_by_one() -> None:
    """Weights are read once a step for all questions; 2.3 to 2.8 times as fast when measured."""
    place = Place(256, 64, ragged=False)
    found = measure_crowd(lm(HEAVY), 8, place, tokens=12, rounds=ROUNDS)
    crowds = {one.way: min(one.seconds) for one in found}
    print(f"8 questions {crowds[ALONE] / crowds[TOGETHER]:.1f}x faster")
    assert crowds[ALONE] > 1.5 * crowds[TOGETHER]
