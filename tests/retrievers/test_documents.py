from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pytest

from rag_windows.errors import DocumentError
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
        with pytest.raises(DocumentError, match="No documents were named"):
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
        ("line", "message"),
        [
            ("{'text': 1}", r"rows.jsonl:2: not a JSON object"),
            ('{"text": ', r"rows.jsonl:2: not a JSON object"),
            ("[" * 100_000, r"rows.jsonl:2: not a JSON object \(too deep or too large\)"),
            ("1" * 10_000, r"rows.jsonl:2: not a JSON object \(too deep or too large\)"),
            ('"text"', r"rows.jsonl:2: each line must be a JSON object"),
            ("{}", r'rows.jsonl:2: the object needs a "text"'),
            ('{"text": 5}', r'rows.jsonl:2: the object needs a "text" that is a string'),
            ('{"text": "x", "id": true}', 'rows.jsonl:2: "id" must be a string'),
            ('{"text": "x", "id": ["a"]}', 'rows.jsonl:2: "id" must be a string'),
            ('{"text": "x", "title": 5}', 'rows.jsonl:2: "title" must be a string'),
            ('{"text": "x", "metadata": 5}', 'rows.jsonl:2: "metadata" must be an object'),
        ],
    )
    def test_errors_name_file_and_line(self, line: str, message: str) -> None:
        with pytest.raises(DocumentError, match=message):
            load_line(f'{{"text": "fine"}}\n{line}')

    def test_blank_texts_are_left_out_and_told(self) -> None:
        Path("rows.jsonl").write_text('{"text": " "}\n{"text": "x"}\n')
        loaded = load_documents(["rows.jsonl"])
        assert [one.text for one in loaded.documents] == ["x"]
        assert [(one.label, one.reason) for one in loaded.skipped] == [("rows.jsonl:1", "no text")]
