from __future__ import annotations

import codecs
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rag_windows import DocumentError
from rag_windows_retrievers import Document, load_documents


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(name: str, data: str | bytes) -> Document:
    Path(name).write_bytes(data.encode() if isinstance(data, str) else data)
    (document,) = load_documents([name]).documents
    return document


def load_line(row: Any) -> Document:
    return load("rows.jsonl", row if isinstance(row, str) else json.dumps(row))


@pytest.mark.usefixtures("here")
class TestText:
    def test_plain(self) -> None:
        document = load("some notes.txt", "One.\r\nTwo.\rThree.")
        assert document.text == "One.\nTwo.\nThree."
        assert (document.id, document.title) == ("some notes.txt", "some notes")
        assert document.metadata == {"source": "some notes.txt"}

    @pytest.mark.parametrize(
        ("mark", "encoding"),
        [
            (b"", "utf-8"),
            (codecs.BOM_UTF8, "utf-8"),
            (codecs.BOM_UTF16_LE, "utf-16-le"),
            (codecs.BOM_UTF16_BE, "utf-16-be"),
            (codecs.BOM_UTF32_LE, "utf-32-le"),
            (codecs.BOM_UTF32_BE, "utf-32-be"),
        ],
    )
    def test_encodings(self, mark: bytes, encoding: str) -> None:
        assert load("a.txt", mark + "zürich 東京".encode(encoding)).text == "zürich 東京"

    def test_another_encoding_says_where_and_what_to_do(self) -> None:
        with pytest.raises(DocumentError, match=r"a\.txt:2: not valid UTF-8 \(byte 7\).*iconv"):
            load("a.txt", b"one\ncaf\xe9\n")

    def test_nothing_to_read(self) -> None:
        Path("empty").mkdir()
        Path("empty/a.txt").touch()
        Path("empty/b.txt").write_text(" \n")
        with pytest.raises(
            DocumentError, match=r"No text found in empty \(2 left out: empty/a.txt"
        ):
            load_documents(["empty"])
        with pytest.raises(DocumentError, match="No text found in nothing"):
            load_documents([])


@pytest.mark.usefixtures("here")
class TestMarkdown:
    @pytest.mark.parametrize(
        ("text", "title", "body"),
        [
            ("# The Bridge\n\nIt stands.", "The Bridge", "\nIt stands."),
            ("\n\n## The Bridge ##\nIt stands.", "The Bridge", "It stands."),
            ("The Bridge\n===\nIt stands.", "The Bridge", "It stands."),
            ("Before.\n\n# The Bridge\nIt stands.", "The Bridge", None),
            ("```\n# a comment\n```\n\n# The Bridge\nx", "The Bridge", None),
            ("~~~\n```\n# a comment\n~~~\n# The Bridge\nx", "The Bridge", None),
            ("No heading #here\n#nor here", "file", None),
            ("A rule below\na paragraph\n---\nis one.", "file", None),
            ("# Only a heading", "Only a heading", None),
        ],
    )
    def test_title(self, text: str, title: str, body: str | None) -> None:
        document = load("file.md", text)
        assert document.title == title
        assert document.text == (text if body is None else body)


@pytest.mark.usefixtures("here")
class TestJsonLines:
    def test_all_fields(self) -> None:
        row = {"id": "a", "title": "A", "text": "x\r\ny", "metadata": {"n": 1}, "url": "u"}
        document = load_line(row)
        assert document == Document(
            "x\ny", "a", "A", named=True, metadata={"n": 1, "url": "u", "source": "rows.jsonl"}
        )

    def test_least_fields(self) -> None:
        document = load_line('\n\n{"text": "x"}\n')
        assert (document.id, document.title, document.named) == ("rows.jsonl:3", None, False)

    def test_other_spellings(self) -> None:
        document = load_line({"_id": 7, "title": None, "page_content": "x"})
        assert (document.id, document.title, document.text) == ("7", None, "x")

    def test_odd_characters_survive(self) -> None:
        document = load_line('{"text": "a\u2028b \\ud83d\\ude00 \\ud83d end"}')
        assert document.text == "a\u2028b 😀 \ufffd end"

    @pytest.mark.parametrize(
        "line",
        [
            *("{'text': 1}", '{"text": ', "[" * 100_000, "1" * 10_000, '"text"', "{}"),
            *('{"text": 5}', '{"text": "x", "id": true}', '{"text": "x", "id": ["a"]}'),
            *('{"text": "x", "title": 5}', '{"text": "x", "metadata": 5}'),
        ],
    )
    def test_errors_name_file_and_line(self, line: str) -> None:
        with pytest.raises(DocumentError, match=r"rows.jsonl:2: not a JSON object such as"):
            load_line(f'{{"text": "fine"}}\n{line}')

    def test_blank_texts_are_left_out_and_told(self) -> None:
        Path("rows.jsonl").write_text('{"text": " "}\n{"text": "x"}\n')
        loaded = load_documents(["rows.jsonl"])
        assert [one.text for one in loaded.documents] == ["x"]
        assert [(one.label, one.reason) for one in loaded.skipped] == [("rows.jsonl:1", "no text")]


