from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rag_windows.prompt.visible_text import visible
from tests.blackbox.cli.conftest import BRIDGE, HOSTILE
from tests.blackbox.conftest import Run

QUESTION = "Who built the bridge at Halden?"
SHORT = ("--max-new-tokens", "12")


def ask_json(run: Run, *args: str | Path) -> dict[str, Any]:
    result = run("ask", QUESTION, "--docs", "docs", "--json", *args)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 1
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_json_has_exactly_this_shape(run: Run, docs: Path, model: str) -> None:
    answer = ask_json(run, "--model", model, "--max-new-tokens", "5")
    assert {key: type(value) for key, value in answer.items()} == {
        "answer": str,
        "passages": list,
        "usage": dict,
        "timings": dict,
        "method": str,
        "model": str,
        "fallback": type(None),
    }
    assert (answer["method"], answer["model"]) == ("ape", model)
    assert {key: type(value) for key, value in answer["usage"].items()} == {
        "prompt_tokens": int,
        "cached_tokens": int,
        "completion_tokens": int,
    }
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["timings"].keys() == {"encode_s", "ttft_s", "total_s"}
    assert 0 < answer["timings"]["encode_s"] < answer["timings"]["ttft_s"]
    assert answer["timings"]["ttft_s"] <= answer["timings"]["total_s"]
    first, second = answer["passages"]
    assert first.keys() == second.keys() == {"id", "title", "text", "score", "mass"}
    assert [first["id"], second["id"]] == ["docs/bridge.md#1", "lamps"]
    assert first["title"] == "The Halden Bridge"
    assert first["text"] == BRIDGE.splitlines()[2]
    assert first["score"] > second["score"] > 0
    assert 0 < first["mass"] + second["mass"] < 1


def test_json_keeps_hostile_text_exactly(run: Run, docs: Path, model: str) -> None:
    result = run("ask", QUESTION, "--docs", "docs", "--json", "--model", model, *SHORT)
    assert result.stdout.isascii()
    assert "\x1b" not in result.stdout
    assert json.loads(result.stdout)["passages"][1]["text"] == HOSTILE


def test_streamed_text_is_the_answer(run: Run, docs: Path, model: str) -> None:
    options = ("--model", model, "--max-new-tokens", "60")
    answer = ask_json(run, *options)["answer"]
    shown = run("ask", QUESTION, "--docs", "docs", *options)
    assert shown.exit_code == 0
    assert len(answer) > 20
    assert shown.stdout.startswith(visible(answer) + "\n\n")


def test_sources_and_timings_are_shown(run: Run, docs: Path, model: str) -> None:
    answer = ask_json(run, "--model", model, "--max-new-tokens", "5")
    shown = run("ask", QUESTION, "--docs", "docs", "--model", model, "--max-new-tokens", "5")
    for number, passage in enumerate(answer["passages"], start=1):
        (line,) = (one for one in shown.stdout.splitlines() if passage["id"] in one)
        assert line.startswith(f"{number} ")
        assert line.rstrip().endswith(f"{passage['mass']:.1%}")
    longest = max(answer["passages"], key=lambda one: one["mass"])
    assert f"{'█' * 16}  {longest['mass']:.1%}" in shown.stdout
    assert "first token after" in shown.stdout
    assert "limit of 5 new tokens; --max-new-tokens raises it" in shown.stdout
    assert shown.stderr == ""


def test_hostile_text_is_shown_spelled_out(run: Run, docs: Path, model: str) -> None:
    shown = run("ask", "lamps", "--docs", "docs", "--model", model, "--max-new-tokens", "1")
    assert shown.exit_code == 0
    row = next(line for line in shown.stdout.splitlines() if "lamps" in line)
    assert "[red]Lamps\\x07: Lamps of [bold red]Halden[/] \\x1b[31mred" in row
    assert not set("\x1b\x07\u202e") & set(shown.stdout + shown.stderr)


def test_no_hits_are_told(run: Run, docs: Path, model: str) -> None:
    args = ("ask", "xylophone", "--docs", "docs", "--model", model, "--max-new-tokens", "2")
    shown = run(*args)
    assert "No passage shares a word with the question" in shown.stdout
    in_json = run(*args, "--json")
    assert json.loads(in_json.stdout)["passages"] == []
    assert "No passage shares a word with the question" in in_json.stderr


