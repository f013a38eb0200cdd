"""Web pages as Markdown, without what a browser would not show."""

from __future__ import annotations

import re
import textwrap
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from rag_windows.errors import DocumentError, require
from rag_windows_retrievers import conversion
from rag_windows_retrievers.conversion import Converted, Decoded, one_line, reading, table_of

if TYPE_CHECKING:
    from bs4 import BeautifulSoup

_UNSEEN = (
    *("script", "style", "template", "noscript", "head", "nav", "iframe", "object", "embed"),
    *("applet", "svg", "canvas", "audio", "video", "map", "select", "datalist", "button"),
    *("input", "textarea"),
)
"""Elements of a page that are no text of it."""

_HIDDEN = re.compile(r"(?:^|[;\s])(?:display\s*:\s*none|visibility\s*:\s*hidden)", re.IGNORECASE)
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f]")
_MOST_SPANNED = 100
_LABEL = 200
"""Characters that a cell has at most whose text each of the rows gets that it spans."""

_CELL, _ROW = "\x1e", "\x1f"
"""Between cells and rows while a table is read; other control characters were taken out."""


_AS_BROWSERS_READ = {
    **{"iso-8859-1": "cp1252", "us-ascii": "cp1252", "gb2312": "gb18030", "gbk": "gb18030"},
    **{"shift_jis": "cp932", "euc-kr": "cp949", "big5": "big5hkscs"},
}
"""Of encodings that pages state, those that they are in."""


