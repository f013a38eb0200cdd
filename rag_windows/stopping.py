"""Reasons to stop: a closed stream, a stop string; and when the first token came."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteria

from rag_windows.detokenize import Detokenizer


class Cancelled(StoppingCriteria):
    """Stops every row once an event is set."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Bool, (rows,)."""
        return torch.full((input_ids.shape[0],), self._event.is_set(), device=input_ids.device)


class FirstToken(StoppingCriteria):
    """Never stops; remembers when the first token was there (``time.perf_counter``)."""

    def __init__(self) -> None:
        self.seen_at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Bool, (rows,), all False."""
        if self.seen_at is None:
            self.seen_at = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class StopStrings(StoppingCriteria):
    """Stops a row when its generated text holds one of the strings.

    Args:
        detokenizer: of the model's tokenizer.
        stop: the strings.
        prompt_length: tokens before the generated ones.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str], prompt_length: int) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Bool, (rows,)."""
        done = [
            self._detokenizer.find_stop(row, self._stop) is not None
            for row in input_ids[:, self._prompt_length :].tolist()
        ]
        return torch.tensor(done, device=input_ids.device)
