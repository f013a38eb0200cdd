"""Office files as Markdown, and the parts of packed files, of which books consist, too."""

from __future__ import annotations

import datetime
import io
import itertools
import re
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn
from xml.etree import ElementTree
from xml.parsers import expat

from rag_windows.errors import DocumentError, require
from rag_windows_retrievers import conversion
from rag_windows_retrievers.conversion import (
    Converted,
    Decoded,
    LeftOut,
    SheetRows,
    cut_behind,
    numbered,
    one_line,
    reading,
    sheet_of,
    table_of,
)
from rag_windows_retrievers.web_pages import page_of

if TYPE_CHECKING:
    from pptx.shapes.base import BaseShape
    from pptx.slide import Slide


class Package:
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
        with reading(kind, "Python's zipfile"):
            self._archive = zipfile.ZipFile(io.BytesIO(data))
            self.names = {one.filename: one for one in self._archive.infolist()}
            parts = self._archive.infolist()
            size = sum(one.file_size for one in parts)
            if size > (most := conversion.LIMITS.unpacked):
                raise DocumentError(
                    f"its parts unpack to {size / 1e6:,.0f} MB, and at most "
                    f"{most / 1e6:,.0f} are read; split it, or take films and pictures "
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
        count, most = 0, times * conversion.LIMITS.elements

        def element(name: str, attributes: object) -> None:
            nonlocal count
            count += 1
            if count > most:
                raise DocumentError(
                    f"its part {part.filename} has more than {most:,} elements; split it"
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
                if text := one_line(one.text or ""):
                    found[{"creator": "author"}.get(name, name)] = text
        metadata = {name: text for name, text in found.items() if name in ("author", "modified")}
        return found.get("title", ""), metadata


_WORD, _SLIDES, _WORKBOOK = "DOCX", "PPTX", "XLSX"
_WORD_STYLES = "p[style-name='Title'] => h1:fresh\np[style-name='Subtitle'] => p:fresh"


def docx(data: bytes, _: Decoded) -> Converted:
    """See `rag_windows_retrievers.formats.convert`."""
    require("Reading DOCX files", "mammoth", "markdownify", "lxml", extra="formats")
    import mammoth

    package = Package(data, _WORD)
    with reading(_WORD, "mammoth"):
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
    return Converted(page_of(made.value).text, [title], metadata, left_out, headed=True)


def xlsx(data: bytes, _: Decoded) -> Converted:
    """See `rag_windows_retrievers.formats.convert`."""
    require("Reading XLSX files", "openpyxl", extra="formats")
    from openpyxl import load_workbook

    package = Package(data, _WORKBOOK, "xl/worksheets/")
    parts: list[str] = []
    left_out: list[LeftOut] = []
    left, unknown = conversion.LIMITS.positions, 0
    with reading(_WORKBOOK, "openpyxl"):
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
            taken = SheetRows()
            for row, same in zip(sheet.iter_rows(), formulas.iter_rows(), strict=True):
                left -= 16 + len(row)
                if left < 0 or not taken.take([_shown(cell) for cell in row]):
                    left_out.append(cut_behind(f"the sheet {sheet.title!r}", len(taken.rows)))
                    break
                unknown += sum(
                    cell.value is None and cell.data_type == "n" and formula.value is not None
                    for cell, formula in zip(row, same, strict=True)
                )
            if text := sheet_of(taken.rows):
                parts.append(f"## {one_line(sheet.title)}\n\n{text}")
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


def pptx(data: bytes, _: Decoded) -> Converted:
    """See `rag_windows_retrievers.formats.convert`."""
    require("Reading PPTX files", "python-pptx", extra="formats")
    from pptx import Presentation

    package = Package(data, _SLIDES)
    parts: list[str] = []
    titles: list[str] = []
    hidden: list[int] = []
    silent: list[int] = []
    with reading(_SLIDES, "python-pptx"):
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
    if notes is not None and (said := one_line(notes.text)):
        pieces.append(f"Notes: {said}")
    heading = one_line(title.text_frame.text) if title is not None else ""
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
            if (text := one_line(one.text))
        ]
        yield ("\n" if any(re.match(" *- ", one) for one in lines) else "\n\n").join(lines)
    elif isinstance(shape, GraphicFrame):
        if shape.has_table:
            yield table_of([[cell.text for cell in row.cells] for row in shape.table.rows])
        if shape.has_chart:
            chart = shape.chart
            yield one_line(chart.chart_title.text_frame.text) if chart.has_title else ""
            for plot in chart.plots:
                columns = [[str(one) for one in plot.categories]]
                for series in plot.series:
                    columns.append(["" if one is None else f"{one:.15g}" for one in series.values])
                names = ["", *(series.name for series in plot.series)]
                yield table_of([names, *itertools.zip_longest(*columns, fillvalue="")])
        for diagram in shape.element.iter(_DIAGRAM):
            part = shape.part.related_part(str(diagram.get(_DIAGRAM_DATA)))
            tree = ElementTree.fromstring(part.blob)  # noqa: S314 - Package has seen it
            for paragraph in tree.iter(f"{_DRAWN}p"):
                words = "".join(one.text or "" for one in paragraph.iter(f"{_DRAWN}t"))
                yield f"- {one_line(words)}" if words.strip() else ""
