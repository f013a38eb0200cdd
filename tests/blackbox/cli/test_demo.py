from __future__ import annotations

import json

from tests.blackbox.conftest import Run


def test_every_question_is_answered_both_ways(run: Run) -> None:
    shown = run("demo", "--device", "cpu", "--json")
    assert shown.exit_code == 0, shown.stderr
    rows = json.loads(shown.stdout)
    assert [(row["passages"], row["method"]) for row in rows] == [
        (passages, method) for passages in (8, 16, 32) for method in ("sequential", "ape")
    ]
    assert all(row["right"] and row["first_token_s"] > 0 for row in rows)
    assert all(row["answer"] == row["expected"] for row in rows)
    assert rows[0].keys() == {
        "question", "passages", "method", "answer", "expected", "first_token_s", "right",
    }  # fmt: skip
    table = run("demo", "--device", "cpu").stdout.splitlines()
    assert sum(line.endswith("right") for line in table) == 6
    assert sum(rows[0]["question"] in line for line in table) == 1
