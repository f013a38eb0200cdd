"""Office files, web pages, books, tables and e-mails as Markdown: what a reader sees of them.

Tables stay tables; sheets, slides and chapters begin with a heading. Nothing outside a file is
opened, and no script, macro or formula of it runs. `LIMITS` bound what a hostile file can cost.
"""

from __future__ import annotations

import csv
import datetime
import email
import email.errors
import email.policy
import io
import itertools
import posixpath
import re
import textwrap
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.header import decode_header, make_header
from email.message import Message
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from urllib.parse import unquote
from xml.etree import ElementTree
from xml.parsers import expat

from rag_windows.errors import DocumentError, MissingExtraError, require
from rag_windows_retrievers.structure import structure_of

if TYPE_CHECKING:
    from bs4 import BeautifulSoup
    from pptx.shapes.base import BaseShape
    from pptx.slide import Slide


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


def convert(data: bytes, suffix: str, decoded: Decoded) -> Converted:
    """A file's bytes as Markdown.

    Args:
        data: the whole file.
        suffix: a key of `FORMATS`.
        decoded: makes text of bytes whose encoding the file does not state.

    Raises:
        DocumentError: it is damaged, protected, or larger than `LIMITS`.
        MissingExtraError: a package that it takes is not installed.
        UnicodeDecodeError: it is text in another encoding than it says.
    """
    return FORMATS[suffix](data, decoded)


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
def _reading(kind: str, library: str) -> Iterator[None]:
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


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a table, the first one as its header, without its empty rows and columns."""
    width = max(map(len, rows), default=0)
    full = [[_one_line(cell) for cell in row] + [""] * (width - len(row)) for row in rows]
    columns = [one for one in range(width) if any(row[one] for row in full)]
    lines = [
        "| " + " | ".join(row[one].replace("|", "\\|") for one in columns) + " |"
        for row in full
        if any(row)
    ]
    if lines:
        lines.insert(1, "|" + " --- |" * len(columns))
    return "\n".join(lines)


def _sheet(rows: Iterable[Sequence[str]]) -> str:
    """The rows of a sheet: single lines as text, the others as tables.

    A blank row ends a table, unless what follows has the same columns.
    """
    pieces: list[str | list[Sequence[str]]] = []
    place: tuple[int, int] | None = None
    for blank, group in itertools.groupby(rows, key=lambda row: not any(row)):
        block = [] if blank else list(group)
        wide = any(sum(map(bool, row)) > 1 for row in block)
        while block and (wide or len(block) == 1) and sum(map(bool, block[0])) == 1:
            pieces.append(_one_line(next(filter(None, block.pop(0)))))
        if block:
            used = [at for row in block for at, cell in enumerate(row) if cell]
            columns = min(used), max(used)
            if pieces and isinstance(pieces[-1], list) and columns == place:
                pieces[-1] += block
            else:
                pieces.append(block)
            place = columns
    return "\n\n".join(one if isinstance(one, str) else _table(one) for one in pieces)


class _Rows:
    """Rows of a sheet, as many as the limits allow; of several blank ones one stays."""

    def __init__(self) -> None:
        self.rows: list[Sequence[str]] = []
        self._width = 0

    def take(self, row: Sequence[str]) -> bool:
        """Add a row; False where there is no place for it."""
        row = [*map(_one_line, row)]
        end = len(row)
        while end and not row[end - 1]:
            end -= 1
        if end or (self.rows and self.rows[-1]):
            self._width = max(self._width, end)
            if (len(self.rows) + 1) * self._width > LIMITS.cells:
                return False
            self.rows.append(row[:end])
        return True


def _cut(what: str, rows: int) -> LeftOut:
    reason = (
        f"{what} ends behind row {rows:,}, as it has more than {LIMITS.cells:,} cells; split it"
    )
    return LeftOut(reason, problem=True)


_DELIMITERS = ",;\t|"
_SAMPLE = 100_000


def _delimiter(text: str) -> str:
    """What separates the cells: what gives the most rows the same number of them, above one."""

    def fitness(one: str) -> tuple[int, int]:
        rows = itertools.islice(csv.reader(io.StringIO(text, newline=""), delimiter=one), 100)
        widths = Counter(len(row) for row in rows if row)
        width, often = max(widths.items(), key=lambda item: (item[1], item[0]), default=(1, 0))
        return (often, width) if width > 1 else (0, 0)

    return max(_DELIMITERS, key=fitness)


def _delimited(data: bytes, decoded: Decoded) -> Converted:
    """A file of values between commas, semicolons, tabs or bars."""
    text, delimiter = decoded(data), ""
    if match := re.match(r"sep=([,;:|\t])\n", text):  # which Excel writes and reads
        text, delimiter = text[match.end() :], match[1]
    taken, left_out = _Rows(), []
    try:
        delimiter = delimiter or _delimiter(text[: text.rfind("\n", 0, _SAMPLE) + 1] or text)
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter):
            if not taken.take(row):
                left_out.append(_cut("the table", len(taken.rows)))
                break
    except csv.Error as error:
        raise DocumentError(
            f"not a table of values that Python's csv can read ({error}); look for a quotation "
            "mark that is not closed"
        ) from error
    return Converted(_sheet(taken.rows), left_out=left_out)


# Web pages

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


def _html_text(data: bytes, decoded: Decoded) -> str:
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
        if self.elements > LIMITS.elements:
            raise DocumentError(f"its page has more than {LIMITS.elements:,} elements; split it")

    def start(self, tag: str, attributes: object) -> None:
        self.comment(tag)
        self._open.append(tag)
        self._titles += tag == "title"
        if len(self._open) > LIMITS.depth:
            raise DocumentError(
                f"its elements stand more than {LIMITS.depth} deep in one another; save it again "
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
    if number > LIMITS.cells:
        raise DocumentError(f"its tables have more than {LIMITS.cells:,} cells; split it")


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
            return _one_line(str(el.get("alt") or ""))

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
            return f"{across} {down} {_one_line(text)}{_CELL}"

        convert_th = convert_td

        def convert_tr(self, el: Tag, text: str, parent_tags: set[str]) -> str:
            return f"{text}{_ROW}"

        def convert_caption(self, el: Tag, text: str, parent_tags: set[str]) -> str:
            return f"{_one_line(text)}{_ROW}"

        def convert_table(self, el: Tag, text: str, parent_tags: set[str]) -> str:
            grid, outside = _Grid(), []
            for line in text.split(_ROW):
                *cells, other = line.split(_CELL)
                outside.append(other.strip())
                parts = [f"{cell.strip()} ".split(" ", 2) for cell in cells]
                if parts:
                    grid.add((words.strip(), int(one), int(two)) for one, two, words in parts)
            _check_cells(len(grid.rows) * max(map(len, grid.rows), default=0))
            return "\n\n".join(["", *filter(None, outside), _table(grid.rows), ""])

    plain = Converter(
        heading_style="ATX", strip=["a"], escape_asterisks=False, escape_underscores=False
    )
    text: str = plain.convert_soup(soup)
    text = text.replace(_CELL, " ").replace(_ROW, "\n").replace("\xa0", " ")
    return re.sub(r"[ \t]*\n(?:[ \t]*\n)+", "\n\n", text).strip()


class _Page(NamedTuple):
    """A page as Markdown, its title, and how many elements it has."""

    text: str
    title: str
    elements: int


def _page(text: str) -> _Page:
    require("Reading HTML", "markdownify", "lxml", extra="formats")
    from lxml.etree import HTMLParser

    # The declaration says that it is XML, which is to be read as HTML all the same.
    text = _CONTROLS.sub(" ", re.sub(r"\A\s*<\?xml[^>]*>", "", text))
    with _reading("HTML", "lxml"):
        look = _Look()
        parser = HTMLParser(target=look)
        parser.feed(text)
        parser.close()
        return _Page(_markdown(_soup(text)), _one_line(look.title), look.elements)


def _html(data: bytes, decoded: Decoded) -> Converted:
    require("Reading HTML files", "markdownify", "lxml", extra="formats")
    page = _page(_html_text(data, decoded))
    return Converted(page.text, [page.title], headed=True)


# What is packed: Office files and books


class _Package:
    """The parts of a packed file, after a look at what they would cost.

    Args:
        data: the file.
        kind: what it should be.
        streamed: how the names of parts begin that may be longer, as they are read row by row.

    Raises:
        DocumentError: it is damaged, protected, larger than `LIMITS`, or its XML declares entities.
    """

    def __init__(self, data: bytes, kind: str, streamed: str = "//") -> None:
        if data.startswith(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"):
            if "EncryptedPackage".encode("utf-16-le") in data:
                raise DocumentError("it opens with a password only; save it without one")
            raise DocumentError(f"it is in the form of Office before 2007; save it as {kind}")
        with _reading(kind, "Python's zipfile"):
            self._archive = zipfile.ZipFile(io.BytesIO(data))
            self.names = {one.filename: one for one in self._archive.infolist()}
            parts = self._archive.infolist()
            size = sum(one.file_size for one in parts)
            if size > LIMITS.unpacked:
                raise DocumentError(
                    f"its parts unpack to {size / 1e6:,.0f} MB, and at most "
                    f"{LIMITS.unpacked / 1e6:,.0f} are read; split it, or take films and pictures "
                    "out"
                )
            for one in parts:
                if one.flag_bits & 1:
                    raise DocumentError("it opens with a password only; save it without one")
                if one.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise DocumentError(f"it is not packed as {kind}; save it again as {kind}")
                if not one.is_dir():
                    self._look(one, 10 if one.filename.startswith(streamed) else 1)

    def _look(self, part: zipfile.ZipInfo, times: int) -> None:
        """Refuse XML that is hostile, or too much for a tree in memory."""
        count = 0

        def element(name: str, attributes: object) -> None:
            nonlocal count
            count += 1
            if count > times * LIMITS.elements:
                raise DocumentError(
                    f"its part {part.filename} has more than {times * LIMITS.elements:,} elements; "
                    "split it"
                )

        def entity(*_: object) -> NoReturn:
            raise DocumentError(f"its part {part.filename} declares XML entities; save it again")

        with self._archive.open(part) as stream:
            begin = stream.read(64).lstrip()
            stream.seek(0)
            marks = (b"<", b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
            if begin.startswith(marks) or part.filename.endswith((".xml", ".rels")):
                parser = expat.ParserCreate()
                parser.StartElementHandler = element
                parser.EntityDeclHandler = entity
                # Whoever needs a part that is no XML says so.
                with suppress(expat.ExpatError):
                    parser.ParseFile(stream)

    def read(self, name: str) -> bytes:
        """A part's bytes."""
        return self._archive.read(self.names[name])

    def xml(self, name: str) -> ElementTree.Element:
        """A part that is XML."""
        return ElementTree.fromstring(self.read(name))  # noqa: S314 - __init__ has seen it

    @cached_property
    def stated(self) -> tuple[str, dict[str, str]]:
        """The title of an Office file, and what else it states."""
        found: dict[str, str] = {}
        if "docProps/core.xml" in self.names:
            for one in self.xml("docProps/core.xml"):
                name = one.tag.rpartition("}")[2]
                if text := _one_line(one.text or ""):
                    found[{"creator": "author"}.get(name, name)] = text
        metadata = {name: text for name, text in found.items() if name in ("author", "modified")}
        return found.get("title", ""), metadata


