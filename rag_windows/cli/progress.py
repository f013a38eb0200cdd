"""Signs of life on stderr while something takes time, for terminals only."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import MofNCompleteColumn as MofNColumn
from rich.progress import Progress as Bars

from rag_windows.cli.errors import tell
from rag_windows.prompt.visible_text import one_line

Timed = Callable[[int, int, float], None]
"""Told how much is done, how much there is, and the seconds since the work began.

What was done when the work began, as by an earlier run, is told at once, and took no time.
"""

Counted = Callable[[int, int], None]
"""Told how much is done, and how much there is."""

_LINE_S = 60.0
_BEAT_S = 10.0
"""Seconds between lines where stderr is no terminal; RAG_WINDOWS_PROGRESS_S says otherwise."""


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
        """A bar for work that is counted; it goes away when the work is done.

        Yields:
            To be called with how much is done, and how much there is.
        """
        if not self._console.is_terminal:
            with _beating(what) as counted:
                yield counted
            return
        columns = (
            SpinnerColumn(),
            TextColumn("[dim]{task.description}"),
            BarColumn(),
            MofNColumn(),
            TimeElapsedColumn(),
        )
        with Bars(*columns, console=self._console, transient=True) as bars:
            task = bars.add_task(escape(one_line(what)), total=None)
            yield lambda done, whole: bars.update(task, completed=done, total=whole)

    @contextmanager
    def timing(self, what: str, every_s: float = _LINE_S) -> Iterator[Timed]:
        """A bar that tells how long the work will take, for work of minutes and hours.

        Where stderr is no terminal, as in a batch job, a line now and then.

        Args:
            what: such as "Answering".
            every_s: seconds between two lines.
        """
        shown, left = one_line(what), _Left()
        if not self._console.is_terminal:
            told = time.monotonic()

            def line(done: int, whole: int, seconds: float) -> None:
                nonlocal told
                estimate = left.estimate(done, whole, seconds)
                if time.monotonic() - told >= every_s:
                    told = time.monotonic()
                    tell(f"{shown}: {done} of {whole}{estimate and ', ' + estimate}.")

            yield line
            return
        columns = (
            SpinnerColumn(),
            TextColumn("[dim]{task.description}"),
            BarColumn(),
            MofNColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[left]}"),
        )
        with Bars(*columns, console=self._console, transient=True) as bars:
            task = bars.add_task(escape(shown), total=None, left="")

            def update(done: int, whole: int, seconds: float) -> None:
                estimate = left.estimate(done, whole, seconds)
                bars.update(task, completed=done, total=whole, left=estimate)

            yield update

    @contextmanager
    def waiting(self, what: str, *, draws_bars: bool = False) -> Iterator[Waiting]:
        """Show that `what` is going on.

        Args:
            what: for example "Loading tiny-reader".
            draws_bars: whether the work may draw bars of its own, which a spinner would garble.
        """
        shown = f"{escape(one_line(what))} ..."
        if not self._console.is_terminal:
            with _beating(what) as counted:
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
def _beating(what: str) -> Iterator[Counted]:
    """Tell by lines how long `what` has taken, and how far it is: also while nothing is counted."""
    try:
        every_s = float(os.environ.get("RAG_WINDOWS_PROGRESS_S") or _BEAT_S)
    except ValueError:
        every_s = _BEAT_S
    begun, over = time.monotonic(), threading.Event()
    far = ""

    def counted(done: int, whole: int) -> None:
        nonlocal far
        far = f"{done} of {whole}, "

    def beat() -> None:
        while not over.wait(every_s):
            tell(f"{one_line(what)}: {far}{time_shown(time.monotonic() - begun)} so far.")

    thread = threading.Thread(target=beat, name="rag-windows-progress", daemon=True)
    if every_s > 0:
        thread.start()
    try:
        yield counted
    finally:
        over.set()
        if every_s > 0:
            thread.join()


class _Left:
    """How long work will still take, by how long it took so far."""

    def __init__(self) -> None:
        self._first: int | None = None

    def estimate(self, done: int, whole: int, seconds: float) -> str:
        """Such as "3 min 20 s left"; nothing before anything is done."""
        if self._first is None:
            self._first = done
        fresh = done - self._first
        return "" if fresh < 1 else f"{time_shown(seconds * (whole - done) / fresh)} left"


def time_shown(seconds: float) -> str:
    """A time for people."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
