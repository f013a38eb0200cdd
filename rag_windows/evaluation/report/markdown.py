"""The report as Markdown: the same sentences and tables; charts and passages are in the HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

from rag_windows.evaluation.report.examples import ExampleView
from rag_windows.evaluation.report.page import READING, Part
from rag_windows.evaluation.report.tables import Table

_MARKS = re.compile(r"([\\`*_{}\[\]()#+!|~$@:-])")
_SPACES = re.compile(r"\s+")
_SHORT = 300


def markdown(title: str, parts: Sequence[Part], together: Table | None = None) -> str:
    """All parts in one document."""
    lines = [f"# {escaped(title)}", ""]
    if together is not None:
        lines += _table(together)
    for part in parts:
        if len(parts) > 1:
            lines += [f"## {escaped(part.title)}", ""]
        lines += _part(part)
    lines += ["## How to read this", ""]
    lines += [f"- **{head}**: {escaped(words)}" for head, words in READING]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """On one line, with nothing that Markdown or HTML would obey."""
    plain = _SPACES.sub(" ", text).strip()
    # An entity is text to every Markdown dialect; a backslash is not, in the middle of an address.
    return _MARKS.sub(r"\\\1", html.escape(plain, quote=False)) if _risky(plain) else plain


def _risky(text: str) -> bool:
    return bool(_MARKS.search(text)) or any(mark in text for mark in "<>&")


def _part(part: Part) -> Iterator[str]:
    for label, value in part.settings.head:
        yield f"- {label}: {escaped(value)}"
    yield ""
    for verdict in (*part.verdicts, *part.more_verdicts):
        yield f"- {escaped(verdict.text)}"
    yield ""
    if part.counters:
        yield "To be known:"
        yield ""
        for sentence in part.counters:
            yield f"- {escaped(sentence)}"
        yield ""
    for table in (*part.first_tables, *part.tables):
        yield from _table(table)
    for picture in part.pictures:
        where = getattr(picture, "why", "") or "See report.html."
        yield f"- {escaped(picture.title)}: {escaped(where)}"
    yield ""
    if part.examples:
        yield "Questions; their passages and the attention on them are in report.html:"
        yield ""
        for example in part.examples:
            yield from _example(example)
        yield ""
        yield escaped(part.how)
    else:
        yield escaped(part.how)
    yield ""
    if part.settings.command.text:
        yield "To do it again:"
        yield ""
        # An indented block ends at no mark that its text may hold.
        yield from (f"    {line}" for line in part.settings.command.text.splitlines())
        yield ""


def _table(table: Table) -> Iterator[str]:
    yield f"**{escaped(table.caption)}**"
    yield ""
    yield "| " + " | ".join(escaped(cell) for cell in table.head) + " |"
    yield (
        "|"
        + "|".join(" :-- " if place in table.words else " --: " for place in range(len(table.head)))
        + "|"
    )
    for row in table.rows:
        yield "| " + " | ".join(escaped(cell) for cell in row) + " |"
    yield ""
    if table.note:
        yield escaped(table.note)
        yield ""


def _example(example: ExampleView) -> Iterator[str]:
    yield f"- {escaped(example.question)} ({escaped(example.why)})"
    for reference in example.references[:2]:
        yield f"  - right: {_short(reference.text.text)}"
    for answer in example.answers:
        yield f"  - {escaped(answer.arm)}, {answer.score}: {_short(answer.text.text)}"


def _short(text: str) -> str:
    """The beginning; the whole is in the HTML."""
    plain = _SPACES.sub(" ", text).strip()
    if not plain:
        return "(empty)"
    cut = plain if len(plain) <= _SHORT else plain[:_SHORT] + " …"
    return escaped(cut)
