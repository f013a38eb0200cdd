"""The engine behind a LangChain model, loaded on first use."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from rag_windows import WindowedLM
from rag_windows.batching.awaiting import Crowd
from rag_windows.forks import Lock, in_children
from rag_windows.sharing import load_shared

_names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_naming = Lock()


def name_of(value: object) -> str | None:
    """A name that no other object has had or will have, in no process; strings are their own."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Path):
        return str(value)
    with _naming:
        return _names.setdefault(value, f"{type(value).__name__}-{uuid4().hex}")


class Loaded:
    """Holds the engine, and the threads for its asynchronous calls.

    A copy, or what comes out of a pickle, is empty: it shares the weights again on first use.

    Attributes:
        crowd: of the calls that are under way.
    """

    def __init__(self) -> None:
        self._arguments: tuple[str | Path, dict[str, Any]] | None = None
        self._lm: WindowedLM | None = None
        self.crowd = Crowd()
        self.after_fork()
        in_children(self)

    def after_fork(self) -> None:
        """A child has none of the threads."""
        self._loading = threading.Lock()
        self._starting = threading.Lock()  # not held while a model loads: an event loop asks for it
        self._pool: ThreadPoolExecutor | None = None

    def __reduce__(self) -> tuple[type[Loaded], tuple[()]]:
        return Loaded, ()

    def lm(self, model: str | Path, arguments: dict[str, Any]) -> WindowedLM:
        """The engine for these arguments of `load_shared`; loaded anew when they change."""
        with self._loading:
            if self._lm is None or self._arguments != (model, arguments):
                self._lm = load_shared(model, **arguments)
                self._arguments = (model, arguments)
            return self._lm

    def pool(self, threads: int) -> ThreadPoolExecutor:
        """Threads that make one call each."""
        with self._starting:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(threads, thread_name_prefix="rag-windows")
            return self._pool