def html_text(data: bytes, decoded: Decoded) -> str:
    """The characters of a page, in the encoding that it states."""
    from bs4.dammit import EncodingDetector

    if not data.startswith((b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf")):
        stated = EncodingDetector.find_declared_encoding(data, is_html=True)
        if stated:
            # What it states may be wrong, as of pages that were converted since.
            with suppress(LookupError, ValueError):
                return data.decode(_AS_BROWSERS_READ.get(stated.lower(), stated))
    return decoded(data)


class _Look:
    """A target of lxml's parser, which refuses what a tree of a page would take too long for."""

    def __init__(self) -> None:
        self.title = ""
        self.elements = 0
        self._open: list[str] = []
        self._titles = 0

    def comment(self, text: str) -> None:
        self.elements += 1
        if self.elements > conversion.LIMITS.elements:
            raise DocumentError(
                f"its page has more than {conversion.LIMITS.elements:,} elements; split it"
            )

    def start(self, tag: str, attributes: object) -> None:
        self.comment(tag)
        self._open.append(tag)
        self._titles += tag == "title"
        if len(self._open) > (most := conversion.LIMITS.depth):
            raise DocumentError(
                f"its elements stand more than {most} deep in one another; save it again "
                "without empty formatting"
            )

    def end(self, tag: str) -> None:
        self._open.pop()

    def data(self, text: str) -> None:
        if self._titles == 1 and self._open[-1:] == ["title"]:
            self.title += text

    def close(self) -> None:
        """Part of the interface."""


def _soup(text: str) -> BeautifulSoup:
    """A page without what nobody sees, and without tables that only arrange their contents."""
    from bs4 import BeautifulSoup
    from bs4.element import PreformattedString

    soup = BeautifulSoup(text, "lxml")
    for string in soup.find_all(string=lambda one: isinstance(one, PreformattedString)):
        string.extract()
    for tag in soup.find_all(True):
        if tag.decomposed:
            continue
        hidden = "hidden" in tag.attrs and tag["hidden"] != "until-found"
        hidden |= bool(_HIDDEN.search(str(tag.get("style") or "")))
        closed = tag.name == "dialog" and "open" not in tag.attrs
        if tag.name in _UNSEEN or hidden or closed or tag.get("role") == "navigation":
            tag.decompose()
    for table in reversed(soup.find_all("table")):
        single = all(len(row.find_all(["td", "th"])) < 2 for row in table.find_all("tr"))
        if single or table.find("table") or table.get("role") in ("presentation", "none"):
            parts = table.find_all(["tr", "td", "th", "tbody", "thead", "tfoot", "caption"])
            for tag in [table, *(one for one in parts if one.find_parent("table") is table)]:
                tag.name = "div"
    return soup


class _Grid:
    """A table of a page, whose cells may span several rows and columns."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []
        self._size = 0
        self._below: dict[int, tuple[int, str]] = {}
        """Of a column, how many more rows a cell spans, and its text."""

    def add(self, cells: Iterable[tuple[str, int, int]]) -> None:
        """A row of cells, each with its text and the columns and rows that it spans."""
        row: list[str] = []
        waiting = deque(cells)
        while waiting or len(row) in self._below:
            column = len(row)
            if column in self._below:
                left, text = self._below.pop(column)
                row.append(text)
                if left > 1:
                    self._below[column] = (left - 1, text)
                continue
            text, across, down = waiting.popleft()
            for place in range(column, column + across):
                # Of the columns, the first one has the text; of the rows each, as a label.
                row.append(text if place == column else "")
                if down > 1:
                    label = row[-1] if len(text) <= _LABEL else ""
                    self._below[place] = (down - 1, label)
        self._size += len(row)
        _check_cells(self._size)
        self.rows.append(row)


def _check_cells(number: int) -> None:
    if number > conversion.LIMITS.cells:
        raise DocumentError(
            f"its tables have more than {conversion.LIMITS.cells:,} cells; split it"
        )


def _markdown(soup: BeautifulSoup) -> str:
    """A page as Markdown: of links and pictures their text, of tables a grid."""
    from bs4 import Tag
    from markdownify import MarkdownConverter

    def span(cell: Tag, name: str) -> int:
        stated = str(cell.get(name, ""))
        return min(int(stated), _MOST_SPANNED) if re.fullmatch("[1-9][0-9]{0,3}", stated) else 1

    numbers: dict[int, int] = {}
    cells = 0

    class Converter(MarkdownConverter):
        def convert_img(self, el: Tag, text: str, parent_tags: set[str]) -> str:
            return one_line(str(el.get("alt") or ""))

        def convert_li(self, el: Tag, text: str, parent_tags: set[str]) -> str:
            if not (text := text.strip()):
                return "\n"
            bullet = "- "
            if el.parent is not None and el.parent.name == "ol":
                start = str(el.parent.get("start", ""))
                first = int(start) if re.fullmatch("[0-9]{1,9}", start) else 1
                number = numbers.get(id(el.parent), first)
                numbers[id(el.parent)] = number + 1
                bullet = f"{number}. "
            return bullet + textwrap.indent(text, " " * len(bullet)).lstrip() + "\n"

        def convert_td(self, el: Tag, text: str, parent_tags: set[str]) -> str:
            if "table" not in parent_tags:
                return f" {text} "
            across, down = span(el, "colspan"), span(el, "rowspan")
            nonlocal cells
            cells += across
            _check_cells(cells)
            return f"{across} {down} {one_line(text)}{_CELL}"

        convert_th = convert_td

        def convert_tr(self, el: Tag, text: str, parent_tags: set[str]) -> str:
            return f"{text}{_ROW}"

        def convert_caption(self, el: Tag, text: str, parent_tags: set[str]) -> str:
            return f"{one_line(text)}{_ROW}"

        def convert_table(self, el: Tag, text: str, parent_tags: set[str]) -> str:
            grid, outside = _Grid(), []
            for line in text.split(_ROW):
                *cells, other = line.split(_CELL)
                outside.append(other.strip())
                parts = [f"{cell.strip()} ".split(" ", 2) for cell in cells]
                if parts:
                    grid.add((words.strip(), int(one), int(two)) for one, two, words in parts)
            _check_cells(len(grid.rows) * max(map(len, grid.rows), default=0))
            return "\n\n".join(["", *filter(None, outside), table_of(grid.rows), ""])

    plain = Converter(
        heading_style="ATX", strip=["a"], escape_asterisks=False, escape_underscores=False
    )
    text: str = plain.convert_soup(soup)
    text = text.replace(_CELL, " ").replace(_ROW, "\n").replace("\xa0", " ")
    return re.sub(r"[ \t]*\n(?:[ \t]*\n)+", "\n\n", text).strip()


class WebPage(NamedTuple):
    """A page as Markdown, its title, and how many elements it has."""

    text: str
    title: str
    elements: int


def page_of(text: str) -> WebPage:
    """Read a page from its characters."""
    require("Reading HTML", "markdownify", "lxml", extra="formats")
    from lxml.etree import HTMLParser

    # The declaration says that it is XML, which is to be read as HTML all the same.
    text = _CONTROLS.sub(" ", re.sub(r"\A\s*<\?xml[^>]*>", "", text))
    with reading("HTML", "lxml"):
        look = _Look()
        parser = HTMLParser(target=look)
        parser.feed(text)
        parser.close()
        return WebPage(_markdown(_soup(text)), one_line(look.title), look.elements)


def html(data: bytes, decoded: Decoded) -> Converted:
    """See `rag_windows_retrievers.formats.convert`."""
    require("Reading HTML files", "markdownify", "lxml", extra="formats")
    page = page_of(html_text(data, decoded))
    return Converted(page.text, [page.title], headed=True)