def test_what_was_left_out_is_told(run: Run, docs: Path, model: str) -> None:
    (docs / ".secret.md").write_text("x")
    for name in "abcd":
        (docs / f"{name}.png").write_text("x")
    result = run("ask", QUESTION, "--docs", "docs", "--model", model, "--json", *SHORT)
    why = "(not .txt, .md, .jsonl or .pdf)"
    note = f"docs/a.png {why}; docs/b.png {why}; docs/c.png {why}"
    assert f"Note: Left out: {note}" in result.stderr
    assert "and 2 more." in result.stderr


def test_duplicates_are_told(run: Run, docs: Path, model: str) -> None:
    (docs / "twice.jsonl").write_text('{"text": "Same bridge."}\n{"text": "Same bridge."}')
    shown = run("ask", "same", "--docs", "docs", "--model", model, "--max-new-tokens", "2")
    assert (
        "Note: Passage 2 (docs/twice.jsonl:2#1) repeats passage 1, which was read instead."
        in shown.stdout
    )


def test_links_and_fallback(run: Run, docs: Path, model: str) -> None:
    ordinary = ask_json(run, "--model", model, *SHORT, "--method", "sequential")
    for tokens in ("all", "1.0", "100%"):
        linked = ask_json(run, "--model", model, *SHORT, "--link-tokens", tokens)
        assert linked["answer"] == ordinary["answer"]
    fallen = ask_json(run, "--model", model, *SHORT, "--fallback", "sequential")
    assert fallen["answer"] == ordinary["answer"]
    assert fallen["fallback"]["signal"] == "few short passages"
    assert fallen["fallback"]["taken"] is True
    shown = run(
        *("ask", QUESTION, "--docs", "docs", "--model", model, *SHORT), "--fallback", "sequential"
    )
    assert "Note: Guard (few short passages): 2 passages of" in shown.stdout
    for wrong in ("most", "1.5", "-3"):
        refused = run("ask", QUESTION, "--docs", "docs", "--model", model, "--link-tokens", wrong)
        assert refused.exit_code == 2
        assert "tokens" in refused.stderr


def test_options_reach_the_engine(run: Run, docs: Path, model: str) -> None:
    base = ask_json(run, "--model", model, *SHORT)
    for changed in (
        ("--method", "sequential"),
        ("--method", "PCW"),
        ("--rag-temperature", "0.2"),
        ("--rag-scale", "0.2"),
        ("--system", "Answer in one word."),
        ("--temperature", "5", "--seed", "1"),
        ("--top-k", "1"),
    ):
        assert ask_json(run, "--model", model, *SHORT, *changed)["answer"] != base["answer"], (
            changed
        )
    greedy = ask_json(run, "--model", model, *SHORT, "--temperature", "0", "--device", "cpu")
    assert greedy["answer"] == base["answer"]
    sampled = [
        ask_json(run, "--model", model, *SHORT, "--temperature", "1", "--seed", "3")["answer"]
        for _ in range(2)
    ]
    assert sampled[0] == sampled[1]
    assert len(ask_json(run, "--model", model, *SHORT, "--passage-words", "3")["passages"]) > 2
    assert ask_json(run, "--model", model, *SHORT, "--dtype", "bfloat16")["usage"] == base["usage"]
    split = run(
        *("ask", QUESTION, "--docs", "docs", "--model", model, "--json", *SHORT),
        *("--max-window-tokens", "50"),
    )
    assert "Note: Passage 1 (docs/bridge.md#1) is longer than a window" in split.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("ask", "--docs", "docs/bridge.md", "--docs", "docs/olsen.txt", "--json", QUESTION),
        ("ask", "--docs=docs/bridge.md", QUESTION, "--docs", "docs/olsen.txt", "--json"),
        ("ask", "--docs", "docs/[bo]*", "--json", "--", QUESTION),
    ],
)
def test_ways_to_name_documents(run: Run, docs: Path, model: str, args: tuple[str, ...]) -> None:
    result = run(args[0], "--model", model, "--max-new-tokens", "1", *args[1:])
    assert result.exit_code == 0, result.stderr
    passages = json.loads(result.stdout)["passages"]
    assert [one["id"] for one in passages] == ["docs/bridge.md#1"]
