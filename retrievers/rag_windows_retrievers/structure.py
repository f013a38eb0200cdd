"""Where a text is cut best: headings, blocks, rows of tables, and lines that stand by themselves.

A text is read as CommonMark with tables, whose conventions plain text follows, too.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from itertools import pairwise
from typing import Any

import yaml
from markdown_it import MarkdownIt

_BLOCKS = MarkdownIt("commonmark").enable("table").disable("inline")
_INLINE = MarkdownIt("commonmark")

_PARTS = {"thead_open", "tbody_open", "tr_open", "th_open", "td_open"}
"""Of a table, which is read by its lines."""

_NAME_CHARS = 2_000
"""Of a heading, the characters that are read as its name."""

_HEADING_LINES = 3
"""Of a heading at most, as a line of dashes below a long paragraph makes no heading of it."""

_FRONT_CHARS = 20_000

_INDENT = 40
"""Columns; lines that are indented further count alike."""

_FRONT = re.compile(r"(---|\+\+\+)[ \t]*\n(.*?\n|)(?:\1|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
_KEY = re.compile(r"\s*(?:#.*\n\s*)*[\w-]+[ \t]*[:=]")
_TITLE = re.compile(r"^title[ \t]*[:=][ \t]*(.+)$", re.MULTILINE)
_NO_YAML = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What PyYAML raises for some values, besides errors of its own."""

_MOST_BRACKETS = 200
"""In front matter; PyYAML takes seconds for thousands within each other."""

_BOOKKEEPING = frozenset(
    "author authors cssclass cssclasses categories category created creator date draft icon id "
    "image lang language last_modified lastmod layout license modified nav_order parent permalink "
    "publish published redirect_from reviewed sidebar_position slug tag tags template toc uid "
    "updated url uuid version weight".split()
)
"""Keys that say little of the subject, by which front matter is told from prose between rules."""

_LONGEST_VALUE = 8
"""Words; longer values are sentences."""

_NO_VALUE = ("", "~", "null", "Null", "NULL")
"""YAML's ways to say that a key has none."""

_LETTERS, _DIGITS = re.compile(r"[^\W\d_]+"), re.compile(r"\d+")
_TELLING = re.compile(r"\W*0\W[\W0]*|[^\w\"'“‘(]+|[\[<{].*")
_WIDE = re.compile("[぀-ヿ㐀-䶿一-鿿]")

Border = tuple[int, ...]
"""How good a place is for a cut: of two, the smaller one is better."""


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading that stands in no list and no quote.

    Attributes:
        level: 1 to 6.
        name: what it says, without markup.
        plain: whether there was no markup.
        start: its first character in the text.
        end: the character behind its lines.
    """

    level: int
    name: str
    plain: bool
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a table below its header: characters `start` to `end` of the text."""

    header: str
    start: int
    end: int


@dataclass(slots=True)
class Structure:
    """What stands in a text.

    Attributes:
        headings: in their order.
        tables: in their order.
        borders: places for cuts, by the characters behind them, which begin lines.
        bound: of each heading, where it begins and where what follows it begins.
    """

    headings: list[Heading] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    borders: dict[int, Border] = field(default_factory=dict)
    bound: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FrontMatter:
    """YAML or TOML in front of a text.

    Attributes:
        title: what it states; else nothing.
        end: where the text itself begins; 0 where there is no front matter.
        others: its other keys, dates as text; None where this is not all that it says.
    """

    title: str = ""
    end: int = 0
    others: Mapping[str, Any] | None = None


def structure_of(text: str) -> Structure:
    """What stands in a text whose lines end in a line feed."""
    return _Reader(text).made