_WORD, _SLIDES, _WORKBOOK, _BOOK = "DOCX", "PPTX", "XLSX", "EPUB"
_WORD_STYLES = "p[style-name='Title'] => h1:fresh\np[style-name='Subtitle'] => p:fresh"


def _docx(data: bytes, _: Decoded) -> Converted:
    require("Reading DOCX files", "mammoth", "markdownify", "lxml", extra="formats")
    import mammoth

    package = _Package(data, _WORD)
    with _reading(_WORD, "mammoth"):
        title, metadata = package.stated
        made = mammoth.convert_to_html(
            io.BytesIO(data),
            convert_image=lambda image: [],
            style_map=_WORD_STYLES,
            include_embedded_style_map=False,
            external_file_access=False,
        )
    left_out = []
    if any("/math}oMath" in one.message or "m:oMath" in one.message for one in made.messages):
        left_out.append(LeftOut("its equations are left out; write them as text if they matter"))
    return Converted(_page(made.value).text, [title], metadata, left_out, headed=True)


def _xlsx(data: bytes, _: Decoded) -> Converted:
    require("Reading XLSX files", "openpyxl", extra="formats")
    from openpyxl import load_workbook

    package = _Package(data, _WORKBOOK, "xl/worksheets/")
    parts: list[str] = []
    left_out: list[LeftOut] = []
    left, unknown = LIMITS.positions, 0
    with _reading(_WORKBOOK, "openpyxl"):
        title, metadata = package.stated
        # What formulas resulted in when the file was saved, and where there are formulas.
        of_results, of_formulas = (
            load_workbook(io.BytesIO(data), read_only=True, keep_links=False, data_only=results)
            for results in (True, False)
        )
        for sheet, formulas in zip(of_results.worksheets, of_formulas.worksheets, strict=True):
            if sheet.sheet_state != "visible":
                left_out.append(LeftOut(f"the hidden sheet {sheet.title!r} is left out"))
                continue
            for one in (sheet, formulas):
                one.reset_dimensions()  # which may be stated smaller than they are
            taken = _Rows()
            for row, same in zip(sheet.iter_rows(), formulas.iter_rows(), strict=True):
                left -= 16 + len(row)
                if left < 0 or not taken.take([_shown(cell) for cell in row]):
                    left_out.append(_cut(f"the sheet {sheet.title!r}", len(taken.rows)))
                    break
                unknown += sum(
                    cell.value is None and cell.data_type == "n" and formula.value is not None
                    for cell, formula in zip(row, same, strict=True)
                )
            if text := _sheet(taken.rows):
                parts.append(f"## {_one_line(sheet.title)}\n\n{text}")
    if unknown:
        cells = "1 cell holds a formula" if unknown == 1 else f"{unknown:,} cells hold formulas"
        reason = f"{cells} without a result; open it in a spreadsheet program and save it again"
        left_out.append(LeftOut(reason, problem=True))
    return Converted("\n\n".join(parts), [title], metadata, left_out)


