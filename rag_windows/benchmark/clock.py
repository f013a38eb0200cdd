"""When tokens came."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria


def synchronize() -> None:
    """Wait for the accelerator, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Clock(StoppingCriteria):
    """Writes down when each token is there; never stops anything."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.stamps: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Called by transformers after every token."""
        synchronize()
        self.stamps.append(time.perf_counter() - self.begun)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@dataclass(frozen=True, slots=True)
class Timing:
    """One run of one way.

    Attributes:
        encode_s: seconds for the passages, before the query is read; None where a way reads both
            as one prompt.
        stamps: seconds from the start to each generated token.
    """

    encode_s: float | None
    stamps: tuple[float, ...]

    @property
    def first_s(self) -> float:
        """Seconds to the first token."""
        return self.stamps[0]

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first, by the second."""
        return (len(self.stamps) - 1) / (self.stamps[-1] - self.stamps[0])

    def end_s(self, tokens: int) -> float:
        """Seconds to so many tokens; NaN if the run was shorter."""
        return self.stamps[tokens - 1] if tokens <= len(self.stamps) else float("nan")
