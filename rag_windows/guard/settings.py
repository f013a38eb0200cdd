"""When the guard answers in the ordinary way: its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rag_windows.errors import InputError

FEW_PASSAGES = 4
FEW_TOKENS = 1024
"""Defaults of `Guard`; where they come from stands in docs/guard.md."""


@dataclass(frozen=True, slots=True)
class Guard:
    """What makes ``fallback=`` read the passages one after the other instead of in windows.

    Each signal falls back for itself; the first one that does is told in `Generation.fallback`.

    Attributes:
        passages, tokens: signal "few short passages": at most so many passages, of at most so many
            tokens together, are read in the ordinary way at once, before anything is encoded. 0
            passages switch it off.
        disagreement: signal "disagreement": the most-attended windows, each asked alone, give the
            first answer token distributions whose divergence is above this, in nats; two windows
            differ by ln 2 = 0.69 at most. None, the default, switches it off: measured, it brought
            nothing, see docs/guard.md.
        spread: signal "multi-hop": the attention of the first answer tokens is spread over several
            passages by more than this, see `rag_windows.calibration.spread.mass_spread`. None takes
            the threshold of the calibration profile; without one the signal is off, and so it is
            with ``math.inf``.
        rows: answer tokens that are written, and thrown away, to measure attention.
        asked: how many of the most-attended windows are asked alone.

    Raises:
        InputError: a number outside its domain.
    """

    passages: int = FEW_PASSAGES
    tokens: int = FEW_TOKENS
    disagreement: float | None = None
    spread: float | None = None
    rows: int = 32
    asked: int = 4

    def __post_init__(self) -> None:
        for name, least in (("passages", 0), ("tokens", 0), ("rows", 1), ("asked", 2)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"Guard {name} must be a whole number from {least} on: {value!r}.")
        for name in ("disagreement", "spread"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not value >= 0  # NaN is not, either
            ):
                raise InputError(f"Guard {name} must be None or a number from 0 on: {value!r}.")


FallbackOption = Literal["sequential"] | Guard | None
"""What ``fallback=`` takes: "sequential" is a `Guard` with its defaults."""


def guard_of(option: FallbackOption) -> Guard | None:
    """The guard of an option.

    Raises:
        InputError: it is none.
    """
    if option is None or isinstance(option, Guard):
        return option
    if option == "sequential":
        return Guard()
    raise InputError(f"fallback must be None, 'sequential' or a Guard, got {option!r}.")
