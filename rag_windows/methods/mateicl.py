"""MateICL's attention bias."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from rag_windows.methods.base import Method, finite

Schedule = Literal["sqrt", "log", "thirds", "linear"]

SCHEDULES: Mapping[str, Callable[[int], float]] = {
    "sqrt": math.sqrt,
    "log": lambda windows: 1.0 + math.log(windows),
    "thirds": lambda windows: 1.0 + windows // 3,
    "linear": float,
}
"""Weights of the query by the number of windows; all give 1 for one window."""


@dataclass(frozen=True, slots=True)
class MateICL(Method):
    """Parallel windows; the more windows there are, the more the query's own tokens count.

    With W windows the query segment's log-sum-exp (generated tokens included) becomes
    ``l_Q + log b(W)``; context and prefix stay as they are. Source: Ahmed et al., "MateICL:
    Mitigating Attention Dispersion in Large-Scale In-Context Learning",
    https://arxiv.org/abs/2505.01110, section 3 (AtBias).

    The paper does not give ``b(W)`` exactly, so the named schedules are our own:
    "sqrt" is ``sqrt(W)``, between no weight and that of Structured Prompting, "log" is
    ``1 + ln W``, "thirds" is ``1 + floor(W / 3)``, and "linear" is ``W``, as Structured Prompting
    has it.

    Attributes:
        schedule: one of these names, a number for the same b whatever W is, or a function from W
            to b. Only a name or a number can be written down as JSON.
    """

    schedule: Schedule | float | Callable[[int], float] = "sqrt"

    name: ClassVar[str] = "mateicl"
    formula: ClassVar[str] = "l = l_C; query: l_Q + log b(W)"
    paper: ClassVar[str] = "arXiv:2505.01110"

    def __post_init__(self) -> None:
        schedule = self.schedule
        if isinstance(schedule, str):
            good = schedule in SCHEDULES
        elif isinstance(schedule, int | float):
            good = finite(schedule) and schedule > 0
        else:
            good = callable(schedule)
        wanted = "a finite number above 0, or a function of the number of windows"
        self.require("schedule", good, f"one of {list(SCHEDULES)}, {wanted}")

    def query_weight(self, windows: int) -> float:
        """b(W) of the schedule."""
        schedule = self.schedule
        if isinstance(schedule, int | float):
            return float(schedule)
        return SCHEDULES[schedule](windows) if isinstance(schedule, str) else schedule(windows)
