from __future__ import annotations

import json

import pytest

from rag_windows.rescaling import METHODS
from tests.rag_windows.cli.conftest import Run


def test_json(run: Run) -> None:
    result = run("methods", "--json")
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert [row["name"] for row in rows] == list(METHODS)
    for row in rows:
        kind = METHODS[row["name"]]
        assert row["formula"] == kind.formula
        assert row["paper"] == kind.paper
        assert kind(**row["parameters"]) == kind()


@pytest.mark.parametrize("name", METHODS)
def test_table(run: Run, name: str) -> None:
    result = run("methods")
    assert result.exit_code == 0
    (line,) = (one for one in result.stdout.splitlines() if one.split()[0] == name)
    assert METHODS[name].formula in line
    assert METHODS[name].paper in line