def _shown(cell: Any) -> str:
    """A cell's value much as a spreadsheet program shows it."""
    value = cell.value
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, datetime.datetime):
        day = value.time() == datetime.time()
        return value.date().isoformat() if day else value.isoformat(" ", "seconds")
    if isinstance(value, int | float):
        percent = "%" in str(cell.number_format)
        shown = f"{100 * value if percent else value:.15g}" if percent else f"{value:.15g}"
        return f"{shown}%" if percent else str(value) if isinstance(value, int) else shown
    return str(value)


_DIAGRAM = "{http://schemas.openxmlformats.org/drawingml/2006/diagram}relIds"
_DIAGRAM_DATA = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}dm"
_DRAWN = "{http://schemas.openxmlformats.org/drawingml/2006/main}"


def _pptx(data: bytes, _: Decoded) -> Converted:
    require("Reading PPTX files", "python-pptx", extra="formats")
    from pptx import Presentation

    package = _Package(data, _SLIDES)
    parts: list[str] = []
    titles: list[str] = []
    hidden: list[int] = []
    silent: list[int] = []
    with _reading(_SLIDES, "python-pptx"):
        title, metadata = package.stated
        slides = Presentation(io.BytesIO(data)).slides
        for number, slide in enumerate(slides, start=1):
            if slide.element.get("show") in ("0", "false"):
                hidden.append(number)
                continue
            heading, text = _slide(slide)
            if heading or text:
                titles.append(heading)
                name = f"Slide {number}: {heading}" if heading else f"Slide {number}"
                parts.append(f"## {name}\n\n{text}".strip())
            elif any(one.element.tag.endswith("}pic") for one in _shapes(slide.shapes)):
                silent.append(number)
        count = len(slides)
    if silent and not parts:
        raise DocumentError("its slides hold no text; pictures of text need OCR first")
    left_out = []
    if silent:
        reason = f"{numbered('slide', silent)} of {count} without text; pictures need OCR first"
        left_out.append(LeftOut(reason, problem=len(silent) > len(parts)))
    if hidden:
        left_out.append(LeftOut(f"hidden {numbered('slide', hidden)} of {count} left out"))
    return Converted("\n\n".join(parts), [title, *titles[:1]], metadata, left_out)