class _Reader:
    """Reads a text by its lines; `made` is the result."""

    def __init__(self, text: str) -> None:
        self.made = Structure()
        self._lines = text.split("\n")
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line) + 1)
        begin = front_matter(text).end
        front = text.count("\n", 0, begin)
        if begin:
            self._stand(range(1, front), 1)
            self._cut(front, (0,))
        self._read(text[begin:], front)

    def _read(self, text: str, offset: int) -> None:
        # For the parser a carriage return ends a line, and for a document it does not.
        tokens = _BLOCKS.parse(text.replace("\r", " "))
        headings, seen = [], offset
        for token, following in pairwise([*tokens, None]):
            if token is None or token.map is None or token.type in _PARTS:
                continue
            first, end = (line + offset for line in token.map)
            while end > first + 1 and not self._lines[end - 1].strip():
                end -= 1
            if token.level == 0:
                self._definitions(seen, first)
                seen = max(seen, end)
            self._cut(first, (token.level,))
            if token.type == "heading_open" and end - first <= _HEADING_LINES:
                headings.append((first, end))
                if following is not None and not token.level:
                    self._heading(following.content, int(token.tag[1]), first, end)
            elif token.type in ("paragraph_open", "heading_open", "html_block", "code_block"):
                self._paragraph(first, end, token.level + 1)
            elif token.type == "fence":
                self._stand(range(first + 1, end), token.level + 1)
            elif token.type == "table_open":
                self._table([*range(first, end)], 2, token.level + 1)
        self._definitions(seen, len(self._lines))
        for first, line in headings:  # which belong to what follows them
            while line < len(self._lines) and not self._lines[line].strip():
                line += 1
            self.made.borders.pop(self._starts[line], None)
            self.made.bound.append((self._starts[first], self._starts[line]))

    def _definitions(self, first: int, end: int) -> None:
        """Lines between blocks, such as targets of links, which the parser does not report."""
        lines = [line for line in range(first, end) if self._lines[line].strip()]
        if lines:
            self._cut(lines[0], (0,))
            self._stand(lines[1:], 1)

    def _cut(self, line: int, border: Border) -> None:
        start = self._starts[line]
        self.made.borders[start] = min(border, self.made.borders.get(start, border))

    def _heading(self, content: str, level: int, first: int, end: int) -> None:
        name = _plain(content[:_NAME_CHARS])
        if name:
            plain = name == " ".join(content.split())
            start, stop = self._starts[first], self._starts[end]
            self.made.headings.append(Heading(level, name, plain, start, stop))

    def _table(self, lines: Sequence[int], body: int, level: int) -> None:
        """Rows stand by themselves, but for the first one: a header says nothing without a row."""
        if body < len(lines):
            header = "\n".join(self._lines[line] for line in lines[:body]).strip()
            start, end = self._starts[lines[body]], self._starts[lines[-1] + 1]
            self.made.tables.append(Table(header, start, end))
            self._stand(lines[body + 1 :], level)

    def _stand(self, lines: Sequence[int], level: int) -> None:
        """Cut in front of lines; blank space is a better place, and so is less indentation."""
        for line in lines:
            text = self._lines[line]
            # A closing bracket or a rule belongs to what it ends.
            if any(map(str.isalnum, text)):
                indent = len(text) - len(text.lstrip())
                blank = not self._lines[line - 1].strip()
                self._cut(line, (level, min(indent, _INDENT), not blank))

    def _paragraph(self, first: int, end: int, level: int) -> None:
        """Cut between lines that stand by themselves, but not where one sentence fills several."""
        lines = [line for line in range(first, end) if self._lines[line].strip()]
        texts = [self._lines[line] for line in lines]
        if not texts:  # only form feeds and the like, which are no blank line in CommonMark
            return
        if (delimiter := _delimiter(texts)) and (body := _header(texts, delimiter)):
            self._table(lines, body, level)
            return
        rows = [*range(len(lines))] if delimiter else _rows(texts)
        self._stand([lines[row] for row in rows], level)
        for row, following in pairwise([*([] if 0 in rows else [0]), *rows, len(lines)]):
            if not _flows(texts[row:following]):
                self._stand(lines[row + 1 : following], level + 1)


def front_matter(text: str) -> FrontMatter:
    """What stands in front of a text whose lines end in a line feed."""
    match = _FRONT.match(text[:_FRONT_CHARS])
    if match is None or match.end() == _FRONT_CHARS:
        return FrontMatter()
    kind, block = match.groups()
    titles = _TITLE.search(block)
    title = titles[1].strip("\"' ") if titles else ""
    # Such as a title with a colon, over which other readers of front matter pass.
    quoted = _TITLE.sub(lambda _: f"title: {json.dumps(title, ensure_ascii=False)}", block)
    for one in (block, quoted):
        try:
            stated = _stated(one) if kind == "---" else tomllib.loads(one)
            break
        except (yaml.YAMLError, *_NO_YAML):
            continue
    else:
        return FrontMatter(title, match.end() * bool(_KEY.match(block)))
    # A blank line behind the first rule: what follows is a text between rules.
    apart = block.startswith("\n")
    if not isinstance(stated, dict) and (apart or stated is not None):
        return FrontMatter()
    others = dict(stated or {})
    value = others.pop("title", None)
    value = None if value in _NO_VALUE else value
    named = isinstance(value, str) or (type(value) in (int, float) and _is_simple(value))
    # Comments alone may be a heading between rules.
    whole = bool(stated) and not apart and (named or value is None) and _are_simple(others)
    whole = whole and all(key.lower().replace("-", "_") in _BOOKKEEPING for key in others)
    return FrontMatter(
        " ".join(str(value).split()) if named else "",
        match.end(),
        json.loads(json.dumps(others, default=str)) if whole else None,
    )


