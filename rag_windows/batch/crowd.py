"""Who asks at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rag_windows.forks import in_children


class Crowd:
    """Counts the calls that are under way, from before they are read until they are answered.

    A scheduler knows a question only once it is tokenized; by this the first of many that come at
    once is told from a lone one.
    """

    def __init__(self) -> None:
        self.after_fork()
        in_children(self)

    def after_fork(self) -> None:
        """The calls are the parent's."""
        self._lock = threading.Lock()
        self._count = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """One call more, while the block runs."""
        with self._lock:
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1

    def lone(self) -> bool:
        """Whether no more than one call is under way."""
        return self._count <= 1
