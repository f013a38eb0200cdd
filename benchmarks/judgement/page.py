"""The page: tables between markers, in the middle of what people wrote."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from benchmarks.judgement.summary import Summary
from rag_windows.evaluation.statistics.estimate import Estimate

_BLOCK = re.compile(
    r"(?P<open><!-- figures: (?P<name>[a-z -]+) -->\n).*?(?P<close><!-- end of figures -->)", re.S
)
NOT_RUN = "*Not run.*\n"


class PageError(RuntimeError):
    """A page without markers, or with one that nothing is known of."""


def fill_page(page: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """Put every block between its markers.

    Args:
        page: Markdown with ``<!-- figures: NAME -->`` and ``<!-- end of figures -->`` around what
            is replaced.
        blocks: text by name.

    Raises:
        PageError: a name on the page that is no block, or a block that the page has no place for.
    """
    places = [found["name"] for found in _BLOCK.finditer(page)]
    if sorted(places) != sorted(blocks):
        raise PageError(
            f"The page has places for {sorted(places)}, and the figures are {sorted(blocks)}; each "
            "needs exactly one <!-- figures: NAME --> with an <!-- end of figures -->."
        )
    return _BLOCK.sub(
        lambda found: f"{found['open']}{blocks[found['name']]()}{found['close']}", page
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, or a line that says there is nothing."""
    if not rows:
        return NOT_RUN
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def percent(estimate: Estimate | None, mark: str = "") -> str:
    """A share with its interval, in percent."""
    if estimate is None:
        return ""
    value, low, high = (100 * x for x in (estimate.value, estimate.low, estimate.high))
    return f"{value:.1f}{mark} ({low:.1f}–{high:.1f})"


def points(estimate: Estimate | None) -> str:
    """A difference of shares with its interval, in percentage points."""
    if estimate is None:
        return ""
    value, low, high = (100 * x for x in (estimate.value, estimate.low, estimate.high))
    return f"{value:+.1f} ({low:+.1f} to {high:+.1f})"


def arrow(estimate: Estimate | None) -> str:
    """Whether a difference's whole interval is on one side of zero."""
    if estimate is None or estimate.low <= 0 <= estimate.high:
        return ""
    return " ↑" if estimate.low > 0 else " ↓"


def accuracy_tables(summary: Summary, order: Sequence[str]) -> str:
    """Accuracy of every method at every number of passages, a table for each task and model."""
    parts = []
    for model, task in summary.sections:
        sizes = summary.passages(model, task)
        rows = []
        for label in summary.labels(model, task, order):
            found = [summary.rows.get((model, task, size, label)) for size in sizes]
            rows.append(
                [
                    label,
                    *("" if r is None else percent(r.accuracy, arrow(r.difference)) for r in found),
                ]
            )
        blind = [
            next(
                r.blind
                for r in summary.rows.values()
                if (r.model, r.task, r.passages) == (model, task, size)
            )
            for size in sizes
        ]
        rows.append(["*blind baseline*", *(f"{100 * share:.0f}" for share in blind)])
        counts = sorted(
            {r.questions for r in summary.rows.values() if (r.model, r.task) == (model, task)}
        )
        asked = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
        parts.append(f"### {task}, `{model}`\n\n{asked} questions a cell.\n\n")
        parts.append(table(["method", *map(str, sizes)], rows) + "\n")
    return "".join(parts) or NOT_RUN
