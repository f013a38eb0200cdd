from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from rag_windows import DataError
from rag_windows.evaluation.files import read


def file(folder: Path, data: bytes) -> Path:
    path = folder / "dev.json"
    path.write_bytes(data)
    return path


def problem(path: str | Path) -> str:
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no such file; check the path." in problem(tmp_path / "none.json")
    assert "this is a folder; name the file in it." in problem(tmp_path)
    inside = file(tmp_path, b"{}") / "dev.json"
    assert "it can't be read (Not a directory)" in problem(inside)
    assert "it can't be read" in problem("a\0b")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "it can't be read (Permission denied); check path, permissions and disk." in problem(
        tmp_path / "dev.json"
    )


@pytest.mark.parametrize("data", [b"", b" \n\t", b"\xef\xbb\xbf"])
def test_an_empty_file_is_an_error(tmp_path: Path, data: bytes) -> None:
    assert "the file is empty; fetch or write it again." in problem(file(tmp_path, data))


def test_other_encodings_are_told(tmp_path: Path) -> None:
    latin = "not UTF-8 at line 2, byte 11; convert it to UTF-8."
    assert latin in problem(file(tmp_path, b'{\n "a": "x\xe4lter" }'))
    assert "it is UTF-16 or UTF-32" in problem(file(tmp_path, '{"a": 1}'.encode("utf-16")))
    cut = problem(file(tmp_path, '{"a": "é'.encode()[:-1]))
    assert "byte 8; it may be cut off" in cut


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"a": 1}'
    source = read(file(tmp_path, data))
    assert source.json(dict[str, int]) == {"a": 1}
    assert source.stamp == {"file": "dev.json", "sha256": hashlib.sha256(data).hexdigest()}


def test_records_of_a_list_and_of_lines(tmp_path: Path) -> None:
    rows: list[Any] = [{"a": 1}, {"b": "two \u2028 lines"}]
    listed = read(file(tmp_path, json.dumps(rows).encode())).records(Any)
    assert [(place.record, row) for place, row in listed] == [
        ("record 1", rows[0]),
        ("record 2", rows[1]),
    ]
    text = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    lines = read(file(tmp_path, text.encode())).records(Any)
    assert [(place.record, row) for place, row in lines] == [
        ("line 1", rows[0]),
        ("line 3", rows[1]),
    ]


def test_a_damaged_line_is_named_with_its_byte_in_the_file(tmp_path: Path) -> None:
    path = file(tmp_path, '{"a": "é"}\r\n{"b": }\n'.encode())
    with pytest.raises(DataError) as caught:
        list(read(path).records(Any))
    assert str(caught.value).startswith(
        f"{path}, line 2: not valid JSON at column 7, byte 20 (Expecting value)"
    )


def test_other_content_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Input should be a valid array"):
        list(read(file(tmp_path, b'"x"')).records(Any))


def test_a_megabyte_of_text_is_read_whole(tmp_path: Path) -> None:
    text = "word " * 250_000
    assert read(file(tmp_path, json.dumps([text]).encode())).json(list[str]) == [text]
