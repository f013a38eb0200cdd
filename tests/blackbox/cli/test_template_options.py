"""Variables of chat templates on the command line, and answers of models that think aloud."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.blackbox.cli.conftest import QUESTION, refused
from tests.blackbox.conftest import Run
from tests.rag_windows import small

THINKING = small.TEMPLATE.replace(
    "<|assistant|>{% endif %}",
    "<|assistant|>{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}",
)
OFF = ("--template-option", "enable_thinking=false")


@pytest.fixture
def thinker(small_folder: Path, docs: Path, tmp_path: Path) -> Path:
    """A model whose template opens reasoning, unless it is switched off; it never ends either."""
    folder = tmp_path / "thinker"
    folder.mkdir()
    for one in small_folder.iterdir():
        (folder / one.name).write_bytes(one.read_bytes())
    (folder / "chat_template.jinja").write_text(THINKING)
    return folder


@pytest.mark.parametrize("value", ["false", "False", "true", None])
def test_thinking_is_switched_off(run: Run, thinker: Path, value: str | None) -> None:
    more = () if value is None else ("--template-option", f"enable_thinking={value}")
    asked = ("ask", QUESTION, "--docs", "docs", "--model", thinker, "--max-new-tokens", "6", *more)
    result = run(*asked, "--json")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    thinks = value in ("true", None)
    assert bool(answer.get("reasoning")) == thinks
    assert bool(answer["answer"]) != thinks
    shown = run(*asked)
    assert shown.exit_code == 0, shown.stderr
    part = "reasoning" if thinks else "answer"
    assert f"The {part} was cut at 6 new tokens" in shown.stdout
    assert not thinks or shown.stdout.startswith("\n\n")


def test_a_chat_takes_them_too(run: Run, thinker: Path) -> None:
    asked = ("chat", "--docs", "docs", "--model", thinker, "--max-new-tokens", "6", "--json")
    for more, thinks in (((), True), (OFF, False)):
        result = run(*asked, *more, stdin=f"{QUESTION}\nAnd then?\n")
        assert result.exit_code == 0, result.stderr
        answers = [json.loads(line) for line in result.stdout.splitlines()]
        assert [bool(one["answer"]) for one in answers] == [not thinks] * 2


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("enable_thinkin=false",), "has no such variable"),
        (("enable_thinking",), "must be a name and a value"),
        (("=false",), "must be a name and a value"),
        (("enable_thinking=false", "enable_thinking=true"), "is given twice"),
        (("add_generation_prompt=false",), "which the prompt sets itself"),
    ],
)
def test_what_cannot_be_set_is_refused(
    run: Run, thinker: Path, given: tuple[str, ...], told: str
) -> None:
    options = [part for one in given for part in ("--template-option", one)]
    line = refused(run, "ask", QUESTION, "--docs", "docs", "--model", thinker, *options)
    assert told in line