def write(path: Path, text: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def labels(*paths: str | Path, root: Path | None = None) -> list[str]:
    return [one.metadata["source"] for one in load_documents(paths, root=root).documents]


def test_folders_are_read_whole_and_in_order(here: Path) -> None:
    for name in ("docs/b.md", "docs/a.txt", "docs/deep/er/c.jsonl", "docs/Z.MD"):
        write(here / name, '{"text": "text"}')
    loaded = load_documents(["docs"])
    assert [one.id for one in loaded.documents] == [
        *("docs/Z.MD", "docs/a.txt", "docs/b.md", "docs/deep/er/c.jsonl:1")
    ]
    assert loaded.skipped == ()


def test_each_file_comes_once_and_in_the_order_given(here: Path) -> None:
    write(here / "docs/a.txt")
    write(here / "docs/b.txt")
    (here / "docs/same.txt").symlink_to("a.txt")
    assert labels("docs/b.txt", "docs", "docs/a.txt") == ["docs/b.txt", "docs/a.txt"]


def test_what_a_folder_leaves_out_is_told(here: Path) -> None:
    write(here / "docs/a.md")
    write(here / "docs/.hidden.md")
    write(here / "docs/.git/config.md")
    write(here / "docs/logo.png")
    write(here / "docs/empty.md", "")
    (here / "docs/binary.txt").write_bytes(b"a\x00b")
    write(here / "docs/huge.txt", "x" * 2000)
    (here / "docs/gone.md").symlink_to("nowhere")
    os.mkfifo(here / "docs/pipe.txt")
    loaded = load_documents([Path("docs")], max_bytes=1000)
    assert [one.id for one in loaded.documents] == ["docs/a.md"]
    assert {one.label: one.reason for one in loaded.skipped} == {
        "docs/.hidden.md": "hidden",
        "docs/.git": "hidden",
        "docs/logo.png": "not .txt, .md, .jsonl or .pdf",
        "docs/empty.md": "empty",
        "docs/binary.txt": "binary, not text; name .txt, .md, .jsonl or .pdf files",
        "docs/huge.txt": "0.002 MB, more than the 0.001 MB that are read",
        "docs/gone.md": "a broken link",
        "docs/pipe.txt": "not a regular file",
    }


def test_links_to_folders_are_followed_but_never_round(here: Path) -> None:
    write(here / "docs/a.md")
    write(here / "elsewhere/b.md")
    (here / "docs/linked").symlink_to(here / "elsewhere")
    (here / "docs/loop").symlink_to(".")
    (here / "elsewhere/up").symlink_to(here / "docs")
    loaded = load_documents(["docs"])
    assert [one.id for one in loaded.documents] == ["docs/a.md", "docs/linked/b.md"]
    assert {one.label for one in loaded.skipped} == {"docs/loop", "docs/linked/up"}


def test_patterns(here: Path) -> None:
    for name in ("docs/a.md", "docs/deep/b.md", "docs/deep/c.txt", "docs/.x/d.md"):
        write(here / name)
    # Following such links would take 2**40 steps.
    (here / "docs/one").symlink_to(".")
    (here / "docs/two").symlink_to(".")
    assert labels("docs/*.md") == ["docs/a.md"]
    assert labels("docs/**/*.md") == ["docs/a.md", "docs/deep/b.md"]
    assert labels("docs/d*") == ["docs/deep/b.md", "docs/deep/c.txt"]
    assert labels("docs/.x/*.md") == ["docs/.x/d.md"]
    assert labels(str(here / "docs/deep/*.txt")) == ["docs/deep/c.txt"]


def test_a_name_that_looks_like_a_pattern_but_exists(here: Path) -> None:
    write(here / "notes[1].txt")
    assert labels("notes[1].txt") == ["notes[1].txt"]


def test_labels_outside_the_working_folder_do_not_show_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    write(tmp_path / "corpus/deep/a.md")
    write(tmp_path / "other/b.md")
    assert labels(tmp_path / "corpus", tmp_path / "other/b.md") == ["corpus/deep/a.md", "b.md"]


def test_labels_may_have_another_root(here: Path) -> None:
    write(here / "docs/deep/a.md")
    assert labels("docs", root=Path("docs")) == ["deep/a.md"]
    assert labels("docs", root=here / "docs/deep") == ["a.md"]


def test_labels_are_unique(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    first, second = write(tmp_path / "x/docs/a.md"), write(tmp_path / "y/docs/a.md")
    assert labels(first.parent, second.parent) == ["docs/a.md", second.as_posix()]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.txt", "nothing.txt: no such file or folder; name files"),
        ("nothing/*.txt", "matches nothing"),
        ("a**b/*.txt", "a\\*\\*b"),
        ("logo.png", "logo.png: binary, not text; name .txt"),
        ("data.json", r"data.json: JSON in one piece is not read .*\.jsonl"),
        ("pipe", "pipe: not a regular file"),
        ("nul\x00", "null byte"),
        ("loop", "too many levels of symbolic links"),
        ("Why? " * 2000, "matches nothing|file name too long"),
    ],
)
def test_what_is_named_must_be_readable(here: Path, name: str, message: str) -> None:
    (here / "logo.png").write_bytes(b"\x89PNG\x00")
    write(here / "data.json", "[]")
    os.mkfifo(here / "pipe")
    (here / "loop").symlink_to("loop")
    with pytest.raises(DocumentError, match=message):
        load_documents([name])


def test_a_named_file_of_any_suffix_is_text(here: Path) -> None:
    write(here / "README")
    write(here / ".notes.rst")
    assert labels("README", ".notes.rst") == ["README", ".notes.rst"]


def test_undecodable_names_become_printable(here: Path) -> None:
    (Path(os.fsencode(here).decode()) / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    assert labels(".") == ["caf\ufffd.txt"]