def _slide(slide: Slide) -> tuple[str, str]:
    """The title of a slide, and its text."""
    title = slide.shapes.title
    pieces = [
        text
        for shape in _shapes(slide.shapes)
        if title is None or shape.shape_id != title.shape_id
        for text in _texts(shape)
    ]
    notes = slide.notes_slide.notes_text_frame if slide.has_notes_slide else None
    if notes is not None and (said := _one_line(notes.text)):
        pieces.append(f"Notes: {said}")
    heading = _one_line(title.text_frame.text) if title is not None else ""
    return heading, "\n\n".join(filter(None, pieces))


def _shapes(shapes: Iterable[BaseShape]) -> Iterator[BaseShape]:
    """Shapes, and those in groups instead of the groups."""
    from pptx.shapes.group import GroupShape

    for shape in shapes:
        if isinstance(shape, GroupShape):
            yield from _shapes(shape.shapes)
        else:
            yield shape


def _texts(shape: BaseShape) -> Iterator[str]:
    """What a shape says."""
    from pptx.enum.shapes import PP_PLACEHOLDER as KIND
    from pptx.shapes.autoshape import Shape
    from pptx.shapes.graphfrm import GraphicFrame

    kind = shape.placeholder_format.type if shape.is_placeholder else None
    if kind in (KIND.DATE, KIND.FOOTER, KIND.HEADER, KIND.SLIDE_NUMBER):
        return
    if isinstance(shape, Shape):
        listed = kind in (KIND.BODY, KIND.OBJECT, KIND.VERTICAL_BODY, KIND.VERTICAL_OBJECT)
        lines = [
            f"{'  ' * one.level}- {text}" if listed or one.level else text
            for one in shape.text_frame.paragraphs
            if (text := _one_line(one.text))
        ]
        yield ("\n" if any(re.match(" *- ", one) for one in lines) else "\n\n").join(lines)
    elif isinstance(shape, GraphicFrame):
        if shape.has_table:
            yield _table([[cell.text for cell in row.cells] for row in shape.table.rows])
        if shape.has_chart:
            chart = shape.chart
            yield _one_line(chart.chart_title.text_frame.text) if chart.has_title else ""
            for plot in chart.plots:
                columns = [[str(one) for one in plot.categories]]
                for series in plot.series:
                    columns.append(["" if one is None else f"{one:.15g}" for one in series.values])
                names = ["", *(series.name for series in plot.series)]
                yield _table([names, *itertools.zip_longest(*columns, fillvalue="")])
        for diagram in shape.element.iter(_DIAGRAM):
            part = shape.part.related_part(str(diagram.get(_DIAGRAM_DATA)))
            tree = ElementTree.fromstring(part.blob)  # noqa: S314 - _Package has seen it
            for paragraph in tree.iter(f"{_DRAWN}p"):
                words = "".join(one.text or "" for one in paragraph.iter(f"{_DRAWN}t"))
                yield f"- {_one_line(words)}" if words.strip() else ""


