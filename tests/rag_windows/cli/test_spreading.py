"""Dataclasses of options become flat options, in their place and with their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.main import get_command
from typer.testing import CliRunner

from rag_windows.cli.options import spreading

Loud = Annotated[bool, typer.Option("--loud", help="Shout.")]
Often = Annotated[int, typer.Option("--often", min=1, help="How often.")]


@dataclass(frozen=True, slots=True)
class Outer:
    often: Often = 2
    word: Annotated[str, typer.Option("--word")] = "hello"
    loud: Loud = False
    kept: str = "no option"


class Heard:
    """A command that keeps what it was told."""

    def __init__(self, *without: str) -> None:
        self.told: list[Any] = []
        self.app = typer.Typer()

        @self.app.command()
        @spreading(without=without)
        def say(
            *,
            name: Annotated[str, typer.Argument()],
            outer: Outer,
            last: Annotated[str, typer.Option("--last")] = "end",
        ) -> None:
            """Says it."""
            self.told += [name, outer, last]

    def options(self) -> list[str]:
        return [str(one.name) for one in get_command(self.app).params][:6]

    def run(self, *words: str) -> int:
        return CliRunner().invoke(self.app, list(words)).exit_code


def test_fields_stand_where_the_dataclass_stands() -> None:
    heard = Heard()
    assert heard.options()[:5] == ["name", "often", "word", "loud", "last"]
    assert get_command(heard.app).help == "Says it."


def test_what_is_given_and_what_is_not() -> None:
    heard = Heard()
    assert heard.run("you") == 0
    assert heard.told == ["you", Outer(), "end"]
    heard = Heard()
    assert heard.run("you", "--often", "3", "--loud", "--last", "x") == 0
    assert heard.told == ["you", Outer(3, loud=True), "x"]
    assert Heard().run("you", "--often", "0") == 2


def test_an_option_that_a_command_does_without_keeps_its_default() -> None:
    heard = Heard("often", "loud")
    assert heard.options()[:3] == ["name", "word", "last"]
    assert heard.run("you", "--word", "bye") == 0
    assert heard.told == ["you", Outer(word="bye"), "end"]
    assert heard.run("you", "--often", "3") == 2
