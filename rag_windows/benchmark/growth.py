"""How time grows with the context."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rag_windows.benchmark.result import Cell, exponent, median
from rag_windows.benchmark.words import NONE, table


def growth(cells: Sequence[Cell]) -> list[str]:
    """Section with the exponents of each way and window length; empty for a single context."""
    rows = []
    sorts = dict.fromkeys((cell.way, cell.window, cell.ragged) for cell in cells)
    for way, window, ragged in sorts:
        own = [c for c in cells if (c.way, c.window, c.ragged) == (way, window, ragged)]
        contexts = sorted({cell.context for cell in own})
        if len(contexts) < 2:
            continue
        at = [cell.context for cell in own]
        rows.append(
            [
                way,
                f"about {window}" if ragged else f"{window}",
                f"{len(contexts)} ({contexts[0]:,} to {contexts[-1]:,})",
                _shown(at, [median(cell.prefill_s) for cell in own]),
                _shown(at, [median(cell.first_s) for cell in own]),
                _shown(at, [1 / median(cell.tokens_per_s) for cell in own]),
            ]
        )
    if not rows:
        return []
    return [
        "",
        "### Growth",
        "",
        "Exponent of time against the context, and so against the number of windows: 1 where twice "
        "as many take twice the time. It is the slope of a straight line through the logarithms of "
        "the medians over these contexts.",
        "",
        *table(
            ["way", "windows of", "contexts", "prefill", "first token", "each further token"], rows
        ),
    ]


def _shown(contexts: Sequence[int], seconds: Sequence[float]) -> str:
    slope = exponent(contexts, seconds)
    return NONE if math.isnan(slope) else f"{slope:.2f}"
