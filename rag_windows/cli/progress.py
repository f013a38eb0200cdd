"""Signs of life on stderr while something takes time: bars on terminals, else a line now and then.

RAG_WINDOWS_PROGRESS_S says after how many seconds the first line comes; 0 is silence. Work of
minutes and hours tells less often, down to once a minute.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from rag_windows.cli.errors import tell
from rag_windows.prompt.visible_text import one_line

Counted = Callable[[int, int], None]
"""Told how much is done, and how much there is."""

_LINE_S, _SELDOM_S = 10.0, 60.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the work may do while it is waited for.

    Attributes:
        bars: whether it may draw bars of its own.
        counted: to be called as it goes on, if it can be counted.
    """

    bars: bool
    counted: Counted


class Progress:
    """Bars and spinners on stderr; where it is no terminal, a line now and then."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, emoji=False)

    @contextmanager
    def counting(self, what: str) -> Iterator[Counted]:
        """A bar for work that is counted, with the time that is left; it goes away at the end.

        Yields:
            To be called with how much is done, and how much there is.
        """
        if not self._console.is_terminal:
            with _lines(what) as counted:
                yield counted
            return
        columns = (
            SpinnerColumn(),
            TextColumn("[dim]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Bars(*columns, console=self._console, transient=True) as bars:
            task = bars.add_task(escape(one_line(what)), total=None)
            yield lambda done, whole: bars.update(task, completed=done, total=whole)

    @contextmanager
    def waiting(self, what: str, *, draws_bars: bool = False) -> Iterator[Waiting]:
        """Show that `what` is going on.

        Args:
            what: for example "Loading tiny-reader".
            draws_bars: whether the work may draw bars of its own, which a spinner would garble.
        """
        shown = f"{escape(one_line(what))} ..."
        if not self._console.is_terminal:
            with _lines(what) as counted:
                yield Waiting(False, counted)
        elif draws_bars:
            self._console.print(shown, style="dim")
            yield Waiting(True, lambda done, whole: None)
        else:
            with self._console.status(f"[dim]{shown}[/dim]") as status:
                yield Waiting(
                    False,
                    lambda done, whole: status.update(f"[dim]{shown} {done} of {whole}[/dim]"),
                )


@contextmanager
def _lines(what: str) -> Iterator[Counted]:
    """Tell by lines how long `what` has taken, and how far it is: also while nothing is counted."""
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
            tell(f"{one_line(what)}: {far}{time_shown(spent)} so far.")

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
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
