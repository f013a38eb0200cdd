"""Token by token, at a pace that a test can watch."""

from __future__ import annotations

import threading
import time

import torch
from transformers import LogitsProcessor

from tests.integrations.llama_index.cases import reader


class Pace(LogitsProcessor):
    """Takes its time for each token, says the same letter again and again, and counts.

    Args:
        seconds: a token.
        fails_at: the token, counted from 1, at which ``error`` is raised.
        error: see there.
    """

    def __init__(
        self, seconds: float = 0.01, fails_at: int = 0, error: Exception | None = None
    ) -> None:
        self._seconds = seconds
        self._fails_at = fails_at
        self._error = error or RuntimeError("the worker broke")
        self.last = 0.0
        tokenizer = reader().tokenizer
        assert tokenizer is not None
        self._letter = tokenizer.encode("a", add_special_tokens=False)[-1]
        self.tokens = 0
        self.slowest = 0.0
        self.started = threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        now = time.perf_counter()
        if self.tokens:
            self.slowest = max(self.slowest, now - self.last)
        self.last = now
        self.tokens += 1
        if self.tokens == self._fails_at:
            raise self._error
        self.started.set()
        time.sleep(self._seconds)
        said = torch.full_like(scores, -torch.inf)
        said[:, self._letter] = 0.0
        return said
