"""MateICL's attention bias."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from rag_windows.errors import MethodError
from rag_windows.methods.base import Method, finite

Schedule = Literal["sqrt", "log", "thirds", "linear"]

SCHEDULES: Mapping[str, Callable[[int], float]] = MappingProxyType(
    {
        "sqrt": math.sqrt,
        "log": lambda windows: 1.0 + math.log(windows),
        "thirds": lambda windows: 1.0 + windows // 3,
        "linear": float,
    }
)
"""Weights of the query by the number of windows; all give 1 for one window."""


@dataclass(frozen=True, slots=True)
class MateICL(Method):
    """Parallel windows, and a query whose own tokens count more the more windows it reads.

    With W windows the query segment's log-sum-exp (generated tokens included) becomes
    ``l_Q + log b(W)``; context and prefix stay as they are. Source: Ahmed et al., "MateICL:
    Mitigating Attention Dispersion in Large-Scale In-Context Learning",
    https://arxiv.org/abs/2505.01110, section 3 (AtBias).

    The paper's own ``b(W)`` is not known to us exactly, so the schedule is a parameter, and the
    schedules with a name are ours:

    ======== ===================
    schedule b(W)
    ======== ===================
    sqrt     ``sqrt(W)``, the default: between no weight and Structured Prompting's W
    log      ``1 + ln W``
    thirds   ``1 + floor(W / 3)``
    linear   ``W``, the weight of Structured Prompting
    ======== ===================

    Attributes:
        schedule: one of these names, a number for the same b whatever W is, or a function from W
            to b. Only a name or a number can be written down as JSON.

    Raises:
        MethodError: an unknown name, or a number that is not finite and above 0.
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
        if not good:
            raise MethodError(
                f"MateICL schedule must be one of {list(SCHEDULES)}, a finite number above 0, or a "
                f"function from the number of windows to such a number; got {schedule!r}."
            )

    def query_weight(self, windows: int) -> float:
        """b(W) of the schedule."""
        schedule = self.schedule
        if isinstance(schedule, int | float):
            return float(schedule)
        return SCHEDULES[schedule](windows) if isinstance(schedule, str) else schedule(windows)
