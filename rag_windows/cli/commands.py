"""The commands and their options; each hands on to a module of its name."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from rag_windows.cli import options
from rag_windows.cli.answering_options import Answering
from rag_windows.cli.bench_command import bench
from rag_windows.cli.cache_commands import cache
from rag_windows.cli.calibrate_command import calibrate
from rag_windows.cli.classify_command import classify
from rag_windows.cli.errors import OneLineErrors
from rag_windows.cli.evaluation.app import evaluation
from rag_windows.cli.spreading import spreading

app = typer.Typer(
    name="rag-windows",
    cls=OneLineErrors,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cache, name="cache")
app.add_typer(evaluation, name="eval")
app.command()(calibrate)
app.command()(classify)
app.command()(bench)


def _version(asked: bool) -> None:
    if asked:
        try:
            typer.echo(metadata.version("rag-windows"))
        except metadata.PackageNotFoundError:
            typer.echo("unknown: rag-windows runs without being installed")
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
@spreading()
def ask(
    *,
    question: Annotated[
        str, typer.Argument(metavar="QUESTION", help="What you want to know, in quotes.")
    ],
    answering: Answering,
) -> None:
    """Answer one question over documents and show which passages the answer looked at."""
    from rag_windows.cli.ask import ask as run

    run(question, *answering.parts())


@app.command()
@spreading()
def chat(*, answering: Answering) -> None:
    """The same as a conversation: one question a line, follow-ups welcome, /exit leaves."""
    from rag_windows.cli.chat import chat as run

    run(*answering.parts())


@app.command()
def methods(json: options.Json = False, markdown: options.Markdown = False) -> None:
    """List the methods with their formulas, parameters and papers."""
    from rag_windows.cli.methods import methods as run

    run(json, markdown)


@app.command()
def demo(
    device: options.Device = "auto",
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Answer three questions over the sample corpus, sequentially and with windows."""
    from rag_windows.cli.demo import demo as run

    run(device, as_json=json, verbose=verbose)
