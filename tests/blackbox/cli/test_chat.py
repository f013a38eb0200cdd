from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rag_windows import WindowedLM
from tests.blackbox.conftest import Run


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the model is asked, turn by turn."""
    asked: list[Any] = []
    stream = WindowedLM.stream

    def record(self: WindowedLM, query: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(query)
        return stream(self, query, *args, **kwargs)

    monkeypatch.setattr(WindowedLM, "stream", record)
    return asked


def test_piped_questions_become_a_conversation(
    run: Run, docs: Path, model: str, queries: list[Any]
) -> None:
    result = run(
        *("chat", "--docs", "docs", "--model", model, "--max-new-tokens", "4", "--json"),
        stdin="Who built the bridge at Halden?\n\n  \nIn which year?\n/exit\nWho else?\n",
    )
    assert result.exit_code == 0, result.stderr
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(answers) == 2
    assert answers[0].keys() == answers[1].keys() == {
        "answer", "passages", "usage", "timings", "method", "model", "fallback",
    }  # fmt: skip
    assert queries == [
        [{"role": "user", "content": "Who built the bridge at Halden?"}],
        [
            {"role": "user", "content": "Who built the bridge at Halden?"},
            {"role": "assistant", "content": answers[0]["answer"]},
            {"role": "user", "content": "In which year?"},
        ],
    ]
    # The follow-up names nothing itself: what was said before finds the passage.
    assert answers[1]["passages"][0]["id"] == "docs/bridge.md#1"


def test_clear_forgets(run: Run, docs: Path, model: str, queries: list[Any]) -> None:
    result = run(
        *("chat", "--docs", "docs", "--model", model, "--max-new-tokens", "2", "--json"),
        stdin="bridge\n/clear\n/help\nboats",
    )
    assert result.exit_code == 0
    assert [len(query) for query in queries] == [1, 1]
    assert "/exit" in result.stderr


def test_text_output_shows_every_answer_with_its_sources(run: Run, docs: Path, model: str) -> None:
    args = ("chat", "--docs", "docs", "--model", model, "--max-new-tokens", "4")
    result = run(*args, stdin="bridge\nboats\n")
    assert result.exit_code == 0
    assert result.stdout.count("first token after") == 2
    assert result.stdout.index("docs/bridge.md#1") < result.stdout.index("docs/more.jsonl:2#1")
    assert result.stderr == ""


def test_end_of_input_at_once(run: Run, docs: Path, model: str) -> None:
    result = run("chat", "--docs", "docs", "--model", model, stdin="")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_an_error_ends_a_piped_conversation(run: Run, docs: Path, model: str) -> None:
    result = run("chat", "--docs", "docs", "--model", model, stdin="bridge " * 300 + "\nboats\n")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
