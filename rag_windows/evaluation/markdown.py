"""Markdown tables that hold text of others."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rag_windows.prompt.visible_text import one_line

# What begins anything in Markdown inside a line, or at its start; "<" and "&" begin HTML, and an
# address becomes a link by itself. An underscore between letters or digits begins nothing.
_MARKS = re.compile(
    r"[\\`*\[\]<>|&~$!#]|(?<![^\W_])_|_(?![^\W_])|^[-+=]|(?<=^\d)[.)]|:(?=//)|(?<=www)\.", re.I
)


def escaped(text: str) -> str:
    """Text on one line that Markdown shows as it is; control characters are spelled out."""
    return _MARKS.sub(lambda match: "\\" + match[0], one_line(text))


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns are also aligned where it is read as plain text.

    Args:
        head: one a column, escaped as needed; columns after the first are aligned to the right.
        rows: likewise.
    """
    lines = [head, *rows]
    widths = [max(3, *(len(line[place]) for line in lines)) for place in range(len(head))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    shown = [_line(head, widths), f"| {' | '.join(rule)} |", *(_line(row, widths) for row in rows)]
    return "\n".join(shown) + "\n"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.ljust(width) if place == 0 else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"| {' | '.join(padded)} |"
