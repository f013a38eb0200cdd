"""What all formats share: a file as Markdown, limits of what is read, tables, errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rag_windows.errors import DocumentError, MissingExtraError


@dataclass(frozen=True, slots=True)
class Limits:
    """What is read of one file at most.

    Attributes:
        unpacked: bytes of everything that is packed in it.
        elements: of the XML of one part of it, or of its HTML; ten times as many in a sheet.
        depth: of elements of HTML in one another.
        cells: of one table or sheet, empty ones between others included.
        positions: cells of all its sheets, with the empty ones around others; a row counts as 16
            more.
    """

    unpacked: int = 512 * 1024**2
    elements: int = 1_000_000
    depth: int = 250
    cells: int = 1_000_000
    positions: int = 20_000_000


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What of a file is not in its text: why, and whether it should have been."""

    reason: str
    problem: bool = False


@dataclass(slots=True)
class Converted:
    """A file as Markdown.

    Attributes:
        text: the whole text.
        titles: what may be its title, the likeliest first.
        metadata: what the file states about itself.
        left_out: what is not in the text.
        headed: whether the first heading is a title where there is no other.
    """

    text: str
    titles: Sequence[str | None] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    left_out: Sequence[LeftOut] = ()
    headed: bool = False


Decoded = Callable[[bytes], str]
"""Bytes of text whose encoding nothing states."""


def numbered(what: str, numbers: Sequence[int]) -> str:
    """``page 3`` or ``pages 1-4, 6``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    shown = ", ".join("-".join(map(str, run)) for run in runs)
    return f"{what} {shown}" if len(numbers) == 1 else f"{what}s {shown}"


def first_line(error: Exception) -> str:
    """What an error of another library says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def reading(kind: str, library: str) -> Iterator[None]:
    """Raise whatever a library raises for a damaged file as one error."""
    try:
        yield
    except (DocumentError, MissingExtraError):
        raise
    except RecursionError as error:
        raise DocumentError(f"its parts are nested too deeply; save it again as {kind}") from error
    except Exception as error:
        raise DocumentError(
            f"not a file that {library} can read as {kind} ({first_line(error)}); save it again as "
            f"{kind}"
        ) from error


# Tables


def one_line(text: str) -> str:
    """A text with one blank in the place of line breaks and several blanks."""
    return " ".join(text.split())


def table_of(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a table, the first one as its header, without its empty rows and columns."""
    width = max(map(len, rows), default=0)
    full = [[one_line(cell) for cell in row] + [""] * (width - len(row)) for row in rows]
    columns = [one for one in range(width) if any(row[one] for row in full)]
    lines = [
        "| " + " | ".join(row[one].replace("|", "\\|") for one in columns) + " |"
        for row in full
        if any(row)
    ]
    if lines:
        lines.insert(1, "|" + " --- |" * len(columns))
    return "\n".join(lines)


def sheet_of(rows: Iterable[Sequence[str]]) -> str:
    """The rows of a sheet: single lines as text, the others as tables.

    A blank row ends a table, unless what follows has the same columns.
    """
    pieces: list[str | list[Sequence[str]]] = []
    place: tuple[int, int] | None = None
    for blank, group in itertools.groupby(rows, key=lambda row: not any(row)):
        block = [] if blank else list(group)
        wide = any(sum(map(bool, row)) > 1 for row in block)
        while block and (wide or len(block) == 1) and sum(map(bool, block[0])) == 1:
            pieces.append(one_line(next(filter(None, block.pop(0)))))
        if block:
            used = [at for row in block for at, cell in enumerate(row) if cell]
            columns = min(used), max(used)
            if pieces and isinstance(pieces[-1], list) and columns == place:
                pieces[-1] += block
            else:
                pieces.append(block)
            place = columns
    return "\n\n".join(one if isinstance(one, str) else table_of(one) for one in pieces)


class SheetRows:
    """Rows of a sheet, as many as the limits allow; of several blank ones one stays."""

    def __init__(self) -> None:
        self.rows: list[Sequence[str]] = []
        self._width = 0

    def take(self, row: Sequence[str]) -> bool:
        """Add a row; False where there is no place for it."""
        row = [*map(one_line, row)]
        end = len(row)
        while end and not row[end - 1]:
            end -= 1
        if end or (self.rows and self.rows[-1]):
            self._width = max(self._width, end)
            if (len(self.rows) + 1) * self._width > LIMITS.cells:
                return False
            self.rows.append(row[:end])
        return True


def cut_behind(what: str, rows: int) -> LeftOut:
    """The note on a table that is longer than `LIMITS` allow."""
    reason = (
        f"{what} ends behind row {rows:,}, as it has more than {LIMITS.cells:,} cells; split it"
    )
    return LeftOut(reason, problem=True)
