"""Signs of life on stderr while something takes time, for terminals only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import MofNCompleteColumn as MofNColumn
from rich.progress import Progress as Bars

from rag_windows.cli.text import one_line


class Progress:
    """Bars and spinners on stderr; nothing at all where stderr is no terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, emoji=False)

    @contextmanager
    def counting(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """A bar for work that is counted; it goes away when the work is done.

        Yields:
            To be called with how much is done, and how much there is.
        """
        if not self._console.is_terminal:
            yield lambda done, whole: None
            return
        columns = (
            SpinnerColumn(),
            TextColumn("[dim]{task.description}"),
            BarColumn(),
            MofNColumn(),
        )
        with Bars(*columns, console=self._console, transient=True) as bars:
            task = bars.add_task(escape(one_line(what)), total=None)
            yield lambda done, whole: bars.update(task, completed=done, total=whole)

    @contextmanager
    def waiting(self, what: str, *, draws_bars: bool = False) -> Iterator[bool]:
        """Show that `what` is going on.

        Args:
            what: for example "Loading tiny-reader".
            draws_bars: whether the work may draw bars of its own, which a spinner would garble.

        Yields:
            Whether others may draw bars.
        """
        if not self._console.is_terminal:
            yield False
        elif draws_bars:
            self._console.print(f"{escape(one_line(what))} ...", style="dim")
            yield True
        else:
            with self._console.status(f"[dim]{escape(one_line(what))} ...[/dim]"):
                yield False
