"""What terminals and scripts see: text, tables, JSON, and signs of life while something takes time.

RAG_WINDOWS_PROGRESS_S says after how many seconds the first sign comes; 0 is silence. Work of
minutes and hours tells less often, down to once a minute.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from rag_windows.cli.errors import tell
from rag_windows.prompt.visible_text import visible

Counted = Callable[[int, int], None]
"""Told how much is done, and how much there is."""

_PLAIN_WIDTH = 120
_LINE_S, _SELDOM_S = 10.0, 60.0


def console() -> Console:
    """Standard output, where nothing in a text is taken for markup."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PLAIN_WIDTH
    return Console(width=width, markup=False, highlight=False, emoji=False)


def plain_table(*columns: Column | str, expand: bool = False) -> Table:
    """A table without lines."""
    layout: dict[str, Any] = {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0)}
    return Table(*columns, **layout, header_style="bold", expand=expand)


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
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


@contextmanager
def progress(what: str) -> Iterator[Counted]:
    """Print on stderr, now and then, how long `what` has taken and how far it is.

    Yields what is called with how much is done and how much there is, where work can be counted.
    """
    try:
        every_s = float(os.environ.get("RAG_WINDOWS_PROGRESS_S") or _LINE_S)
    except ValueError:
        every_s = _LINE_S
    begun, over = time.monotonic(), threading.Event()
    first: int | None = None
    far = ""

    def counted(done: int, whole: int) -> None:
        nonlocal first, far
        # What an earlier run did is told at once, and took no time.
        first = done if first is None else first
        left = (time.monotonic() - begun) * (whole - done) / max(1, done - first)
        estimate = f" ({time_shown(left)} left)" if done > first else ""
        far = f"{done} of {whole}{estimate}, "

    def beat() -> None:
        spent = 0.0
        while not over.wait(max(every_s, min(_SELDOM_S, spent / 10))):
            spent = time.monotonic() - begun
            tell(f"{what}: {far}{time_shown(spent)} so far.")

    thread = threading.Thread(target=beat, name="rag-windows-progress", daemon=True)
    if every_s > 0:
        thread.start()
    try:
        yield counted
    finally:
        over.set()
        if every_s > 0:
            thread.join()


def time_shown(seconds: float) -> str:
    """A time for people."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02} min"
