"""What moved between two results."""

from __future__ import annotations

from collections.abc import Sequence

from rag_windows.benchmark.result import Cell, Result, median
from rag_windows.benchmark.way import SEQUENTIAL

_FIELDS = (
    ("prefill", "prefill_s"),
    ("first token", "first_s"),
    ("tokens/s", "tokens_per_s"),
)


def changes(old: Result, new: Result) -> list[str]:
    """Lines of a Markdown table, one for each figure that moved beyond its rounds' spread.

    Seconds are compared as they are and, since machines differ from run to run, beside those of
    plain transformers in the same run. A figure counts as moved where the ranges of the rounds of
    both runs don't meet.
    """
    before = {(cell.place, cell.way): cell for cell in old.cells}
    rows = []
    for cell in new.cells:
        former = before.get((cell.place, cell.way))
        if former is None:
            continue
        for name, field in _FIELDS:
            then, now = getattr(former, field), getattr(cell, field)
            if not _apart(then, now):
                continue
            was, is_now = _beside(old, former, field), _beside(new, cell, field)
            ratio = "" if was is None or is_now is None else f"{was:.2f} -> {is_now:.2f}"
            sort = f"{cell.window} ragged" if cell.ragged else f"{cell.window}"
            rows.append(
                f"| {cell.context:,} | {sort} | {cell.way} "
                f"| {name} | {median(then):.4g} -> {median(now):.4g} "
                f"| {median(now) / median(then):.2f} | {ratio} |"
            )
    told = []
    if (old.shape, old.dtype, old.machine) != (new.shape, new.dtype, new.machine):
        told = ["The two runs differ in model, machine or versions; compare the last column.", ""]
    if not rows:
        return [*told, "Nothing moved beyond the spread of the rounds."]
    return [
        *told,
        "| context | window | way | figure | before -> now | ratio | beside transformers |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]


def _apart(one: Sequence[float], other: Sequence[float]) -> bool:
    return bool(one and other) and (min(one) > max(other) or min(other) > max(one))


def _beside(result: Result, cell: Cell, field: str) -> float | None:
    base = next(
        (one for one in result.cells if one.place == cell.place and one.way == SEQUENTIAL), None
    )
    if base is None or base is cell:
        return None
    return median(getattr(cell, field)) / median(getattr(base, field))
