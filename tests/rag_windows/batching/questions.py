"""Questions of many kinds, and what comparing their answers needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from transformers import LogitsProcessor

from rag_windows import WindowedLM
from rag_windows.results import Generation
from tests.parity import zoo
from tests.rag_windows import small

PASSAGES = tuple(f"Passage {i}: " + "abcdefgh"[i] * (5 + 4 * (i % 3)) for i in range(8))
METHODS = ("pcw", "ape", "structured-prompting", "mateicl", "sequential")


@cache
def lm(name: str) -> WindowedLM:
    """An architecture of the zoo, with the byte tokenizer."""
    entry = zoo.BY_NAME[name]
    size = len(small.tokenizer())
    model = zoo.build(replace(entry, options={**entry.options, "vocab_size": size}))
    return WindowedLM.from_pretrained(model, tokenizer=small.tokenizer())


def mixed(count: int = 7, tokens: int = 8) -> list[dict[str, Any]]:
    """Ragged questions of all methods: some share passages, some a prefix, one has no passages."""
    made: list[dict[str, Any]] = []
    for i in range(count):
        passages = [PASSAGES[0], PASSAGES[1], PASSAGES[2 + i % 6]]
        made.append(
            {
                "query": "why" + "?" * i,
                "passages": () if i == 5 else passages[: 1 + (i + 2) % 3],
                "prefix": "Be short." if i % 2 else None,
                "method": METHODS[i % len(METHODS)],
                "max_new_tokens": tokens - i % 3,
            }
        )
    return made


class Recorder(LogitsProcessor):
    """Keeps the logits of each token."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(scores[0].clone())
        return scores


def alone(model: WindowedLM, requests: Sequence[Mapping[str, Any]]) -> list[Generation]:
    """What `generate` answers to each."""
    return [model.generate(**request) for request in requests]


def assert_same(batched: Sequence[Generation], single: Sequence[Generation]) -> None:
    """Answers are equal but for time, memory of what was shared, and rounding of the masses."""
    assert len(batched) == len(single)
    for mine, other in zip(batched, single, strict=True):
        assert mine.token_ids == other.token_ids
        assert (mine.text, mine.finish_reason) == (other.text, other.finish_reason)
        assert mine.usage.prompt_tokens == other.usage.prompt_tokens
        assert (mine.notes, mine.windows) == (other.notes, other.windows)
        assert (mine.citations is None) == (other.citations is None)
        for left, right in zip(mine.citations or (), other.citations or (), strict=True):
            assert (left.passage, left.id) == (right.passage, right.id)
            assert abs(left.mass - right.mass) < 1e-5
        for name in ("prefix_mass", "query_mass"):
            left, right = getattr(mine, name), getattr(other, name)
            assert (left is None) == (right is None)
            assert left is None or abs(left - right) < 1e-5
