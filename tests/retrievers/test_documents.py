from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pypdf import PageObject
from pypdf.errors import DependencyError

from rag_windows import DocumentError, InputError
from rag_windows_retrievers import (
    Document,
    Skipped,
    documents_of,
    load_documents,
    split_documents,
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def write(path: str | Path, data: str | bytes = "text") -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def load(name: str, data: str | bytes) -> Document:
    (document,) = load_documents([write(name, data)]).documents
    return document


def labels(*paths: str | Path, root: Path | None = None) -> list[str]:
    return [one.metadata["source"] for one in load_documents(paths, root=root).documents]


def test_plain_text() -> None:
    document = load("some notes.txt", "One.\r\nZürich.\r東京.".encode("utf-8-sig"))
    assert document.text == "One.\nZürich.\n東京."
    assert (document.id, document.title) == ("some notes.txt", "some notes")
    assert document.metadata == {"source": "some notes.txt"}


@pytest.mark.parametrize(
    ("text", "title", "body"),
    [
        ("# The Bridge\n\nIt stands.", "The Bridge", "\nIt stands."),
        ("\n\n## The Bridge ##\nIt stands.", "The Bridge", "It stands."),
        ("Before.\n\n# The Bridge\nIt stands.", "The Bridge", None),
        ("~~~\n```\n# a comment\n~~~\n# The Bridge\nx", "The Bridge", None),
        ("A paragraph.\n\n---\nA rule above.", "file", None),
        ("# Only a heading", "Only a heading", None),
        # Front matter states a title, or has none; its comments are no headings.
        ("---\n# a comment\ndraft: true\n---\n# The Bridge\nx", "The Bridge", "x"),
        ("---\n# a comment\n---\n\n# The Bridge\nx", "The Bridge", None),
        ("---\ntitle: 'The Bridge'\n---\n# Other\nx", "The Bridge", "# Other\nx"),
        ("---\ntitle: Halden: 橋\U0001f309\n...\n# Other\nx", "Halden: 橋\U0001f309", "# Other\nx"),
        ("---\ntitle: 1931\n---\nx", "1931", "x"),
        ("---\ntitle: true\n---\nx", "true", "x"),
        ("---\ntitle: null\n---\n# The Bridge\nx", "The Bridge", "x"),
        ("---\ntitle: ~\ntags: [a]\n---\nx", "file", "x"),
        ("---\ntitle: The Bridge\n---\n\n", "The Bridge", None),
        ("+++\ntitle = 'The Bridge'\n+++\nx", "The Bridge", "x"),
        ("---\ntitle:\n- 1\n---\n# The Bridge\nx", "The Bridge", None),
        ("---\na: !!timestamp x\ntitle: The Bridge\n---\n# Other\nx", "The Bridge", None),
        ("---\na: !!bool x\nb: !!int ''\n---\n# The Bridge\nx", "The Bridge", None),
        ("---\n\n# The Bridge\n\n---\n\nx", "The Bridge", None),
        ("---\n\nNote: It stands.\n\n---\n\nx", "file", None),
        # HTML
        ("<!--\n# a comment\n-->\n# The Bridge\nx", "The Bridge", None),
        # Underlined
        ("The Bridge\n==========\nIt stands.", "The Bridge", "It stands."),
        ("The\nBridge\n---\nIt stands.", "The Bridge", "It stands."),
        # Marks are for the eye; what they hold stays in the text.
        ("# The *Bridge* of `Halden`\nx", "The Bridge of Halden", None),
        ("# [The Bridge](https://halden.example)\nx", "The Bridge", None),
        ("# The Bridge <a id='bridge'></a> &amp; more ###\nx", "The Bridge & more", None),
        # Lists and quotes are not the document.
        ("> # Quoted\n\n- # Listed\n\n# The Bridge\nx", "The Bridge", None),
        (f"# {'word ' * 3300}\nx", "word " * 399 + "word", None),
    ],
)
def test_a_heading_is_the_title(text: str, title: str, body: str | None) -> None:
    document = load("file.md", text)
    if len(title) > 1000:
        assert document.title is not None
        assert document.title.startswith(title)
    else:
        assert document.title == title
    assert document.text == (text if body is None else body)


@pytest.mark.parametrize(
    ("front", "own"),
    [
        ("title: The Bridge\nauthor: Ada\nVersion: 1931", {"author": "Ada", "Version": "1931"}),
        ("title: The Bridge\ntags: [old, 9]\nlang:", {"tags": ["old", "9"], "lang": ""}),
        (
            "title: The Bridge\ndate: 1931-05-01\nupdated: [1931-05-01 10:00:00]",
            {"date": "1931-05-01", "updated": ["1931-05-01 10:00:00"]},
        ),
        ("title: Halden: The Bridge\ndraft: false", {"draft": "false"}),
    ],
)
def test_front_matter_is_metadata_and_no_text(front: str, own: dict[str, object]) -> None:
    document = load("file.md", f"---\n{front}\n---\nThe bridge stands.")
    assert document.text == "The bridge stands."
    assert document.metadata == {**own, "source": "file.md"}
    (passage,) = split_documents(document)
    assert (passage.text, passage.metadata.items() >= own.items()) == (document.text, True)


@pytest.mark.parametrize(
    "front",
    [
        "author:\n  name: Ada",
        "Warning: the pump must be off.",
        "tags: The pump is broken and must not be run again.",
        "status: The pump is broken.",
        "title: The Bridge\nsummary: It was built in 1931.",
        "page: about",
        "source: a book",
        f"x: 1{':00' * 200}.5",
        "a: &a {k: 1}\n"
        + "\n".join(
            f"{key}: &{key}\n  <<: [{', '.join([f'*{before}'] * 20)}]"
            for before, key in pairwise("abcdefghijkl")
        ),
        f"tags: {'[' * 9000}",
        "tags: [[a], b]",
        "title: [a]",
        "tags: &a [*a]",
        "title: Halden: The Bridge\nauthor: 'Ada",
        f"author: &a {'long' * 500}\ntags: [{'*a, ' * 2000}]",
    ],
)
def test_front_matter_that_metadata_do_not_hold_stays_in_the_text(front: str) -> None:
    text = f"---\n{front}\n---\nThe bridge stands."
    document = load("file.md", text)
    assert document.text == text
    assert document.metadata == {"source": "file.md"}


@pytest.mark.parametrize(
    "front", ["weight = inf", f"version = 0x{'f' * 5000}", "date = {a = 1}", "tags = [[1]]"]
)
def test_toml_that_metadata_do_not_hold_stays_in_the_text(front: str) -> None:
    text = f"+++\n{front}\n+++\nThe bridge stands."
    assert load("file.md", text).text == text


def test_a_title_that_passages_can_not_carry_stays_in_the_text() -> None:
    text = f"---\ntitle: {' '.join(f'word{at}' for at in range(40))}\n---\nThe bridge stands."
    assert load("file.md", text).text == text


def test_a_heading_of_thousands_of_words_is_no_obstacle() -> None:
    write("long.md", f"# {'Halden ' * 3300}\n\n{'The bridge stands. ' * 100}")
    passages = split_documents(load_documents("long.md").documents)
    assert "".join(one.text for one in passages).count("Halden") == 3300
    assert {one.title for one in passages} == {"Halden " * 31 + "Halden…"}


def test_json_lines() -> None:
    rows = [
        {"id": "a", "title": "A", "text": "x\r\ny", "metadata": {"n": 1}, "url": "u"},
        {"_id": 7, "title": None, "page_content": "x"},
        {"text": " "},
    ]
    odd = '{"text": "a\u2028b \\ud83d\\ude00 \\ud83d end"}'
    write("rows.jsonl", "\n".join([*map(json.dumps, rows), "", odd]))
    loaded = load_documents(["rows.jsonl"])
    first, second, third = loaded.documents
    metadata = {"n": 1, "url": "u", "source": "rows.jsonl"}
    assert first == Document("x\ny", "a", "A", named=True, metadata=metadata)
    assert (second.id, second.title, second.text) == ("7", None, "x")
    assert (third.id, third.named) == ("rows.jsonl:5", False)
    assert third.text == "a\u2028b 😀 \ufffd end"
    assert [(one.label, one.reason) for one in loaded.skipped] == [("rows.jsonl:3", "no text")]


def test_what_a_json_line_states_stays() -> None:
    rows = [
        {"text": "One two.", "source": "radio", "start": 3.5, "end": 7, "page": 9, "section": "x"},
        {"text": "One two.", "metadata": {"source": "press", "start": "monday"}},
        {"text": "One two."},
    ]
    write("rows.jsonl", "\n".join(map(json.dumps, rows)))
    first, second, third = (
        one.metadata for one in split_documents(load_documents("rows.jsonl").documents)
    )
    ours = {"passage_source": "rows.jsonl", "passage_start": 0, "passage_end": 8}
    assert first == {"source": "radio", "start": 3.5, "end": 7, "page": 9, "section": "x", **ours}
    assert second == {
        **{"source": "press", "start": "monday"},
        **{"passage_source": "rows.jsonl", "passage_start": 0, "end": 8},
    }
    assert third == {"source": "rows.jsonl", "start": 0, "end": 8}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.jsonl"])
def test_a_byte_order_mark_says_the_encoding(encoding: str, name: str) -> None:
    text = "Zürich.\r\n東京 \U0001f600."
    shown = json.dumps({"text": text}, ensure_ascii=False) if name == "a.jsonl" else text
    document = load(name, f"\ufeff{shown}".encode(encoding))
    assert document.text == "Zürich.\n東京 \U0001f600."


def test_a_file_that_was_cut_is_not_taken_for_another_encoding() -> None:
    write("c.txt", "\ufeffab".encode("utf-16-le")[:-1])
    with pytest.raises(DocumentError, match=r"c.txt:1: not valid UTF-16.*damaged or cut short"):
        load_documents("c.txt")


@pytest.mark.parametrize(
    "line",
    [
        *("{'text': 1}", "[" * 100_000, "1" * 10_000, '"text"', "{}", '{"text": 5}'),
        *('{"text": "x", "id": true}', '{"text": "x", "metadata": 5}'),
    ],
)
def test_a_bad_line_is_named_or_left_out(line: str) -> None:
    write("rows.jsonl", f'{{"text": "fine"}}\n{line}')
    with pytest.raises(DocumentError, match=r"rows.jsonl:2: not a JSON object such as"):
        load_documents(["rows.jsonl"])
    loaded = load_documents(["rows.jsonl"], strict=False)
    assert len(loaded.documents) == 1
    assert [one.problem for one in loaded.skipped] == [True]


def test_what_a_folder_leaves_out_is_told(here: Path) -> None:
    for name in ("b.md", "a.txt", "deep/er/c.jsonl", "Z.MD", ".hidden.md", ".git/x.md", "logo.png"):
        write(f"docs/{name}", '{"text": "text"}')
    write("docs/empty.md", "")
    write("docs/binary.txt", b"a\x00b")
    write("elsewhere/c.md")
    Path("docs/gone.md").symlink_to("nowhere")
    Path("docs/same.txt").symlink_to("a.txt")
    Path("docs/linked").symlink_to(here / "elsewhere")
    Path("docs/loop").symlink_to(".")
    os.mkfifo("docs/pipe.txt")
    loaded = load_documents(["docs/b.md", Path("docs"), "docs/a.txt"], strict=False)
    assert [one.id for one in loaded.documents] == [
        *("docs/b.md", "docs/Z.MD", "docs/a.txt", "docs/deep/er/c.jsonl:1")
    ]
    told = {one.label.removeprefix("docs/"): one.reason for one in loaded.skipped}
    assert told.pop("binary.txt").startswith("binary, not UTF-8 text")
    assert told == {
        "gone.md": "not a regular file",
        "pipe.txt": "not a regular file",
        "logo.png": ".png files are not read",
        "empty.md": "no text",
    }
    assert [one.label for one in loaded.skipped if one.problem] == ["docs/binary.txt"]
    with pytest.raises(DocumentError, match=r"docs/binary.txt: binary"):
        load_documents(["docs"])


def test_patterns(here: Path) -> None:
    for name in ("a.md", "deep/b.md", "deep/c.txt", ".x/d.md"):
        write(f"docs/{name}")
    write("notes[1].txt")
    # Following such links would take 2**40 steps.
    Path("docs/one").symlink_to(".")
    Path("docs/two").symlink_to(".")
    assert labels("docs/**/*.md") == ["docs/a.md", "docs/deep/b.md"]
    assert labels("docs/d*") == ["docs/deep/b.md", "docs/deep/c.txt"]
    assert labels("docs/.x/*.md") == ["docs/.x/d.md"]
    assert labels(str(here / "docs/deep/*.txt")) == ["docs/deep/c.txt"]
    assert labels("notes[1].txt") == ["notes[1].txt"]


def test_labels_are_relative_and_printable(here: Path) -> None:
    outside = write(here.parent / "x/docs/a.md").parent
    assert labels(outside) == ["../x/docs/a.md"]
    assert labels(outside, root=here.parent / "x") == ["docs/a.md"]
    (Path(os.fsencode(here).decode()) / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    write("README")
    write(".notes.rst")
    assert labels(".", "README", ".notes.rst") == ["caf\ufffd.txt", "README", ".notes.rst"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.txt", "nothing.txt: no such file or folder. Name files"),
        ("nothing/*.txt", "matches nothing"),
        ("logo.png", "logo.png: binary, not UTF-8 text; name .txt"),
        ("pipe", "pipe: not a regular file"),
        ("nul\x00", "null (byte|character)"),
        ("latin.txt", r"latin\.txt:2: not valid UTF-8 \(byte 7\).*iconv"),
        ("empty", r"No text found in empty \(2 left out: empty/a.txt"),
    ],
)
def test_what_is_named_must_be_readable(name: str, message: str) -> None:
    write("logo.png", b"\x89PNG\x00")
    write("latin.txt", b"one\ncaf\xe9\n")
    write("empty/a.txt", "")
    write("empty/b.txt", " \n")
    os.mkfifo("pipe")
    with pytest.raises(DocumentError, match=message):
        load_documents([name])
    with pytest.raises(DocumentError, match="No text found in nothing"):
        load_documents([])


def test_one_path_needs_no_list(here: Path) -> None:
    write("docs/a.md")
    write("docs/b.txt")
    for one in ("docs", "docs/", "docs/*", Path("docs"), here / "docs", [here / "docs"], ("docs",)):
        assert [d.id for d in load_documents(one).documents] == ["docs/a.md", "docs/b.txt"]
    wrong: Any
    for wrong in (3, [3]):
        with pytest.raises(InputError, match="paths must be a string, a Path or a list of these"):
            load_documents(wrong)


TEXT = "The tower has nine bells."


def pdf(*pages: list[tuple[int, str]] | str | None, title: str = "") -> bytes:
    """A PDF file: of each page its lines with their sizes, or a content stream, or nothing."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "", f"<< /Title ({title}) >>"]
    objects.append("<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    kids = []
    for page in pages:
        drawn = page
        if isinstance(page, list):
            lines = (f"/F1 {size} Tf 0 -{2 * size} Td ({line}) Tj" for size, line in page)
            drawn = f"BT 72 700 Td {' '.join(lines)} ET"
        contents = ""
        if drawn is not None:
            objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream")
            contents = f"/Contents {len(objects)} 0 R"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] {contents} "
            "/Resources << /Font << /F1 4 0 R >> >> >>"
        )
        kids.append(f"{len(objects)} 0 R")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    body = "".join(f"{number} 0 obj\n{one}\nendobj\n" for number, one in enumerate(objects, 1))
    trailer = f"<< /Size {len(objects) + 1} /Root 1 0 R /Info 3 0 R >>"
    return f"%PDF-1.4\n{body}trailer\n{trailer}\nstartxref\n0\n%%EOF\n".encode("ascii")


DRAWN = "0 0 m 100 100 l S"


def test_what_pypdf_lacks_for_a_file_is_no_fault_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lacking(*_: object) -> None:
        raise DependencyError("cryptography>=3.1 is required for AES algorithm")

    monkeypatch.setattr("pypdf.PdfReader.__init__", lacking)
    reason = "cryptography>=3.1 is required for AES algorithm; install that with pip"
    found = documents_of(pdf([(12, TEXT)]), "a.pdf")
    assert found == [Skipped("a.pdf", reason, problem=True, environment=True)]


@pytest.mark.parametrize(
    ("pages", "reason", "problem"),
    [
        ([[(12, TEXT)], *[DRAWN] * 9], "pages 2-10 of 10 without text", True),
        ([[(12, TEXT)], DRAWN, DRAWN, None, DRAWN], "pages 2-3, 5 of 5 without text", True),
        ([DRAWN, [(12, TEXT)], [(12, TEXT)]], "page 1 of 3 without text", False),
        ([[(12, TEXT)], "BT /F1 12 Tf () Tj ET", [(12, TEXT)]], "page 2 of 3 without text", False),
        ([[(12, TEXT)], None, ""], "", False),
    ],
)
def test_pages_without_text_are_reported(
    pages: list[list[tuple[int, str]] | str | None], reason: str, problem: bool
) -> None:
    write("a.pdf", pdf(*pages))
    loaded = load_documents("a.pdf", strict=False)
    assert TEXT in loaded.documents[0].text
    assert [one.reason for one in loaded.skipped] == (
        [f"{reason}; scanned pages need OCR first"] if reason else []
    )
    assert all((one.label, one.partial) == ("a.pdf", True) for one in loaded.skipped)
    assert [one.problem for one in loaded.skipped] == [problem] * bool(reason)
    if problem:
        with pytest.raises(DocumentError, match=f"a.pdf: {reason}"):
            load_documents("a.pdf")


@pytest.mark.parametrize("damaged", [[2], [1], [2, 3], [1, 2, 3]])
def test_an_unreadable_page_is_reported_and_the_others_are_read(
    damaged: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    extract = PageObject.extract_text

    def failing(page: PageObject, *args: Any, **options: Any) -> str:
        if (page.page_number or 0) + 1 in damaged:
            raise KeyError("/Font")
        return extract(page, *args, **options)

    monkeypatch.setattr(PageObject, "extract_text", failing)
    write("a.pdf", pdf(*[[(12, f"Page {page}. {TEXT}")] for page in (1, 2, 3)]))
    if len(damaged) == 3:
        with pytest.raises(DocumentError, match=r"not a PDF file that pypdf can read \('/Font'\)"):
            load_documents("a.pdf")
        return
    loaded = load_documents("a.pdf", strict=False)
    (skipped,) = loaded.skipped
    assert "of 3 can't be read ('/Font'); save it again as PDF" in skipped.reason
    assert (skipped.problem, skipped.partial) == (True, True)
    found = split_documents(loaded.documents, words=7)
    pages = [page for page in (1, 2, 3) if page not in damaged]
    assert [one.text for one in found] == [f"Page {page}. {TEXT}" for page in pages]
    assert [one.metadata["page"] for one in found] == pages
    with pytest.raises(DocumentError, match="can't be read"):
        load_documents("a.pdf")


def test_passages_of_a_pdf_name_their_pages() -> None:
    pages = [[(12, f"Page {n} has a text."), (12, "It ends.")] for n in (1, 2, 4)]
    write("a.pdf", pdf(pages[0], pages[1], None, pages[2]))
    passages = split_documents(load_documents("a.pdf").documents, words=12)
    places = [(one.metadata["page"], one.metadata["last_page"]) for one in passages]
    assert places == [(1, 1), (2, 2), (4, 4)]
    (one,) = split_documents(load_documents("a.pdf").documents)
    assert one.place == "pages 1-4"
    for passage in passages:
        assert f"Page {passage.metadata['page']} " in passage.text


LINES = [(10, "The tower of Halden has nine bells and a clock"), (10, "that was made in Tirmouth.")]


@pytest.mark.parametrize(
    ("stated", "lines", "title"),
    [
        ("The Tower", [*LINES], "The Tower"),
        ("", [(20, "The Tower"), (20, "of Halden"), *LINES], "The Tower of Halden"),
        ("Microsoft Word - report.docx", [(20, "The Tower"), *LINES], "The Tower"),
        ("untitled", [(8, "Halden Press"), (20, "The Tower"), *LINES], "The Tower"),
        ("", [(10, "The Tower of Halden"), *LINES], "The Tower of Halden"),
        ("report.tex", [(10, "The Tower of Halden"), *LINES], "The Tower of Halden"),
        ("", [*LINES], "a"),
        ("", [(10, "12/7"), *LINES], "a"),
        ("", [(10, TEXT)], "a"),
        ("Document1", [(40, "T"), *LINES], "a"),
    ],
)
def test_the_title_of_a_pdf(stated: str, lines: list[tuple[int, str]], title: str) -> None:
    assert load("a.pdf", pdf(lines, title=stated)).title == title
