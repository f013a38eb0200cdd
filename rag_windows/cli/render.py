"""What terminals and scripts see: text, tables, JSON, errors in one line, and progress."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.table import Column, Table
from typer.core import TyperGroup

from rag_windows.errors import RagWindowsError
from rag_windows.prompt.visible_text import one_line, visible

EXIT_ERROR = 2


def tell(message: str) -> None:
    """Print one line to stderr, whatever the message holds."""
    print(one_line(message), file=sys.stderr, flush=True)


class Group(TyperGroup):
    """Commands: help where none is named, and one line and an exit code for errors of use."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Show the help instead of an error about a missing command."""
        # Help would show <bool> behind flags, as if they took a value.
        for command in (self, *self.commands.values()):
            for option in command.get_params(ctx):
                if getattr(option, "is_flag", False):
                    option.metavar = ""
        if not args:
            typer.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command; see `typer.core.TyperGroup.main` for the arguments."""
        # A character that the terminal's encoding lacks must not end the command.
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace" if stream is sys.stdin else "backslashreplace")
        lines: tuple[str, ...] = ()
        try:
            code = super().main(*args, **{**options, "standalone_mode": False}) or 0
        except typer.Abort:
            code = 130
        except typer.TyperException as error:
            told, hint = error.format_message().rstrip("."), "see rag-windows --help."
            given = getattr(getattr(error, "ctx", None), "params", ())
            if "extra argument" in told and "docs" in given:
                hint = "put --docs before each file, and quotes around a pattern."
            lines = (f"{told}; {hint}",)
        except RagWindowsError as error:
            lines = (str(error), *getattr(error, "__notes__", ()))
        except RuntimeError as error:
            # torch need not be imported to name its class.
            if type(error).__name__ != "OutOfMemoryError":
                raise
            lines = (
                "The accelerator's memory is full. Read fewer passages (--top-k), or use a "
                "smaller model, --dtype bfloat16 or --device cpu.",
            )
        if lines:
            code = EXIT_ERROR
            tell(f"Error: {lines[0]}")
        for line in lines[1:]:
            tell(line)
        sys.exit(code)


def console() -> Console:
    """Standard output, where nothing in a text is taken for markup."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    return Console(width=width, markup=False, highlight=False, emoji=False)


def plain_table(*columns: Column | str) -> Table:
    """A table without lines."""
    return Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")


def show(text: str, style: str | None = None) -> None:
    """Print a line on standard output, however long."""
    console().print(visible(text), style=style, soft_wrap=True)


def show_notes(notes: Iterable[str], *, as_json: bool) -> None:
    """Tell what a user should know, on stderr where standard output is JSON."""
    for note in notes:
        if as_json:
            tell(f"Note: {note}")
        else:
            show(f"Note: {note}", "yellow")


def write_json(value: Any) -> None:
    """Write one JSON value on one line, in ASCII, so that no terminal or encoding minds."""
    print(json.dumps(value), flush=True)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Print on stderr, now and then, how long `what` has taken and how far it is.

    Yields what is called with how much is done and how much there is, where work can be counted.
    RAG_WINDOWS_PROGRESS_S is how many seconds the first sign takes, 0 is silence; work of minutes
    and hours tells less often, down to once a minute.
    """
    try:
        every_s = float(os.environ.get("RAG_WINDOWS_PROGRESS_S") or 10)
    except ValueError:
        every_s = 10.0
    begun, over = time.monotonic(), threading.Event()
    far = ""

    def counted(done: int, whole: int) -> None:
        nonlocal far
        far = f"{done} of {whole}, "

    def beat() -> None:
        spent = 0.0
        while every_s > 0 and not over.wait(max(every_s, min(60.0, spent / 10))):
            spent = time.monotonic() - begun
            tell(f"{what}: {far}{spent:.0f} s so far.")

    thread = threading.Thread(target=beat, name="rag-windows-progress", daemon=True)
    thread.start()
    try:
        yield counted
    finally:
        over.set()
        thread.join()
