"""Figures in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rag_windows.benchmark.result import median

NONE = "-"
"""Where a figure was not taken."""


def spread(values: Sequence[float], unit: str) -> str:
    """Median with the smallest and the largest."""
    if not values or math.isnan(median(values)):
        return NONE
    middle, low, high = (number(one) for one in (median(values), min(values), max(values)))
    return f"{middle} {unit} ({low} to {high})" if len(values) > 1 else f"{middle} {unit}"


def number(value: float) -> str:
    """Three figures."""
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:,.0f}"


def percent(share: float) -> str:
    """Rounded down, so that no aim seems met that is not."""
    return NONE if math.isnan(share) else f"{math.floor(share * 100)}%"


def times(slow: Sequence[float], fast: Sequence[float]) -> str:
    """How many times as large the median is, rounded down."""
    ratio = median(slow) / median(fast) if slow and fast else math.nan
    return NONE if math.isnan(ratio) else f"{math.floor(ratio * 100) / 100:.2f}x"


def megabytes(size: float) -> str:
    """Millions of bytes."""
    return f"{size / 1e6:,.0f} MB"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