def _stated(block: str) -> Any:
    """YAML with every single value as text, as no type of it is worth a surprise."""
    if len(re.findall(r"[\[{]", block)) > _MOST_BRACKETS:
        raise ValueError("more brackets than front matter has")
    return yaml.BaseLoader(block).get_single_data()


def _are_simple(keys: Mapping[Any, Any]) -> bool:
    """Whether values are single ones or lists of these, and no reference multiplies them."""
    values = [each for one in keys.values() for each in (one if isinstance(one, list) else [one])]
    return (
        all(isinstance(one, str) for one in keys)
        and all(map(_is_simple, values))
        and sum(len(one) if isinstance(one, str) else 1 for one in values) <= _FRONT_CHARS
    )


def _is_simple(value: object) -> bool:
    if isinstance(value, int):
        return value.bit_length() < 64
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return len(value.split()) <= _LONGEST_VALUE
    return isinstance(value, date | time)


def _plain(content: str) -> str:
    """Inline markup as the words that a reader sees."""
    (inline,) = _INLINE.parseInline(content)
    parts = [
        " " if one.type.endswith("break") else "" if one.type == "html_inline" else one.content
        for one in inline.children or ()
    ]
    return " ".join("".join(parts).split())


def _shape(line: str) -> str:
    """The first word of a line, its letters as ``a`` and its digits as ``0``."""
    return _DIGITS.sub("0", _LETTERS.sub("a", line.split(None, 1)[0][:_INDENT]))


def _rows(lines: Sequence[str]) -> list[int]:
    """The lines that begin in the same telling way: with a time, a number, a bullet, a bracket."""
    shapes = [_shape(line) for line in lines]
    often = {
        shape
        for shape, count in Counter(shapes).items()
        if (_TELLING.fullmatch(shape) and (count > 2 or 2 * count > len(lines)))
        or (shape != "a" and count > 2 and 5 * count >= 4 * len(lines))
    }
    return [row for row, shape in enumerate(shapes) if shape in often]


def _delimiter(lines: Sequence[str]) -> str:
    """What separates the cells, where nearly all of the lines have the same number of them."""
    for delimiter in "|\t;,":
        counts = Counter(line.count(delimiter) for line in lines)
        number, lines_of_it = counts.most_common(1)[0]
        # A sentence has a comma or two, but a blank follows them.
        wordy = delimiter in ";," and number < 3 and any(f"{delimiter} " in one for one in lines)
        if number and len(lines) > 2 and 5 * lines_of_it >= 4 * len(lines) and not wordy:
            return delimiter
    return ""


def _header(lines: Sequence[str], delimiter: str) -> int:
    """How many of the first lines name the columns: ruled off, or the only ones without a digit."""
    if not any(map(str.isalnum, lines[1])):
        return 2
    names, *others = ([cell.strip() for cell in line.split(delimiter)] for line in lines)
    body = [cells for cells in others if len(cells) == len(names)]
    columns = zip(*body, strict=True)
    numbered = (sum(any(map(str.isdigit, cell)) for cell in column) for column in columns)
    named = all(names) and len(set(names)) == len(names) and not any(map(str.isdigit, lines[0]))
    return int(named and 2 * max(numbered, default=0) > len(body))


def _flows(lines: Sequence[str]) -> bool:
    """Whether lines are a text that was broken where no word fitted any more."""
    if len(lines) < 2:
        return True
    begins = [line.strip()[0] for line in lines[1:]]
    large = sum(one.isupper() or one.isdigit() for one in begins)
    if len(begins) > 3 and not any(map(str.islower, begins)) and 2 * large > len(begins):
        return False
    width = max(map(len, lines))
    early = 0
    for line, following in pairwise(lines):
        word = 1 if _WIDE.match(following.strip()) else len(following.split(None, 1)[0])
        early += len(line) + 1 + word < 0.7 * width
    return 2 * early < len(lines) - 1
