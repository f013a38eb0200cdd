"""The application of `rag-windows`, and the commands `classify` and `methods`."""

from __future__ import annotations

import dataclasses
import time
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from rich.table import Column

from rag_windows import __version__
from rag_windows.cli import options, render
from rag_windows.cli.ask import ask, chat, demo
from rag_windows.cli.cache import cache, warm
from rag_windows.cli.compare import compare
from rag_windows.cli.index import indexes
from rag_windows.cli.model_loading import LoadOptions, loaded_model
from rag_windows.cli.options import count, option
from rag_windows.errors import MissingExtraError, install
from rag_windows.visible_text import encodable, one_line

_FIRST = """\
rag-windows demo                                           # a demonstration
rag-windows ask "What does Zelwick Academy make?"          # over sample documents
rag-windows ask "..." --docs notes/ --model Qwen/Qwen3-8B  # over your own
rag-windows --help                                         # all commands
"""


_EXTRAS = {"adapt": "adapt", "serve": "server", "eval": "eval", "bench": "eval"}
"""Commands of other distributions of this project, and the extras that install them."""


class _Commands(render.Group):
    """The commands; who names none is shown what to type first."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Say of a command that is not installed how to install it."""
        if args[0] not in self.commands and (extra := _EXTRAS.get(args[0])):
            raise MissingExtraError(
                f"rag-windows {args[0]} is not installed; run: {install(extra)}"
            )
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Show four commands instead of an error about a missing one."""
        if not args:
            typer.echo(_FIRST, nl=False)
            ctx.exit()
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="rag-windows",
    cls=_Commands,
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


for command in (ask, chat, demo, warm, compare):
    app.command()(command)


@dataclasses.dataclass(frozen=True, slots=True)
class _Learner(LoadOptions):
    """The model that classifies."""

    model: options.Model = "tiny-learner"


@app.command()
@options.spreading(without=("max_window_tokens",))
def classify(
    *,
    texts: Annotated[
        list[str],
        typer.Argument(metavar="TEXT...", help="Texts to label, each in quotes.", parser=encodable),
    ],
    demos: Annotated[
        str, option("FILE", 'Demonstrations: a JSONL file with "text" and "label" in each line.')
    ],
    label: Annotated[
        list[str] | None,
        option(
            "LABEL",
            "A label to choose from; can be repeated. Default: the labels in --demos.",
            parser=encodable,
        ),
    ] = None,
    calibrate_with: Annotated[
        list[str] | None,
        option(
            "TEXT",
            "A text without content, such as N/A; the probabilities of its labels "
            "divide the others. Can be repeated.",
        ),
    ] = None,
    windows: Annotated[
        int | None, count("Number of windows. Default: as few as hold the demonstrations.")
    ] = None,
    system: options.System = None,
    model: _Learner,
    json: options.Json = False,
) -> None:
    """Label texts by labelled examples (demonstrations), however many there are."""
    from rag_windows.calibration.compare import read_lines
    from rag_windows.icl.classifier import demonstration_of

    model.check()
    shown = read_lines(demos, demonstration_of, '{"text": "...", "label": "..."}')
    with loaded_model(model) as lm:
        begun = time.perf_counter()
        with render.progress("Reading the demonstrations"):
            found = lm.classify(
                texts,
                shown,
                label or None,
                prefix=system,
                calibrate_with=calibrate_with or (),
                windows=windows,
            )
        seconds, method = time.perf_counter() - begun, lm.method.name
    if json:
        fields = ("text", "label", "probabilities", "scores")
        render.write_json(
            {
                "texts": [{name: getattr(one, name) for name in fields} for one in found],
                "demonstrations": len(shown),
                "windows": found[0].windows,
                "seconds": seconds,
                "method": method,
                "model": model.name,
            }
        )
        return
    probability = Column(justify="right", no_wrap=True, min_width=len("100%"))
    text = Column("text", no_wrap=True, overflow="ellipsis", style="dim")
    table = render.plain_table(Column("label", style="bold"), probability, text)
    for one in found:
        share = f"{one.probabilities[one.label]:.0%}"
        table.add_row(one_line(one.label), share, one_line(one.text))
    render.console().print(table)
    read = f"{len(shown)} demonstrations in {found[0].windows} window"
    read += "s" * (found[0].windows != 1)
    render.show(f"{model.name}, {method}: {read}, {seconds:.2f} s.", "dim")


@app.command()
def methods(json: options.Json = False) -> None:
    """List the methods with their formulas, parameters and papers."""
    from rag_windows.methods.registry import method_rows, settings_of

    rows = method_rows()
    if json:
        render.write_json(rows)
        return
    width = max(len(row["name"]) for row in rows) + 2
    for row in rows:
        paper = "" if row["paper"] == "-" else f"  ({row['paper']})"
        render.show(f"{row['name']:<{width}}{row['formula']}{paper}", "bold")
        render.show(" " * width + row["summary"])
        if row["parameters"]:
            render.show(" " * width + settings_of(row), "dim")


app.add_typer(cache, name="cache")
app.add_typer(indexes, name="index")
for entry in sorted(entry_points(group="rag_windows.commands"), key=lambda entry: entry.name):
    entry.load()(app)
