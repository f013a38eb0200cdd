from __future__ import annotations

from pathlib import Path

import pytest
import typer

from rag_windows.cli.options import spread_docs

VALUED = {"--docs", "--model", "--top-k"}


@pytest.mark.parametrize(
    ("args", "spread"),
    [
        ("Q --docs a b c", "Q --docs a --docs b --docs c"),
        ("Q --docs a b --json --docs c", "Q --docs a --docs b --json --docs c"),
        ("--docs a b Q", "--docs a --docs b Q"),
        ("--docs a --docs b Q --json", "--docs a --docs b Q --json"),
        ("--docs a Q --docs b", "--docs a Q --docs b"),
        ("--docs a --model m Q", "--docs a --model m Q"),
        ("--model m --docs a Q", "--model m --docs a Q"),
        ("--docs a b -- Q", "--docs a --docs b -- Q"),
        ("--docs=a b", "--docs=a b"),
        ("--docs a", "--docs a"),
        ("Q --docs - --top-k 3", "Q --docs - --top-k 3"),
        ("Q --model", "Q --model"),
        ("", ""),
    ],
)
def test_spread(args: str, spread: str) -> None:
    assert spread_docs(args.split(), VALUED, asks=True) == spread.split()


@pytest.mark.parametrize("args", ["--docs", "Q --docs --json", "--docs a --docs"])
def test_docs_needs_a_path(args: str) -> None:
    with pytest.raises(typer.BadParameter, match="at least one path"):
        spread_docs(args.split(), VALUED, asks=True)


def test_without_a_question_every_word_is_a_path() -> None:
    assert spread_docs("--docs a b".split(), VALUED, asks=False) == "--docs a --docs b".split()


def test_a_long_question_is_no_file() -> None:
    question = "Why? " * 2000
    args = ["--docs", "a", question]
    assert spread_docs(args, VALUED, asks=True) == args


def test_a_file_is_not_taken_for_the_question(tmp_path: Path) -> None:
    file = str(tmp_path)
    assert spread_docs(["--docs", "a", file], VALUED, asks=True) == ["--docs", "a", "--docs", file]
