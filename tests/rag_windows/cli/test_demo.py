from __future__ import annotations

import json

import pytest

from rag_windows import WindowedLM
from rag_windows.cli import demo
from rag_windows.cli.corpus import SearchOptions, open_corpus
from rag_windows.cli.progress import Progress
from rag_windows.sample_files import samples_path
from tests.rag_windows import small
from tests.rag_windows.cli.conftest import Run

TASKS = [demo.Task("Who lives in Rovholm?", "Allin Everfield", 2), demo.Task("xylophone", "y", 3)]


@pytest.fixture(scope="module")
def rows() -> list[demo.Row]:
    retriever = open_corpus(SearchOptions(), Progress()).retriever
    return demo.run(small.lm(), retriever, TASKS)


def test_every_task_is_answered_both_ways(rows: list[demo.Row]) -> None:
    assert [(row.question, row.passages, row.method) for row in rows] == [
        (TASKS[0].question, 2, "sequential"),
        (TASKS[0].question, 2, "ape"),
        (TASKS[1].question, 3, "sequential"),
        (TASKS[1].question, 3, "ape"),
    ]
    assert all(row.first_token_s > 0 and not row.right for row in rows)
    assert all(row.expected == "y" for row in rows[2:])


def test_passages_are_the_best_and_then_any_others() -> None:
    retriever = open_corpus(SearchOptions(), Progress()).retriever
    best = retriever.retrieve(TASKS[0].question, 2)
    assert demo.passages_for(retriever, TASKS[0]) == best
    filled = demo.passages_for(retriever, demo.Task("Who lives in Rovholm?", "", 60))
    assert filled[:2] == best
    assert len({one.id for one in filled}) == 60


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("Tirmouth", "Tirmouth", True),
        (" the TIRMOUTH.\n", "Tirmouth", True),
        ("Tirmouth and Halden", "Tirmouth", False),
        ("not Tirmouth", "Tirmouth", False),
        ("", "Tirmouth", False),
        ("1868", "1868", True),
    ],
)
def test_right_means_the_same_words(answer: str, expected: str, right: bool) -> None:
    assert demo.is_right(answer, expected) is right


def test_the_shipped_tasks() -> None:
    text = (samples_path() / "demo.json").read_text(encoding="utf-8")
    tasks = [demo.Task(**row) for row in json.loads(text)]
    assert len(tasks) == 3
    assert max(task.top_k for task in tasks) == 32
    retriever = open_corpus(SearchOptions(), Progress()).retriever
    for task in tasks:
        passages = demo.passages_for(retriever, task)
        assert len(passages) == task.top_k
        assert any(task.answer in one.text for one in passages)


def test_table(run: Run, monkeypatch: pytest.MonkeyPatch, rows: list[demo.Row]) -> None:
    monkeypatch.setattr(WindowedLM, "from_pretrained", lambda *_, **__: small.lm())
    monkeypatch.setattr(demo, "run", lambda *_: rows)
    result = run("demo")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) >= 1 + len(rows)
    assert sum("wrong (" in line for line in lines) == len(rows)
    assert sum("Who lives in Rovholm?" in line for line in lines) == 1
    listed = json.loads(run("demo", "--json").stdout)
    assert [one["method"] for one in listed] == [row.method for row in rows]
    assert listed[0].keys() == {
        "question", "passages", "method", "answer", "expected", "first_token_s", "right",
    }  # fmt: skip