# Books

_BOOK_TITLES = "{http://purl.org/dc/elements/1.1/}"


def _epub(data: bytes, decoded: Decoded) -> Converted:
    require("Reading EPUB files", "markdownify", "lxml", extra="formats")
    package = _Package(data, _BOOK)
    missing: list[str] = []
    parts: list[str] = []
    with _reading(_BOOK, "Python's zipfile"):
        roots = package.xml("META-INF/container.xml").iter()
        (path, *_) = (one.get("full-path") for one in roots if one.get("full-path"))
        book = package.xml(str(path))
        folder = posixpath.dirname(str(path))
        items = {
            one.get("id"): (_inside(folder, one.get("href")), one.get("properties") or "", one)
            for one in book.iter()
            if one.tag.endswith("}item")
        }
        stated: dict[str, list[str]] = {}
        for one in book.iter():
            if one.tag.startswith(_BOOK_TITLES) and (text := _one_line(one.text or "")):
                stated.setdefault(one.tag.removeprefix(_BOOK_TITLES), []).append(text)
        protected = _protected(package)
        labels = _labels(package, items.values(), decoded)
        order = dict.fromkeys(
            one.get("idref") for one in book.iter() if one.tag.endswith("}itemref")
        )
        elements = 0
        for name in order:
            place, properties, _item = items.get(name, (str(name), "", None))
            if "nav" in properties.split():
                continue
            if place in protected:
                raise DocumentError("it is protected against copies; only its own reader opens it")
            if place not in package.names:
                missing.append(place)
                continue
            page = _page(_html_text(package.read(place), decoded))
            elements += page.elements
            if elements > LIMITS.elements:
                raise DocumentError(
                    f"its chapters have more than {LIMITS.elements:,} elements; split it"
                )
            text = page.text
            if text and place in labels and not structure_of(text).headings:
                text = f"# {labels[place]}\n\n{text}"
            parts.append(text)
    left_out = []
    if missing:
        reason = f"it has no {', '.join(missing[:3])}, which its contents name; save it again"
        left_out.append(LeftOut(reason, problem=True))
    known = {"author": "creator", "language": "language", "date": "date"}
    metadata = {ours: ", ".join(stated[name]) for ours, name in known.items() if name in stated}
    titles = stated.get("title", [])[:1]
    return Converted("\n\n".join(filter(None, parts)), titles, metadata, left_out, headed=True)


