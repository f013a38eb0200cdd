from __future__ import annotations

import json

import pytest

from rag_windows import DataError
from rag_windows.evaluation.files import Place, parse

FILE = Place("dev.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 1}', "dev.json: the key 'a' stands twice in one object; keep one."),
        (
            '{"a": [0, {"b": [{"c": 1, "d": 2, "c": 3}]}]}',
            "dev.json: the key 'c' stands twice",
        ),
        ('{"a": {"x": NaN}}', "dev.json: 'NaN' is no number that JSON has"),
        ("[1, -Infinity]", "dev.json: '-Infinity' is no number"),
        ("[1e999]", "dev.json: '1e999' is no number"),
        ("[" + "9" * 5000 + "]", "a whole number has too many digits"),
        ("[" * 10**5, "nested too deeply"),
        ('{"a": 1,\n "b" 2}', "not valid JSON at line 2, column 6, byte 15 (Expecting ':'"),
        ('["ä", x, 1, 2, 3, 4]', "column 7, byte 8 (Expecting value); correct it there."),
        ('{"a": [1, 2', "it may be cut off: fetch or write it again."),
        ('{"a": "some te', "it may be cut off: fetch or write it again."),
        ('{"a": "some \\u12', "it may be cut off: fetch or write it again."),
        ('{"a": 1} {"a": 2, "b": 3}', "column 10, byte 10 (Extra data); correct it there."),
    ],
)
def test_bad_json_is_one_line_that_says_where(text: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        parse(text, FILE)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_line_counts_bytes_from_the_start_of_the_file() -> None:
    with pytest.raises(DataError, match=r"line 3: not valid JSON at column 1, byte 41 "):
        parse("x" * 20, FILE.at("line 3"), offset=40)


def test_half_characters_become_replacement_characters() -> None:
    smile = json.dumps("😀")
    text = f'[{smile}, "\\ud83d!", "\\udE00", "\\\\ud83d", "\\n\\uD83D"]'
    assert parse(text, FILE) == ["😀", "�!", "�", "\\ud83d", "\n�"]


def test_ordinary_json_is_as_json_reads_it() -> None:
    text = '{"a": [1, -2.5, 1e3, true, null, "\\u00e4\\"\\\\"], "b": {}}'
    assert parse(text, FILE) == json.loads(text)
    assert isinstance(parse("[1]", FILE)[0], int)
