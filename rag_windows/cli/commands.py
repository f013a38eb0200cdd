"""The commands of `rag-windows`."""

from __future__ import annotations

from typing import Annotated

import typer

from rag_windows import __version__
from rag_windows.cli import options
from rag_windows.cli.ask import ask, chat, demo
from rag_windows.cli.bench import bench
from rag_windows.cli.cache import cache
from rag_windows.cli.calibrate import calibrate
from rag_windows.cli.classify import classify
from rag_windows.cli.evaluation.app import evaluation
from rag_windows.cli.render import OneLineErrors, show, write_json

app = typer.Typer(
    name="rag-windows",
    cls=OneLineErrors,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def rag_windows(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Answer questions over documents; each retrieved passage is read in a window of its own."""


@app.command()
def methods(json: options.Json = False) -> None:
    """List the methods with their formulas, parameters and papers."""
    from rag_windows.methods.registry import method_rows, settings_of

    rows = method_rows()
    if json:
        write_json(rows)
        return
    width = max(len(row["name"]) for row in rows) + 2
    for row in rows:
        paper = "" if row["paper"] == "-" else f"  ({row['paper']})"
        show(f"{row['name']:<{width}}{row['formula']}{paper}", "bold")
        show(" " * width + row["summary"])
        if row["parameters"]:
            show(" " * width + settings_of(row), "dim")


for command in (ask, chat, demo, calibrate, classify, bench):
    app.command()(command)
app.add_typer(cache, name="cache")
app.add_typer(evaluation, name="eval")