def _inside(folder: str, link: str | None) -> str:
    """The name of a part that another part in a folder links to."""
    return posixpath.normpath(posixpath.join(folder, unquote((link or "").partition("#")[0])))


def _protected(package: _Package) -> set[str]:
    """The parts of a book that are encrypted; fonts often are."""
    if "META-INF/encryption.xml" not in package.names:
        return set()
    tree = package.xml("META-INF/encryption.xml")
    return {_inside("", one.get("URI")) for one in tree.iter() if one.get("URI")}


def _labels(
    package: _Package,
    items: Iterable[tuple[str, str, ElementTree.Element]],
    decoded: Decoded,
) -> dict[str, str]:
    """What the table of contents calls the parts of a book."""
    from bs4 import BeautifulSoup

    labels: dict[str, str] = {}
    for place, properties, item in items:
        folder = posixpath.dirname(place)
        if place not in package.names:
            continue
        if "nav" in properties.split():
            soup = BeautifulSoup(_html_text(package.read(place), decoded), "lxml")
            found = [(str(one["href"]), one.get_text()) for one in soup.select("nav a[href]")]
        elif item.get("media-type") == "application/x-dtbncx+xml":
            points = [one for one in package.xml(place).iter() if one.tag.endswith("}navPoint")]
            found = [
                (
                    next((one.get("src", "") for one in point if one.tag.endswith("content")), ""),
                    "".join(next(one for one in point if one.tag.endswith("navLabel")).itertext()),
                )
                for point in points
            ]
        else:
            continue
        for link, label in found:
            if label.strip():
                labels.setdefault(_inside(folder, link), _one_line(label))
    return labels


# E-mails

_ENCRYPTED = ("multipart/encrypted", "application/pkcs7-mime", "application/x-pkcs7-mime")
# The parser of the newer policies takes minutes for some headers.
_MAIL = email.policy.compat32
_HEADERS = ("From", "To", "Cc", "Date")
_HEADER_CHARS = 10_000


