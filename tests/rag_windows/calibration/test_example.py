from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rag_windows import Passage
from rag_windows.calibration import Example, read_examples
from rag_windows.errors import InputError


def test_mappings_and_lines_of_a_file_are_examples(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"query": "Who?\u2028Now.", "passages": ["One.", {"text": "Two.", "id": "2"}]},
        {"question": "Where?", "answer": "There", "kind": "multi-hop"},
        {"query": [{"role": "user", "content": "When?"}], "passages": ["Then."]},
    ]
    path = tmp_path / "examples.jsonl"
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(lines + "\n", encoding="utf-8")
    first, second, third = read_examples(path)
    assert first == Example("Who?\u2028Now.", (Passage("One."), Passage("Two.", id="2")))
    assert second == Example.of(Example("Where?", (), "There", "multi-hop"))
    assert (first.multi_hop, second.multi_hop) == (False, True)
    assert third.query == [{"role": "user", "content": "When?"}]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "must be an Example"),
        ({"passages": []}, "needs a 'query'"),
        ({"query": "a", "passage": []}, r"Unknown example keys \['passage'\]"),
        ({"query": "a", "passages": "b"}, "not a single one"),
        ({"query": "a", "passages": 3}, "must be a list, not int"),
        ({"query": "a", "answer": 3}, "answer must be a string"),
        ({"query": "a", "answer": " "}, "answer is blank"),
    ],
)
def test_what_is_no_example_is_told(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Example.of(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"query": "a"}\n{"query"', "line 2: not valid JSON"),
        ('\n{"ask": "a"}', r"Line 2 .*Unknown example keys \['ask'\]"),
        ("\n \n", "holds no examples"),
        ("\udcff", "can't be read"),
    ],
)
def test_a_bad_file_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=message):
        read_examples(path)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can't be read"):
        read_examples(tmp_path / "none.jsonl")
