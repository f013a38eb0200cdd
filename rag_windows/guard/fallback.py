"""The record of a guard that spoke up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Signal = Literal["few short passages", "disagreement", "multi-hop"]


@dataclass(frozen=True, slots=True)
class Fallback:
    """Why an answer was, or should have been, given in the ordinary way.

    Attributes:
        signal: which of the guard's signals spoke.
        measured: its value: tokens of all passages, nats, or a spread.
        threshold: what it was held against.
        taken: whether the passages were read one after the other; False where they would not have
            fitted the model's positions, and were read in windows after all.
        message: all this in a sentence.
    """

    signal: Signal
    measured: float
    threshold: float
    taken: bool
    message: str

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON."""
        return {name: getattr(self, name) for name in Fallback.__slots__}
