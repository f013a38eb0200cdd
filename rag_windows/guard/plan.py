"""What a request carries for its guard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rag_windows.errors import LimitError
from rag_windows.guard.settings import Guard

if TYPE_CHECKING:
    from rag_windows.request import Request


@dataclass(frozen=True, slots=True)
class FallbackPlan:
    """A guard, and the other way to answer.

    Attributes:
        guard: its numbers.
        spread: threshold of the signal "multi-hop", or None without one.
        ordinary: the request with passages read one after the other; None if they don't fit.
        obstacle: why they don't; empty if they do.
    """

    guard: Guard
    spread: float | None
    ordinary: Request | None
    obstacle: str = ""


def with_plan(
    request: Request,
    guard: Guard | None,
    calibrated: Mapping[str, Any] | None,
    ordinary: Callable[[], Request],
) -> Request:
    """A request with its guard; as it is without one, without windows, or if it is ordinary.

    Args:
        request: as it was asked.
        guard: or None.
        calibrated: the entry ``guard`` of a calibration profile, or None.
        ordinary: makes the request with passages read one after the other.
    """
    if guard is None or not request.parts.windows or not request.method.windowed:
        return request
    spread = guard.spread
    if spread is None and calibrated is not None:
        spread = float(calibrated["threshold"])
    try:
        other = replace(ordinary(), started=request.started)
    except LimitError as error:
        return replace(request, fallback=FallbackPlan(guard, spread, None, str(error)))
    return replace(request, fallback=FallbackPlan(guard, spread, other))
