from __future__ import annotations

import json

import pytest

from rag_windows.methods import METHODS, from_description
from rag_windows.methods.registry import markdown_table
from tests.blackbox.conftest import Run


def test_json(run: Run) -> None:
    result = run("methods", "--json")
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert [row["name"] for row in rows] == list(METHODS)
    for row in rows:
        kind = METHODS[row["name"]]
        assert row["formula"] == kind.formula
        assert row["paper"] == kind.paper
        assert from_description({"name": row["name"], **row["parameters"]}) == kind()


@pytest.mark.parametrize("name", METHODS)
def test_listing(run: Run, name: str) -> None:
    result = run("methods")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    (number,) = (i for i, one in enumerate(lines) if one.split()[0] == name)
    kind = METHODS[name]
    assert kind.formula in lines[number]
    assert kind.paper == "-" or kind.paper in lines[number]
    assert lines[number + 1].strip() == (kind.__doc__ or "").splitlines()[0].replace("``", "")


def test_markdown(run: Run) -> None:
    assert run("methods", "--markdown").stdout == markdown_table()