def _eml(data: bytes, _: Decoded) -> Converted:
    """An e-mail; what is attached to it is named."""
    with _reading("an e-mail", "Python's email"):
        message = email.message_from_bytes(data, policy=_MAIL)
        stated = {
            name: text
            for name in ("Subject", *_HEADERS)
            if (text := _header(dict(message.raw_items()), name))
        }
        if not stated:
            raise DocumentError(
                "its head has no From, To, Subject or Date; save it again as an e-mail"
            )
        mail = _Mail()
        text = mail.text(message)
    if mail.encrypted:
        raise DocumentError("it is encrypted; save it decrypted")
    if "Date" in stated:
        with suppress(ValueError, TypeError, IndexError, OverflowError):
            stated["Date"] = parsedate_to_datetime(stated["Date"]).isoformat(" ")
    lines = [f"{name}: {stated[name]}" for name in _HEADERS if name in stated]
    left_out = []
    if mail.attached:
        names = ", ".join(mail.attached)
        lines.append(f"Attachments: {names}")
        left_out.append(LeftOut(f"attachments are left out: {names}; save them beside it"))
    if mail.damaged:
        reason = f"{mail.damaged:,} of its characters are damaged; save it again"
        left_out.append(LeftOut(reason, problem=True))
    text = "\n\n".join(filter(None, ["\n".join(lines), text.strip()])) if text.strip() else ""
    metadata = {name.lower(): stated[name] for name in _HEADERS if name in stated}
    return Converted(text, [stated.get("Subject")], metadata, left_out)


def _header(headers: Mapping[str, str], name: str) -> str:
    """A header's text, in whatever way its other letters are written."""
    value = next((str(text) for key, text in headers.items() if key.lower() == name.lower()), "")
    raw = _one_line(value[:_HEADER_CHARS]).encode("utf-8", "surrogateescape")
    text = raw.decode("utf-8", "replace")
    with suppress(ValueError, LookupError, email.errors.MessageError):
        text = str(make_header(decode_header(text)))
    return _one_line(text)


class _Mail:
    """Reads the parts of an e-mail."""

    def __init__(self) -> None:
        self.attached: list[str] = []
        self.damaged = 0
        self.encrypted = False

    def text(self, part: Message) -> str:
        """What a part says; of several forms of the same, the plain text."""
        kind = part.get_content_type()
        self.encrypted |= kind in _ENCRYPTED
        if part.get_content_maintype() == "multipart":
            parts = [one for one in part.get_payload() or () if isinstance(one, Message)]
            if kind == "multipart/alternative":
                parts.sort(key=lambda one: one.get_content_type() != "text/plain")
                return next(filter(str.strip, map(self.text, parts)), "")
            return "\n\n".join(filter(str.strip, map(self.text, parts)))
        name = _header({"name": part.get_filename() or ""}, "name")
        if (
            name
            or kind not in ("text/plain", "text/html")
            or (part.get_content_disposition() == "attachment")
        ):
            self.attached.append(name or f"one of type {kind}")
            return ""
        text = self._decoded(part)
        return _page(text).text if kind == "text/html" else text

    def _decoded(self, part: Message) -> str:
        payload = part.get_payload(decode=True)
        data = payload if isinstance(payload, bytes) else b""
        for encoding in (part.get_content_charset() or "utf-8", "utf-8"):
            with suppress(LookupError, ValueError):
                return data.decode(encoding)
        text = data.decode("utf-8", "replace")
        self.damaged += text.count("\ufffd")
        return text


FORMATS: Mapping[str, Callable[[bytes, Decoded], Converted]] = {
    ".docx": _docx,
    ".pptx": _pptx,
    ".xlsx": _xlsx,
    ".html": _html,
    ".htm": _html,
    ".epub": _epub,
    ".csv": _delimited,
    ".tsv": _delimited,
    ".eml": _eml,
}
"""By the suffixes of files, what reads them."""
