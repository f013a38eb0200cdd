"""Encodes the windows of new documents behind the questions, while none is answered."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from rag_windows import InputError, RagWindowsError, WindowedLM
from rag_windows.integration import one_line
from rag_windows.threads import Worker

if TYPE_CHECKING:
    from rag_windows_retrievers import Index

_log = logging.getLogger("rag_windows.server")

_TOGETHER = 4
"""Passages that are encoded between two looks at whether a question has come."""

_LOOK_S = 0.05
_TELL_S = 60.0


class Warmer:
    """Encodes what an index gets, in a thread of its own.

    Args:
        index: whose documents are encoded, those that are there at the start first.
        models: whose caches get the windows: of each tenant one.
        prefix: the system prompt of later questions.
        busy: whether a question is answered or waits just now.
        read: called with the version and the documents whose windows were stored just now, which
            may have been removed meanwhile.
    """

    def __init__(
        self,
        index: Index,
        models: Sequence[WindowedLM],
        prefix: str | None,
        busy: Callable[[], bool],
        read: Callable[[int, Collection[str]], object],
    ) -> None:
        self._index, self._models, self._prefix = index, models, prefix
        self._busy, self._read = busy, read
        self._stop, self._news = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._warmed: dict[str, int] = {}
        self._again: dict[str, None] = {}
        self._last, self._reported = 0, time.monotonic()
        self._worker: Worker | None = None

    def start(self) -> None:
        """Begin with all documents that are there."""
        self._worker = Worker(self._run, "rag-windows-warm", self._end)
        self.look()
        self._worker.start()

    def close(self) -> None:
        """End with the passages that are being encoded."""
        self._end()
        if self._worker is not None:
            self._worker.join()

    def look(self) -> None:
        """The index has changed."""
        self._news.set()

    def forget(self, documents: Collection[str] | None) -> None:
        """Note that windows of these documents, or all, were removed: they are encoded again."""
        with self._lock:
            if documents is None:
                self._last = 0
                self._warmed.clear()
            for one in documents or ():
                self._warmed.pop(one, None)
                self._again[one] = None

    def warmed(self, document: str | None = None) -> int:
        """Passages of a document, or of all, whose windows were encoded or found."""
        with self._lock:
            if document is None:
                return sum(self._warmed.values())
            return self._warmed.get(document, 0)

    def _end(self) -> None:
        self._stop.set()
        self._news.set()

    def _run(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            if self._stop.is_set():
                return
            try:
                self._catch_up()
            except InputError as error:
                _log.warning("Documents are not encoded before questions: %s", one_line(str(error)))
                return
            except (RagWindowsError, OSError) as error:
                _log.warning(
                    "Documents could not be encoded before questions: %s", one_line(str(error))
                )

    def _catch_up(self) -> None:
        """Encode what came, and what was removed from the cache though its document is there."""
        done, begun = Counter[str](), time.monotonic()
        while (name := self._next()) is not None:
            done["documents"] += 1
            if not self._warm(name, done):
                return
            if time.monotonic() - self._reported >= _TELL_S:
                self._reported = time.monotonic()
                _log.info("Passages encoded before questions so far: %d.", done["passages"])
        if done["passages"]:
            _log.info(
                "Documents encoded before questions: %d, with %d passages; %d windows were new; "
                "%.1f seconds.",
                done["documents"],
                done["passages"],
                done["encoded"],
                time.monotonic() - begun,
            )

    def _next(self) -> str | None:
        with self._lock:
            listed = self._index.newer(self._last, 1)
            if listed:
                self._last, name = listed[0]
                return name
            again = next(iter(self._again), None)
            if again is not None:
                del self._again[again]
            return again

    def _warm(self, name: str, done: Counter[str]) -> bool:
        """Encode a document's passages, a few at a time; False at the end of the server."""
        version = self._index.version
        passages = self._index.passages_of([name])
        with self._lock:
            self._warmed.pop(name, None)
            if passages:
                self._warmed[name] = 0
        for start in range(0, len(passages), _TOGETHER):
            part = passages[start : start + _TOGETHER]
            for lm in self._models:
                if not self._idle():
                    return False
                done["encoded"] += lm.warm(part, prefix=self._prefix).encoded
                self._read(version, [name])
            done["passages"] += len(part)
            with self._lock:
                if name in self._warmed:
                    self._warmed[name] += len(part)
        return True

    def _idle(self) -> bool:
        """Wait until no question is under way; False at the end of the server."""
        while not self._stop.is_set():
            if not self._busy():
                return True
            self._stop.wait(_LOOK_S)
        return False
