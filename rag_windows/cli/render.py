"""What terminals and scripts see: text, tables, JSON, errors in one line, and progress."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from typer.core import TyperGroup

from rag_windows.errors import RagWindowsError
from rag_windows.visible_text import one_line, visible

EXIT_ERROR = 2


def tell(message: str) -> None:
    """Print one line to stderr, whatever the message holds."""
    # Without standard error, print() would take standard output.
    if sys.stderr is not None:
        print(one_line(message), file=sys.stderr, flush=True)


class Group(TyperGroup):
    """Commands that show their help where none is named, and errors of use in one line."""

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
            message = error.format_message().rstrip(".").replace("Value error, ", "")
            context = getattr(error, "ctx", None)
            command = getattr(context, "command_path", "rag-windows")
            lines = (f"{message}; {_hint(message, getattr(context, 'params', {}), command)}",)
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


def _hint(message: str, given: Mapping[str, Any], command: str) -> str:
    """What to do about a wrong command line.

    Args:
        message: the parser's.
        given: the values that it did take.
        command: whose help knows more.
    """
    extra = re.search(r"extra argument(?:\(s\)|s)? \((.*)\)", message, re.DOTALL)
    if extra is None or "docs" not in given:
        return f"see {command} --help."
    question = given.get("question")
    files = all(map(_names_file, extra[1].split()))
    # A file that stands where the question should be shows that --docs took one of several.
    if question is None or files or _names_file(question):
        return "put --docs before each file, and quotes around a pattern."
    return f'put the whole question in quotes, as in "{question} {extra[1]}".'


def _names_file(word: str) -> bool:
    """Whether a word of the command line looks like a file, a folder or a pattern."""
    return os.path.exists(word) or bool(re.search(r"[/\\*]|\w\.\w{1,5}$", word))


def console(piped: int = 120) -> Console:
    """Standard output, where nothing in a text is taken for markup.

    ``piped`` is the width where nothing else says one.
    """
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else piped
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


class Counted(Protocol):
    """The type of a function that progress is reported to."""

    def __call__(self, done: int, whole: int | None, unit: str = "", /) -> None:
        """``done`` of ``whole``, which may be unknown."""


@contextmanager
def progress(what: str, then: str | None = None) -> Iterator[Counted]:
    """Show on stderr how far `what` is, once it has taken two seconds.

    Yields a function that is called with how much of the work is done. Once all of it is done, the
    line says `then` instead, if that is given. A terminal gets one line that changes and disappears
    at the end; anything else gets a new line from time to time. RAG_WINDOWS_PROGRESS_S sets another
    number of seconds; with 0 nothing is shown.
    """
    try:
        first_s = float(os.environ.get("RAG_WINDOWS_PROGRESS_S") or 2)
    except ValueError:
        first_s = 2.0
    terminal = Console(stderr=True)
    # A process may be started without standard error.
    live = sys.stderr is not None and sys.stderr.isatty() and not terminal.is_dumb_terminal
    shown = _LiveLine(what, then, terminal) if live else _PlainLines(what, then)
    over = threading.Event()
    thread = threading.Thread(
        target=shown.run, args=(first_s, over), name="rag-windows-progress", daemon=True
    )
    if first_s > 0:
        thread.start()
    try:
        yield shown.counted
    finally:
        over.set()
        if first_s > 0:
            thread.join()


def _far(done: int, whole: int | None, unit: str) -> str:
    written = [str(one) for one in (done, whole) if one]
    return f"{' of '.join(written)} {unit}".strip()


class _PlainLines:
    """A line now and then, down to once a minute."""

    def __init__(self, what: str, then: str | None) -> None:
        self._what, self._then, self._begun = what, then, time.monotonic()
        self._line = f"{what}: "

    def counted(self, done: int, whole: int | None, unit: str = "", /) -> None:
        ended = self._then is not None and done == whole
        self._line = f"{self._then}: " if ended else f"{self._what}: {_far(done, whole, unit)}, "

    def run(self, first_s: float, over: threading.Event) -> None:
        spent = 0.0
        while not over.wait(max(first_s, min(60.0, spent / 2))):
            spent = time.monotonic() - self._begun
            tell(f"{self._line}{spent:.0f} s so far.")


class _LiveLine:
    """One line that is drawn again and again, and goes away at the end."""

    def __init__(self, what: str, then: str | None, terminal: Console) -> None:
        self._what, self._then = what, then
        whole = Column(no_wrap=True)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False, table_column=whole),
            BarColumn(20),
            TextColumn("{task.fields[far]}", markup=False, table_column=whole),
            TimeElapsedColumn(),
            console=terminal,
            transient=True,
            redirect_stdout=False,  # which is the answer's
        )
        self._task = self._bar.add_task(one_line(what), total=None, far="")

    def counted(self, done: int, whole: int | None, unit: str = "", /) -> None:
        far = _far(done, whole, unit)
        what = self._what
        if self._then is not None and done == whole:
            what, far = self._then, ""
        # The clock of what has ended would stand still, and what is not counted goes on.
        endless = None if whole is None else whole * (1 + 1e-9)
        self._bar.update(
            self._task, description=one_line(what), completed=done, total=endless, far=far
        )

    def run(self, first_s: float, over: threading.Event) -> None:
        if not over.wait(first_s):
            with self._bar:
                over.wait()
