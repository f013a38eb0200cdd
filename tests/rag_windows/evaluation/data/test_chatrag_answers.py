from __future__ import annotations

from pathlib import Path

import pytest

from rag_windows import DataError
from rag_windows.evaluation.chatrag import read_answers, write_answers

ANSWERS = ["In 1811.", "", "two\nlines\r\nand\rmore \u2028 é", "  wide  "]
LINES = ("In 1811.", "", "two lines and more \u2028 é", "wide")


def test_one_answer_a_line(tmp_path: Path) -> None:
    path = tmp_path / "ape.txt"
    write_answers(path, ANSWERS)
    assert read_answers(path, 4) == LINES
    # The benchmark's script reads lines so.
    with path.open(encoding="utf-8") as stream:
        assert tuple(line.strip() for line in stream.readlines()) == LINES


def test_no_answers_are_an_empty_file(tmp_path: Path) -> None:
    write_answers(tmp_path / "none.txt", [])
    assert read_answers(tmp_path / "none.txt", 0) == ()


@pytest.mark.parametrize("count", [3, 5, 0])
def test_another_number_of_lines_is_told(tmp_path: Path, count: int) -> None:
    path = tmp_path / "ape.txt"
    write_answers(path, ANSWERS)
    with pytest.raises(DataError, match=rf"ape\.txt: 4 line\(s\) for {count} record\(s\)"):
        read_answers(path, count)


def test_a_last_line_without_its_end_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "ape.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\r\nthree")
    assert read_answers(path, 3) == ("one", "", "three")
    # Python's text files, by which the benchmark's script reads, end a line here too.
    path.write_bytes(b"one\rtwo\r")
    assert read_answers(path, 2) == ("one", "two")


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file"):
        read_answers(tmp_path / "none.txt", 1)
    (tmp_path / "latin.txt").write_bytes(b"\xe4\n")
    with pytest.raises(DataError, match="not UTF-8 at line 1, byte 1"):
        read_answers(tmp_path / "latin.txt", 1)
