"""The table of methods: made from the classes, and the README shows that very table."""

from __future__ import annotations

import re

import pytest

from rag_windows.methods import METHODS
from rag_windows.methods.registry import markdown_table, method_rows
from tests.test_repository import ROOT

BEGIN, END = "<!-- methods -->\n", "<!-- /methods -->"


def test_rows_say_what_the_classes_say() -> None:
    rows = {row.name: row for row in method_rows()}
    assert list(rows) == list(METHODS)
    assert rows["ape"].settings == "temperature=0.9, scale=0.9, form=as used"
    assert rows["pcw"].settings == ""
    assert rows["mateicl"].papers == ["2505.01110"]
    assert rows["sequential"].papers == []
    assert rows["deep-thinking"].settings.startswith("reader=pcw, ")


def test_every_line_has_as_many_cells() -> None:
    """Bars inside of formulas are escaped."""
    lines = markdown_table().splitlines()
    assert len(lines) == len(METHODS) + 2
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {6}
    assert "| `pcw` |" in lines[3]
    assert "[2212.10947](https://arxiv.org/abs/2212.10947)" in lines[3]


def test_the_readme_shows_this_table() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if BEGIN not in text:
        pytest.skip("README.md shows no table that is made from the classes")
    assert text.partition(BEGIN)[2].partition(END)[0] == markdown_table()
