"""The instruction that commands send by themselves, and what switches it off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rag_windows import WindowedLM
from tests.blackbox.cli.conftest import INSTRUCTION, QUESTION, Told
from tests.blackbox.conftest import ROOT, Run

OWN = ("--system", "Answer in one word.")
NONE = ("--system", "")


@pytest.mark.parametrize(
    ("given", "sent"), [((), INSTRUCTION), (OWN, OWN[1]), (NONE, None)], ids=str
)
def test_a_question_comes_with_an_instruction(
    ask: Told, given: tuple[str, ...], sent: str | None
) -> None:
    answer = ask(*given)
    assert answer["system"] == sent
    # The tokenizer of this model takes a byte for a token.
    bare = ask(*NONE)["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens"] - bare >= len(sent or "")


def test_a_conversation_comes_with_one_in_every_turn(run: Run, docs: Path, model: str) -> None:
    options = ("--docs", "docs", "--model", model, "--json", "--max-new-tokens", "2")
    answers = run("chat", *options, stdin=f"{QUESTION}\nAnd the lamps?\n").stdout.splitlines()
    assert [json.loads(one)["system"] for one in answers] == [INSTRUCTION] * 2


@pytest.mark.parametrize("given", [(), OWN, NONE], ids=str)
def test_windows_that_warm_encodes_serve_the_questions(
    run: Run, ask: Told, model: str, given: tuple[str, ...]
) -> None:
    warmed = run("warm", "--docs", "docs", "--model", model, "--json", *given)
    assert json.loads(warmed.stdout)["encoded"] > 0
    assert ask(*given)["usage"]["cached_tokens"] > 0
    other = OWN if given != OWN else NONE
    assert ask(*other)["usage"]["cached_tokens"] == 0


def test_a_comparison_has_the_instruction_of_the_questions(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def compare(self: WindowedLM, *args: Any, **options: Any) -> None:
        seen.append(options["prefix"])
        raise KeyboardInterrupt

    monkeypatch.setattr(WindowedLM, "compare", compare)
    run("compare", "--model", model, "--no-cache")
    assert seen == [INSTRUCTION]


@pytest.mark.parametrize(
    "model", ["tiny-reader", str(ROOT / "rag_windows" / "models" / "tiny-reader"), "tiny-learner"]
)
def test_models_that_were_trained_without_get_none(run: Run, docs: Path, model: str) -> None:
    answer = run("ask", QUESTION, "--docs", "docs", "--model", model, "--json", "--no-cache")
    assert json.loads(answer.stdout)["system"] is None
    own = run("ask", QUESTION, "--docs", "docs", "--model", model, "--json", "--no-cache", *OWN)
    assert json.loads(own.stdout)["system"] == OWN[1]


@pytest.mark.parametrize("command", ["ask", "chat", "warm", "compare"])
def test_help_shows_it(run: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    shown = run(command, "--help").stdout
    assert INSTRUCTION in shown
    assert '"" sends none' in shown


@pytest.mark.parametrize("page", ["langchain", "llama_index", "command_line", "server"])
def test_the_pages_recommend_the_same_words(page: str) -> None:
    text = " ".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").split())
    assert INSTRUCTION in text
