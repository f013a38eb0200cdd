"""Signs of life on stderr while something takes time, for terminals only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from rag_windows.cli.text import one_line


class Progress:
    """Spinners on stderr; nothing at all where stderr is no terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, emoji=False)

    @contextmanager
    def waiting(self, what: str, *, downloads: bool = False) -> Iterator[bool]:
        """Show that `what` is going on.

        Args:
            what: for example "Loading tiny-reader".
            downloads: whether a download may draw bars of its own, which a spinner would garble.

        Yields:
            Whether others may draw bars.
        """
        if not self._console.is_terminal:
            yield False
        elif downloads:
            self._console.print(f"{escape(one_line(what))} ...", style="dim")
            yield True
        else:
            with self._console.status(f"[dim]{escape(one_line(what))} ...[/dim]"):
                yield False
