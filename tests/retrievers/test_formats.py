from __future__ import annotations

import datetime
import io
import random
import re
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from openpyxl import Workbook
from pptx import Presentation
from pptx.chart.data import CategoryChartData
from pptx.enum.chart import XL_CHART_TYPE
from pptx.util import Inches

from rag_windows import DocumentError
from rag_windows_retrievers import (
    SUFFIXES,
    Document,
    conversion,
    formats,
    load_documents,
    split_documents,
)
from rag_windows_retrievers.documents import DocumentFile, Skipped


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(name: str, data: bytes | str) -> Document:
    Path(name).write_bytes(data.encode() if isinstance(data, str) else data)
    (document,) = load_documents(name, strict=False).documents
    return document


def told(name: str, data: bytes | str) -> list[tuple[str, bool, bool]]:
    """What of a file is left out: why, whether that is a problem, and whether the rest was read."""
    Path(name).write_bytes(data.encode() if isinstance(data, str) else data)
    read = DocumentFile(str(Path(name).resolve()), name).read()
    return [(one.reason, one.problem, one.partial) for one in read if isinstance(one, Skipped)]


def packed(parts: Mapping[str, str | bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return file.getvalue()


def parts_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


OFFICE = "http://schemas.openxmlformats.org/"
RELATIONS = f"{OFFICE}package/2006/relationships"
KINDS = f"{OFFICE}officeDocument/2006/relationships"


FILE = "file:"


def relations(*targets: tuple[str, str, str]) -> str:
    modes = {True: "External", False: "Internal"}
    listed = "".join(
        f'<Relationship Id="{name}" Type="{KINDS}/{kind}" Target="{target}"'
        f' TargetMode="{modes[target[:5] == FILE]}"/>'
        for name, kind, target in targets
    )
    return f'<Relationships xmlns="{RELATIONS}">{listed}</Relationships>'


def core(title: str) -> str:
    return (
        '<c:coreProperties xmlns:c="c" xmlns:dc="http://purl.org/dc/elements/1.1/">'
        f"<dc:title>{title}</dc:title><dc:creator>Ada Qvist</dc:creator></c:coreProperties>"
    )


def paragraph(text: str, style: str = "") -> str:
    styled = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f"<w:p>{styled}<w:r><w:t>{text}</w:t></w:r></w:p>"


def grid(*rows: list[str]) -> str:
    shown = (
        "<w:tr>" + "".join(f"<w:tc>{paragraph(cell)}</w:tc>" for cell in row) + "</w:tr>"
        for row in rows
    )
    return f"<w:tbl>{''.join(shown)}</w:tbl>"


def docx(body: str, title: str = "", **more: str) -> bytes:
    types = f"{OFFICE}package/2006/content-types"
    names = (("Heading1", "heading 1"), ("Heading2", "heading 2"), ("Title", "Title"))
    styles = "".join(
        f'<w:style w:type="paragraph" w:styleId="{key}"><w:name w:val="{name}"/></w:style>'
        for key, name in names
    )
    space = f'xmlns:w="{OFFICE}wordprocessingml/2006/main" xmlns:r="{KINDS}"'
    math = f'xmlns:m="{OFFICE}officeDocument/2006/math"'
    return packed(
        {
            "[Content_Types].xml": f'<Types xmlns="{types}">'
            '<Default Extension="xml" ContentType="application/xml"/></Types>',
            "_rels/.rels": relations(("a", "officeDocument", "word/document.xml")),
            "word/document.xml": f"<w:document {space} {math}><w:body>{body}</w:body></w:document>",
            "word/styles.xml": f"<w:styles {space}>{styles}</w:styles>",
            "word/_rels/document.xml.rels": relations(("s", "styles", "styles.xml")),
            "docProps/core.xml": core(title),
            **more,
        }
    )


def xlsx(**sheets: list[list[Any]]) -> bytes:
    book, file = Workbook(), io.BytesIO()
    book.remove(book.active)
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(row)
    book.save(file)
    return file.getvalue()


def sheet_of(rows: str) -> bytes:
    """A workbook whose sheet is written by hand."""
    parts = parts_of(xlsx(One=[["a"]]))
    parts["xl/worksheets/sheet1.xml"] = (
        f'<worksheet xmlns="{OFFICE}spreadsheetml/2006/main"><dimension ref="A1:A1"/>'
        f"<sheetData>{rows}</sheetData></worksheet>"
    ).encode()
    return packed(parts)


def pptx(change: Callable[[Any], None] = lambda slides: None, title: str = "") -> bytes:
    slides, file = Presentation(), io.BytesIO()
    slides.core_properties.title = title
    change(slides)
    slides.save(file)
    return file.getvalue()


def bridges(slides: Any) -> None:
    first = slides.slides.add_slide(slides.slide_layouts[1])
    first.shapes.title.text = "Brücken"
    frame = first.placeholders[1].text_frame
    frame.text = "Halden"
    below = frame.add_paragraph()
    below.text, below.level = "1931 gebaut", 1
    table = first.shapes.add_table(2, 2, 0, 0, Inches(2), Inches(2)).table
    for place, text in zip(table.iter_cells(), ("橋", "Year", "Halden", "1931"), strict=True):
        place.text = text
    data = CategoryChartData()
    data.categories = ["2025", "2026"]
    data.add_series("Boats", (4, 5.5))
    first.shapes.add_chart(XL_CHART_TYPE.COLUMN_CLUSTERED, 0, 0, 99, 99, data)
    group = slides.slides.add_slide(slides.slide_layouts[6]).shapes.add_group_shape()
    group.shapes.add_textbox(0, 0, 9, 9).text_frame.text = "In a group."
    slides.slides[1].notes_slide.notes_text_frame.text = "Say it slowly."


def epub(chapters: dict[str, str], listed: str = "", **more: str) -> bytes:
    items = "".join(f'<item id="{n}" href="text/{n}.xhtml"/>' for n in sorted(chapters))
    order = "".join(f'<itemref idref="{name}"/>' for name in chapters)
    book = (
        '<package xmlns="http://www.idpf.org/2007/opf" xmlns:dc="http://purl.org/dc/elements/1.1/">'
        "<metadata><dc:title>Der Turm</dc:title><dc:creator>Ada Qvist</dc:creator>"
        "<dc:language>de</dc:language></metadata><manifest>"
        f'{items}<item id="nav" href="nav.xhtml" properties="nav"/>'
        f'</manifest><spine><itemref idref="nav"/>{order}</spine></package>'
    )
    page = '<?xml version="1.0" encoding="utf-8"?>\n<!DOCTYPE html>\n<html><body>{}</body></html>'
    return packed(
        {
            "mimetype": "application/epub+zip",
            "META-INF/container.xml": "<container><rootfiles>"
            '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>',
            "OEBPS/book.opf": book,
            "OEBPS/nav.xhtml": page.format(f"<nav>{listed}</nav>"),
            **{f"OEBPS/text/{n}.xhtml": page.format(text) for n, text in chapters.items() if text},
            **more,
        }
    )


def mail(*parts: str, subject: str = "Glocken") -> str:
    joined = "\n".join(f"--X\n{part}\n" for part in parts)
    return (
        f"From: =?utf-8?q?J=C3=B6rg?= <joerg@halden.example>\nTo: ada@halden.example\n"
        f"Subject: {subject}\nDate: Sat, 28 Nov 2026 10:00:00 +0100\nMIME-Version: 1.0\n"
        f"Content-Type: multipart/mixed; boundary=X\n\n{joined}--X--\n"
    )


def html(body: str, title: str = "Der Turm") -> str:
    return f"<html><head><title>{title}</title></head><body>{body}</body></html>"


TABLE = "| Name | Bells |\n| --- | --- |\n| Zürich | 9 |"
ONE_OF_EACH: dict[str, bytes | str] = {
    ".docx": docx(paragraph("Anfang", "Heading1") + grid(["Name", "Bells"], ["Zürich", "9"])),
    ".pptx": pptx(bridges),
    ".xlsx": xlsx(Türme=[["Name", "Bells"], ["Zürich", 9]]),
    ".html": html("<table><tr><th>Name<th>Bells<tr><td>Zürich<td>9</table>"),
    ".htm": html("<p>東京の塔"),
    ".epub": epub({"a": "<h1>Eins</h1><p>Zürich.</p>"}),
    ".csv": "Name,Bells\nZürich,9\n",
    ".tsv": "Name\tBells\nZürich\t9\n",
    ".eml": mail("\nZürich has nine bells."),
}


def test_every_format_is_read_from_a_folder(here: Path) -> None:
    folder = here / "docs"
    folder.mkdir()
    for suffix, data in ONE_OF_EACH.items():
        (folder / f"tower{suffix}").write_bytes(data.encode() if isinstance(data, str) else data)
    (folder / "logo.png").write_bytes(b"\x89PNG\x00")
    loaded = load_documents("docs")
    assert {Path(one.id).suffix for one in loaded.documents} == {*formats.FORMATS}
    assert {*ONE_OF_EACH} == {*formats.FORMATS} < {*SUFFIXES}
    (skipped,) = loaded.skipped
    assert skipped.reason == ".png files are not read"
    with pytest.raises(DocumentError) as raised:
        load_documents("docs/*.png")
    assert str(raised.value).endswith(
        "Name .txt, .md, .jsonl, .pdf, .docx, .pptx, .xlsx, .html, .epub, .csv, .tsv or .eml files "
        "that hold text, or a folder of them."
    )
    for one in loaded.documents:
        assert re.search("Zürich|東京|橋", one.text), one
        assert one.metadata["source"] == one.id
        for passage in split_documents(one, words=12):
            assert passage.document == one.id
    for name in ("docx", "html", "csv", "tsv"):
        assert TABLE in next(one.text for one in loaded.documents if one.id.endswith(name))


def test_tables_keep_their_header_in_every_passage() -> None:
    rows = [["Boat", "Year"], *([f"The boat {number}", str(number)] for number in range(40))]
    for name, data in (
        ("a.xlsx", xlsx(Boats=rows)),
        ("a.csv", "\n".join(map(",".join, rows))),
        ("a.docx", docx(grid(*rows))),
    ):
        passages = split_documents(load(name, data), words=30)
        assert len(passages) > 5
        assert all("| Boat | Year |\n| --- | --- |\n" in one.text for one in passages), name


def test_word() -> None:
    body = (
        paragraph("Die Brücke von Halden", "Title")
        + paragraph("Bau", "Heading1")
        + paragraph("She was built in 1931.")
        + paragraph("Kosten", "Heading2")
        + grid(["Jahr", "a|b"], ["1931", "5 Mark"])
        + "<w:p><w:del><w:r><w:delText>gone</w:delText></w:r></w:del></w:p>"
        + "<w:p><w:r><w:t>x</w:t></w:r><m:oMath><m:r><m:t>y</m:t></m:r></m:oMath></w:p>"
    )
    document = load("a.docx", docx(body))
    assert document.title == "Die Brücke von Halden"
    assert document.metadata == {"source": "a.docx", "author": "Ada Qvist"}
    assert document.text.strip() == (
        "# Bau\n\nShe was built in 1931.\n\n## Kosten\n\n"
        "| Jahr | a\\|b |\n| --- | --- |\n| 1931 | 5 Mark |\n\nx"
    )
    (reason,) = told("a.docx", docx(body))
    assert reason == ("its equations are left out; write them as text if they matter", False, True)
    sections = [one.metadata.get("section") for one in split_documents(document, words=20)]
    assert sections == ["Bau", "Bau > Kosten"]
    stated = load("a.docx", docx(body, "Stated"))
    assert (stated.title, stated.text[:25]) == ("Stated", "# Die Brücke von Halden\n\n")
    assert load("some.docx", docx(paragraph("x"), "Microsoft Word - a.doc")).title == "some"


def test_slides() -> None:
    document = load("a.pptx", pptx(bridges))
    assert document.title == "Brücken"
    assert document.text == (
        "## Slide 1: Brücken\n\n- Halden\n  - 1931 gebaut\n\n"
        "| 橋 | Year |\n| --- | --- |\n| Halden | 1931 |\n\n"
        "|  | Boats |\n| --- | --- |\n| 2025 | 4 |\n| 2026 | 5.5 |\n\n"
        "## Slide 2\n\nIn a group.\n\nNotes: Say it slowly."
    )
    sections = [one.metadata["section"] for one in split_documents(document, words=12)]
    assert {*sections} == {"Slide 1: Brücken", "Slide 2"}, sections
    assert load("a.pptx", pptx(bridges, "Halden")).title == "Halden"


PICTURE = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d4944415478da63"
    "64f8ffbf1e000584027f25c1de660000000049454e44ae426082"
)


def test_slides_without_text_are_reported() -> None:
    def change(slides: Any) -> None:
        bridges(slides)
        for _ in range(3):
            slide = slides.slides.add_slide(slides.slide_layouts[6])
            slide.shapes.add_picture(io.BytesIO(PICTURE), 0, 0)
        slides.slides[0].element.set("show", "0")

    assert told("a.pptx", pptx(change)) == [
        ("slides 3-5 of 5 without text; pictures need OCR first", True, True),
        ("hidden slide 1 of 5 left out", False, True),
    ]

    def pictures(slides: Any) -> None:
        change(slides)
        slides.slides[1].element.set("show", "0")

    assert told("a.pptx", pptx(pictures))[0][0].startswith("its slides hold no text")


def test_sheets() -> None:
    book = io.BytesIO(
        xlsx(
            Preise=[
                ["Prices of Halden"],
                [],
                [None, "Name", "Price", "Day", "Part"],
                [None, "Zürich", 0.1 + 0.2, datetime.date(2026, 11, 28), 0.25],
                [],
                [None, "Bern", 5, datetime.datetime(2026, 11, 28, 9, 30), 1],
                [],
                ["Source: a ledger"],
            ],
            東京=[["a", "b"], [True, "=1/0"]],
            Notes=[["secret"]],
        )
    )
    from openpyxl import load_workbook

    loaded = load_workbook(book)
    loaded["Notes"].sheet_state = "hidden"
    loaded["Preise"]["E4"].number_format = "0%"
    loaded.properties.title = "Kosten"
    file = io.BytesIO()
    loaded.save(file)
    document = load("a.xlsx", file.getvalue())
    assert document.title == "Kosten"
    assert document.text == (
        "## Preise\n\nPrices of Halden\n\n"
        "| Name | Price | Day | Part |\n| --- | --- | --- | --- |\n"
        "| Zürich | 0.3 | 2026-11-28 | 25% |\n| Bern | 5 | 2026-11-28 09:30:00 | 1 |\n\n"
        "Source: a ledger\n\n## 東京\n\n| a | b |\n| --- | --- |\n| TRUE |  |"
    )
    assert told("a.xlsx", file.getvalue()) == [
        ("the hidden sheet 'Notes' is left out", False, True),
        (
            "1 cell holds a formula without a result; open it in a spreadsheet program and save it "
            "again",
            True,
            True,
        ),
    ]
    sections = [one.metadata["section"] for one in split_documents(document, words=12)]
    assert {*sections} == {"Preise", "東京"}


def test_results_of_formulas_are_read() -> None:
    document = load(
        "a.xlsx",
        sheet_of(
            '<row r="1"><c r="A1"><f>1+1</f><v>2</v></c>'
            '<c r="B1" t="str"><f>CONCAT("a","b")</f><v>ab</v></c>'
            '<c r="C1" t="str"><f>IF(1=1,"","x")</f><v></v></c></row>'
            '<row r="2"><c r="A2"><v>7</v></c><c r="B2"><v>8</v></c></row>'
        ),
    )
    # More than the dimension that it states, and no formula is without a result.
    assert document.text == "## One\n\n| 2 | ab |\n| --- | --- |\n| 7 | 8 |"
    assert len(load_documents("a.xlsx").skipped) == 0


def test_a_page() -> None:
    body = (
        "<nav>Menu</nav><h1>Glocken</h1><!-- gone --><script>gone()</script><style>gone{}</style>"
        "<p>Nine <b>bells</b> of snake_case* and <a href='http://x.example'>a link</a>."
        "<img src='file:///etc/passwd' alt='The tower'><div hidden>gone</div>"
        "<div style='color: red; DISPLAY:none'>gone</div><div role=navigation>gone</div>"
        "<table><caption>Costs</caption><tr><th rowspan=2>Year<th colspan=2>Mark"
        "<tr><td>a<td>b<tr><td>1931<td>5|6<td><ul><li>7<li>8</ul></table>"
        "<h2>Uhr</h2><ol start=3><li>one<li>two<ul><li>deep</ul></ol><pre>a\n  b</pre>"
        "<?php gone ?><input value=gone><textarea>gone</textarea>"
    )
    document = load("a.html", html(body, " Der \n Turm "))
    assert document.title == "Der Turm"
    assert document.text == (
        "# Glocken\n\nNine **bells** of snake_case* and a link.The tower\n\nCosts\n\n"
        "| Year | Mark |  |\n| --- | --- | --- |\n| Year | a | b |\n| 1931 | 5\\|6 | - 7 - 8 |\n\n"
        "## Uhr\n\n3. one\n4. two\n   - deep\n\n```\na\n  b\n```"
    )
    assert "gone" not in document.text
    assert load("b.html", "<h1>Only</h1><p>x").title == "Only"
    assert load("c.html", "<title>Untitled</title><p>x").title == "c"


def test_tables_that_place_other_things_are_no_tables() -> None:
    inner = "<table><tr><td>a<td>b<tr><td>1<td>2</table>"
    document = load("a.html", f"<table><tr><td>{inner}<td><h2>Uhr</h2><p>x</table>")
    assert document.text == "| a | b |\n| --- | --- |\n| 1 | 2 |\n\n## Uhr\n\nx"
    assert load("b.html", "<table><tr><td><p>One.<p>Two.</table>").text == "One.\n\nTwo."


@pytest.mark.parametrize(
    ("encoding", "stated"),
    [
        ("utf-8", ""),
        ("utf-16", ""),
        ("utf-8", "iso-2022-jp-9"),
        ("shift_jis", "Shift_JIS"),
        ("iso-2022-jp", "iso-2022-jp"),
    ],
)
def test_the_encoding_of_a_page(encoding: str, stated: str) -> None:
    meta = f"<meta charset='{stated}'>" if stated else ""
    assert load("a.html", f"{meta}<p>東京の塔".encode(encoding)).text == "東京の塔"
    ((reason, problem, _),) = told("b.html", "<p>Zürich".encode("cp1252"))
    assert re.match("not valid UTF-8.*iconv", reason)
    assert problem


def test_a_book() -> None:
    data = epub(
        {"b": "<h1>Zuerst</h1><p>Der&nbsp;Turm.</p>", "a": "<p>Die Glocken läuten.</p>"},
        '<a href="text/a.xhtml#x">Glocken</a>',
    )
    document = load("a.epub", data)
    assert (document.title, document.metadata) == (
        "Der Turm",
        {"source": "a.epub", "author": "Ada Qvist", "language": "de"},
    )
    assert document.text == "# Zuerst\n\nDer Turm.\n\n# Glocken\n\nDie Glocken läuten."
    sections = [one.metadata["section"] for one in split_documents(document, words=5)]
    assert sections == ["Zuerst", "Glocken"]
    missing = epub({"a": "<p>One.</p>", "b": ""})
    (reason,) = told("a.epub", missing)
    assert reason[0].startswith("it has no OEBPS/text/b.xhtml, which its contents name")
    locked = '<e><CipherReference URI="OEBPS/text/a.xhtml"/></e>'
    protected = epub({"a": "<p>x</p>"}, **{"META-INF/encryption.xml": locked})
    assert told("a.epub", protected)[0][0].startswith("it is protected against copies")


def test_the_contents_of_an_older_book() -> None:
    ncx = (
        '<?xml version="1.0"?><!DOCTYPE ncx PUBLIC "-//NISO//DTD ncx 2005-1//EN" "ncx.dtd">'
        '<ncx xmlns="n"><navMap><navPoint><navLabel><text>Glocken</text></navLabel>'
        '<content src="text/a.xhtml"/></navPoint></navMap></ncx>'
    )
    parts = parts_of(epub({"a": "<p>Nine.</p>"}, **{"OEBPS/toc.ncx": ncx}))
    item = b'<item id="n" href="toc.ncx" media-type="application/x-dtbncx+xml"/></manifest>'
    book = parts["OEBPS/book.opf"]
    parts["OEBPS/book.opf"] = book.replace(b"</manifest>", item)
    assert load("a.epub", packed(parts)).title == "Der Turm"
    assert load("a.epub", packed(parts)).text == "# Glocken\n\nNine."


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_values_between_delimiters(delimiter: str, end: str) -> None:
    rows = ["Name,Note,Mark", 'Zürich,"a ""b""\nc, d","1.5"', "Bern,,2", ",,", ",,"]
    text = end.join(rows).replace(",", delimiter)
    document = load("values.csv", text)
    cell = f'a "b" c{delimiter} d'.replace("|", "\\|").replace("\t", "")
    assert document.title == "values"
    assert document.text == (
        f"| Name | Note | Mark |\n| --- | --- | --- |\n| Zürich | {cell} | 1.5 |\n| Bern |  | 2 |"
    )


def test_odd_tables_of_values() -> None:
    assert load("a.csv", "sep=;\na;b\n1,5;2\n").text == "| a | b |\n| --- | --- |\n| 1,5 | 2 |"
    assert load("a.csv", 'sep="\na,b\n1,2\n').text.startswith("sep=")
    assert load("a.csv", "one\ntwo\n").text == "| one |\n| --- |\n| two |"
    assert load("a.csv", "a,b\n1,2,3\n4\n").text.endswith("| 1 | 2 | 3 |\n| 4 |  |  |")
    assert load("a.csv", "\ufeffa,b\n1,東京\n").text.startswith("| a | b |")
    assert told("a.csv", "") == [("no text", False, False)]
    assert "not closed" in told("a.csv", 'a,b\n"' + "x" * 200_000)[0][0]
    assert "iconv" in told("a.csv", "Name;Ort\nJörg;Zürich\n".encode("cp1252"))[0][0]


def test_a_mail() -> None:
    attached = (
        "Content-Type: application/pdf\n"
        "Content-Disposition: attachment; filename*=utf-8''Gl%C3%B6ckner.pdf\n\nJVBERi0="
    )
    plain = "Content-Type: text/plain; charset=iso-8859-1\n\nZ\xfcrich."
    rich = "Content-Type: text/html\n\n<p>Gone"
    both = f"Content-Type: multipart/alternative; boundary=Y\n\n--Y\n{rich}\n--Y\n{plain}\n--Y--"
    data = mail(both, "\nThe end.", attached, subject="=?utf-8?b?w5xiZXI=?= uns")
    document = load("a.eml", data.encode("latin-1"))
    date = "2026-11-28 10:00:00+01:00"
    assert document.title == "Über uns"
    assert document.metadata == {
        "source": "a.eml",
        "from": "Jörg <joerg@halden.example>",
        "to": "ada@halden.example",
        "date": date,
    }
    assert document.text == (
        f"From: Jörg <joerg@halden.example>\nTo: ada@halden.example\nDate: {date}\n"
        "Attachments: Glöckner.pdf\n\nZürich.\n\nThe end."
    )
    assert told("a.eml", data.encode("latin-1")) == [
        ("attachments are left out: Glöckner.pdf; save them beside it", False, True)
    ]
    rows = "<table><tr><td>a<td>b<tr><td>1<td>2</table><script>gone</script>"
    page = load("b.eml", mail(f"Content-Type: text/html; charset=utf-8\n\n{rows}"))
    assert page.text.endswith("\n\n| a | b |\n| --- | --- |\n| 1 | 2 |")
    assert load("c.eml", mail("\nx", subject="Grüße aus 東京")).title == "Grüße aus 東京"
    damaged = mail("Content-Type: text/plain\n\nx\udcff").encode("utf-8", "surrogateescape")
    assert told("d.eml", damaged)[0][0] == "1 of its characters are damaged; save it again"
    locked = "Subject: x\nContent-Type: application/pkcs7-mime\n\nabc"
    assert told("e.eml", locked)[0][0] == "it is encrypted; save it decrypted"
    assert told("f.eml", "no mail at all")[0][0].startswith("its head has no From, To,")


OLD = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\x00" * 512
ZIPPED = [".docx", ".pptx", ".xlsx", ".epub"]


@pytest.mark.parametrize("suffix", ZIPPED)
def test_files_that_cannot_be_opened_say_what_to_do(suffix: str) -> None:
    whole = ONE_OF_EACH[suffix]
    assert isinstance(whole, bytes)
    encrypted = bytearray(packed({"a.xml": "<a/>"}))
    encrypted[encrypted.index(b"PK\x01\x02") + 8] |= 1
    form = suffix[1:].upper()
    cases = {
        OLD + "EncryptedPackage".encode("utf-16-le"): "it opens with a password only; save it",
        OLD: f"it is in the form of Office before 2007; save it as {form}",
        bytes(encrypted): "it opens with a password only; save it without one",
        packed({"a": "x"}, zipfile.ZIP_LZMA): f"it is not packed as {form}; save it again",
        whole[: len(whole) // 2]: f"not a file that Python's zipfile can read as {form}",
        b"": f"not a file that Python's zipfile can read as {form}",
        b"<html>": f"not a file that Python's zipfile can read as {form}",
        packed({"a.xml": "<a/>"}): f"as {form} (",
    }
    for data, message in cases.items():
        ((reason, problem, partial),) = told(f"a{suffix}", data)
        assert message in reason
        assert (problem, partial) == (True, False)
        with pytest.raises(DocumentError, match=f"a{suffix}: "):
            load_documents(f"a{suffix}")


ENTITIES = '<!DOCTYPE a [<!ENTITY a "x"><!ENTITY b SYSTEM "file:///etc/passwd">]>'


@pytest.mark.parametrize("suffix", ZIPPED)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_entities_and_bombs_are_refused(
    suffix: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ONE_OF_EACH[suffix]
    assert isinstance(whole, bytes)
    parts = parts_of(whole)
    name = next(one for one in parts if re.search("document.xml|slide1.xml|sheet1.xml|opf", one))
    text = re.sub(r"<\?xml.*?\?>", "", parts[name].decode())
    hostile = packed({**parts, name: f"{ENTITIES}{text}".encode(encoding)})
    assert told(f"a{suffix}", hostile)[0][0] == (
        f"its part {name} declares XML entities; save it again"
    )
    monkeypatch.setattr(conversion, "LIMITS", conversion.Limits(unpacked=1_000_000))
    bomb = packed({**parts, "media/film.mp4": b"\x00" * 2_000_000})
    assert len(bomb) < 100_000
    assert re.match(
        "its parts unpack to 2 MB, and at most 1 are read", told("a" + suffix, bomb)[0][0]
    )
    monkeypatch.setattr(conversion, "LIMITS", conversion.Limits(elements=2))
    assert "elements; split it" in told(f"a{suffix}", whole)[0][0]


def test_nothing_outside_is_opened(here: Path) -> None:
    (here / "secret.txt").write_text("secret")
    picture = (
        '<w:p><w:r><w:drawing><a:blip xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main"'
        ' r:link="x"/></w:drawing></w:r></w:p>'
    )
    outside = (here / "secret.txt").as_uri()
    links = relations(("s", "styles", "styles.xml"), ("x", "image", outside))
    data = docx(picture + paragraph("Text."), **{"word/_rels/document.xml.rels": links})
    assert load("a.docx", data).text == "Text."
    assert load("a.html", f"<img src='{outside}'><iframe src='{outside}'></iframe>x").text == "x"


@pytest.mark.slow
def test_absurd_sheets_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    first = '<row r="1"><c r="A1"><v>1</v></c><c r="B1"><v>2</v></c></row>'
    far = '<row r="1048576"><c r="XFD1048576"><v>3</v></c></row>'
    document = load("a.xlsx", sheet_of(first + '<row r="1000000"><c r="A1000000"/></row>'))
    assert document.text == "## One\n\n| 1 | 2 |\n| --- | --- |"
    assert len(load_documents("a.xlsx").skipped) == 0
    assert load("a.xlsx", sheet_of(first + far)).text.endswith("| --- | --- |\n\n3")
    monkeypatch.setattr(conversion, "LIMITS", conversion.Limits(positions=100_000))
    endless = sheet_of(f'{first}<row r="{10**12}"><c/></row>')
    ((reason, problem, partial),) = told("a.xlsx", endless)
    assert reason.startswith("the sheet 'One' ends behind row 2, as it has more than 1,000,000")
    assert (problem, partial) == (True, True)
    monkeypatch.setattr(conversion, "LIMITS", conversion.Limits(cells=20))
    rows = [[1, 2], *([3, 4] for _ in range(20))]
    assert told("a.xlsx", xlsx(One=rows))[0][0].startswith("the sheet 'One' ends behind row 10, ")
    values = "\n".join(",".join(map(str, row)) for row in rows)
    assert told("a.csv", values)[0][0].startswith("the table ends behind row 10, ")
    assert load("a.csv", values).text.count("| 3 | 4 |") == 9


@pytest.mark.slow
def test_absurd_pages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "deep in one another" in told("a.html", "<div>" * 100_000 + "x")[0][0]
    assert "deep in one another" in told("a.html", "<table><tr><td>" * 5_000 + "x")[0][0]
    assert "elements; split it" in told("a.html", "<b></b>" * 1_000_001)[0][0]
    spans = "<tr>" + "<td colspan=1000 rowspan=1000>x" * 20 + "</tr>"
    assert "cells; split it" in told("a.html", f"<table>{spans}{'<tr><td>y' * 1000}</table>")[0][0]
    numbers = load("b.html", "<ol start=99999999999999999999>" + "<li>x" * 20_000 + "</ol>")
    assert numbers.text.endswith("\n20000. x")


def test_an_absurd_mail_is_bounded() -> None:
    deep = "".join(
        f"Content-Type: multipart/mixed; boundary=b{n}\n\n--b{n}\n" for n in range(3_000)
    )
    assert "nested too deeply" in told("a.eml", f"Subject: x\n{deep}")[0][0]
    for odd in ("(" * 200_000, "=?utf-8?b?" * 20_000, "=?x?q?a?=", "a\x00b"):
        load("b.eml", f"Subject: {odd}\nFrom: {odd}\nDate: {odd}\nContent-Type: {odd}\n\nx")


@pytest.mark.parametrize("suffix", [*ONE_OF_EACH])
def test_damaged_files_never_raise(suffix: str) -> None:
    whole = ONE_OF_EACH[suffix]
    data = whole.encode() if isinstance(whole, str) else whole
    random_numbers = random.Random(suffix)

    def damage(data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(random_numbers.randint(1, 4)):
            place = random_numbers.randrange(len(changed) or 1)
            if random_numbers.random() < 0.5:
                changed[place : place + 1] = bytes([random_numbers.choice(b'<>/"&0\x00\xffa')])
            else:
                del changed[place : place + random_numbers.randint(1, 50)]
        return bytes(changed)

    for _ in range(40):
        damaged = damage(data)
        if suffix in ZIPPED:
            parts = parts_of(data)
            name = random_numbers.choice([one for one in parts if one.endswith(("l", "s", "f"))])
            inside = parts[name]
            damaged = packed(
                {
                    **parts,
                    name: damage(bytes(inside, "utf-8") if isinstance(inside, str) else inside),
                }
            )
        told(f"a{suffix}", damaged)


def test_what_stands_between_the_first_rules_of_a_page_is_text() -> None:
    document = load("a.html", "<hr><p>title: Zürich</p><hr><p>It has lakes.</p>")
    assert (document.title, document.metadata) == ("a", {"source": "a.html"})
    assert "title: Zürich" in document.text


@pytest.mark.parametrize(
    ("suffix", "package"),
    [
        *((".docx", "mammoth"), (".docx", "markdownify"), (".pptx", "pptx"), (".xlsx", "openpyxl")),
        *((".html", "markdownify"), (".html", "lxml"), (".epub", "markdownify")),
    ],
)
def test_a_missing_package_is_named(
    suffix: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    ((reason, problem, partial),) = told(f"a{suffix}", ONE_OF_EACH[suffix])
    name = "python-pptx" if package == "pptx" else package
    assert f"files needs {name}, which is not installed" in reason
    assert reason.endswith('run: pip install "rag-windows[formats]"')
    assert (problem, partial) == (True, False)


def test_tables_and_mails_take_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("bs4", "lxml", "markdownify", "mammoth", "openpyxl", "pptx"):
        monkeypatch.setitem(sys.modules, package, None)
    for suffix in (".csv", ".tsv", ".eml"):
        assert "Zürich" in load(f"a{suffix}", ONE_OF_EACH[suffix]).text
    page = mail("Content-Type: text/html\n\n<p>x")
    assert told("b.eml", page)[0][0].endswith('run: pip install "rag-windows[formats]"')
