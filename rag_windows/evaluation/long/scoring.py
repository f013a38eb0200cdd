"""Whether the needle was found, by the answer and by the attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rag_windows.evaluation.example import Example
from rag_windows.evaluation.markdown import markdown_table
from rag_windows.evaluation.record import Record
from rag_windows.evaluation.scores.exact import contained
from rag_windows.evaluation.task import Score


def most_read(examples: Sequence[Example], records: Sequence[Record]) -> Score:
    """Answers during which the needle got more attention than any other passage, in percent.

    It counts answers whose attention was measured. A needle that was left out was not read, and a
    single passage is always the most read one.
    """
    values: list[float | None] = []
    for example, record in zip(examples, records, strict=True):
        measured = [(one.mass, one.text) for one in record.passages if one.mass is not None]
        if not measured:
            values.append(None)
            continue
        _, text = max(measured, key=lambda pair: pair[0])
        values.append(100.0 * (text == example.details["needle"]))
    return Score.mean("needle_most_read", values)


@dataclass(frozen=True, slots=True)
class CellScore:
    """What one cell of the sweep came to.

    Attributes:
        passages: how many were read.
        depth: where the needle stood, from 0 (first) to 1 (last); None for a single passage.
        found: percent of answers that hold a right one.
        questions: how many were asked.
    """

    passages: int
    depth: float | None
    found: float
    questions: int


def cells(examples: Sequence[Example], records: Sequence[Record]) -> list[CellScore]:
    """One arm's answers by number of passages and place of the needle, in that order."""
    values = contained(examples, [one.answer for one in records]).values
    grouped: dict[tuple[int, float], list[float]] = {}
    for example, value in zip(examples, values, strict=True):
        depth = example.details["depth"]
        place = (example.details["size"], -1.0 if depth is None else depth)
        grouped.setdefault(place, []).append(value or 0.0)
    return [
        CellScore(size, None if depth < 0 else depth, sum(found) / len(found), len(found))
        for (size, depth), found in sorted(grouped.items())
    ]


def cell_table(scores: Sequence[CellScore]) -> str:
    """Markdown: a row a number of passages, a column a place of the needle.

    A single passage stands everywhere and fills the first column.
    """
    depths = sorted({one.depth for one in scores if one.depth is not None}) or [0.0]
    found = {(one.passages, depths[0] if one.depth is None else one.depth): one for one in scores}
    rows = []
    for size in sorted({one.passages for one in scores}):
        row = [found.get((size, depth)) for depth in depths]
        rows.append([str(size), *("" if one is None else f"{one.found:.1f}" for one in row)])
    return markdown_table(["passages", *(f"position {depth:.0%}" for depth in depths)], rows)
