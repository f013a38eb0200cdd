from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rag_windows import DocumentError
from rag_windows_retrievers import Document, load_documents


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
        ("A rule below\n---\nis one.", "file", None),
        ("# Only a heading", "Only a heading", None),
    ],
)
def test_a_heading_is_the_title(text: str, title: str, body: str | None) -> None:
    document = load("file.md", text)
    assert document.title == title
    assert document.text == (text if body is None else body)


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
        "logo.png": "not .txt, .md, .jsonl or .pdf",
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
