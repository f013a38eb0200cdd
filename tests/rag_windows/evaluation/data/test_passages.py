from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from rag_windows import DataError
from rag_windows.evaluation.inscit import read_corpus


def file(folder: Path, text: str | bytes, name: str = "corpus.tsv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def problem(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_corpus(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(str(path))


def test_lines_of_json(tmp_path: Path) -> None:
    rows = [{"id": "a", "text": "One.", "title": "T"}, {"id": 7, "text": "Two."}]
    path = file(tmp_path, "\n".join(map(json.dumps, rows)), "corpus.jsonl")
    found = [(one.id, one.text, one.title) for one in read_corpus(path)[0]]
    assert found == [("a", "One.", "T"), ("7", "Two.", None)]


def test_tab_separated_values_as_the_datasets_write_them(tmp_path: Path) -> None:
    text = (
        "id\ttext\ttitle\n"
        "Orvell:0\tA town.\tOrvell [SEP] History\n"
        'Orvell:1\t"The ""old"" mill."\tOrvell\r\n'
        "id\ttext\ttitle\n"
        '2\t"Ice", they say.\tHarbour\n'
        "3\tNo title.\n"
    )
    passages, stamp = read_corpus(file(tmp_path, text))
    assert [(one.id, one.text, one.title) for one in passages] == [
        ("Orvell:0", "A town.", "Orvell - History"),
        ("Orvell:1", 'The "old" mill.', "Orvell"),
        ("2", '"Ice", they say.', "Harbour"),
        ("3", "No title.", None),
    ]
    assert stamp["file"] == "corpus.tsv"
    assert len(stamp["sha256"]) == 64


def test_a_byte_order_mark_is_no_part_of_the_first_id(tmp_path: Path) -> None:
    plain = b"\xef\xbb\xbfa\tone\nb\ttwo\n"
    for data in (plain, gzip.compress(plain)):
        assert [one.id for one in read_corpus(file(tmp_path, data))[0]] == ["a", "b"]


def test_compressed_files(tmp_path: Path) -> None:
    packed = gzip.compress(b"id\ttext\n" + b"".join(b"%d\ttext\n" % n for n in range(999)))
    assert len(read_corpus(file(tmp_path, packed))[0]) == 999
    assert "damaged or cut off" in problem(file(tmp_path, packed[:-20]))
    damaged = bytearray(packed)
    damaged[40] ^= 0xFF
    assert "damaged or cut off" in problem(file(tmp_path, bytes(damaged)))


def test_a_megabyte_passage_is_one_passage(tmp_path: Path) -> None:
    text = "word " * 250_000
    assert read_corpus(file(tmp_path, f"1\t{text}\tLong\n"))[0][0].text == text
    line = json.dumps({"id": "1", "text": text})
    assert read_corpus(file(tmp_path, line))[0][0].text == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": there is no passage in it"),
        ("id\ttext\ttitle\n", ": there is no passage in it"),
        ("a\tone\na\ttwo\n", ", line 2: the id 'a' stands in line 1 already"),
        ('{"id": "a", "text": "x"}\n{"id": "a", "text": "x"}', ", line 2: the id 'a' stands in"),
        ("only one column\n", ", line 1: 1 column(s); a line is a JSON object, or id, text"),
        ("a\tb\tc\td\n", ", line 1: 4 column(s)"),
        ("\ttext\ttitle\n", ", line 1: the id is empty"),
        ('{"text": "x"}', ", line 1, id: Field required"),
        ('{"id": "a"}', ", line 1, text: Field required"),
        ('{"id": "a", "text": ["x"]}', ", line 1, text: Input should be a valid string."),
        ('{"id": true, "text": "x"}', ", line 1, id: Input should be a valid string."),
        ('{"id": "a", "text": "x", "title": 3}', ", line 1, title: Input should be a valid string"),
        ('{"id": "a", "text": "x"', ", line 1: not valid JSON at column"),
        (b"a\tb\xff\n", ": not UTF-8 at line 1, byte 4"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str | bytes, message: str) -> None:
    assert message in problem(file(tmp_path, text))


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert problem(tmp_path / "none.tsv").endswith("there is no such file; check the path.")
    assert problem(tmp_path).endswith("this is a folder; name the file in it.")
