"""What tests of many calls at once need, in both frameworks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from rag_windows.batching.loop import BatchLoop

DOCUMENTS = tuple(f"Document {i}: " + "abcdefgh"[i] * (9 + 4 * (i % 3)) for i in range(8))
TOKENS = 30


def documents(question: int) -> list[str]:
    """Two that all questions read, and one that every eighth reads."""
    return [*DOCUMENTS[:2], DOCUMENTS[2 + question % 6]]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each step of a batch, from now on."""
    made: list[int] = []
    step = BatchLoop.step

    def counting(self: BatchLoop) -> Any:
        if self.rows:
            made.append(len(self.rows))
        return step(self)

    monkeypatch.setattr(BatchLoop, "step", counting)
    return made


def assert_shared(steps: Sequence[int], tokens: int) -> None:
    """So many tokens came of far fewer forward passes.

    The first question of many may be taken for a lone one, which generates outside of the batch.
    """
    assert tokens * 0.9 <= sum(steps) <= tokens
    assert len(steps) < tokens / 3


class Broken(LogitsProcessor):
    """Fails at the third token."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("broken on purpose")
        return scores


class Endless(LogitsProcessor):
    """Counts tokens, and never lets the text end."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores[:, 1] = -torch.inf
        return scores
