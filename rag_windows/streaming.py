"""Text as it comes, and work in threads of its own."""

from __future__ import annotations

import atexit
import contextvars
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from transformers.generation.streamers import BaseStreamer

from rag_windows.errors import (
    GenerationError,
    without_stop_iteration,
)
from rag_windows.prompt.detokenize import Detokenizer
from rag_windows.results import Chunk, Generation

T = TypeVar("T")


Work = Callable[[BaseStreamer | None, threading.Event], Generation]
"""Generates, feeding a streamer, until done or the event is set."""

PATIENCE = 30.0
"""Seconds that a process which ends waits for each worker, once it was told to stop."""


class Worker(threading.Thread):
    """A thread that generates; a process that ends stops it first.

    A thread cut off inside of a tensor operation aborts Python.

    Args:
        work: what it does.
        name: of the thread.
        stop: makes it end soon; called from any thread.
    """

    def __init__(self, work: Callable[[], None], name: str, stop: Callable[[], object]) -> None:
        super().__init__(target=work, name=name, daemon=True)
        self.stop = stop

    def start(self) -> None:
        """Start; RuntimeError if the system gives no more threads."""
        super().start()
        _workers.add(self)


_workers: WeakSet[Worker] = WeakSet()


@atexit.register
def _stop_workers() -> None:
    workers = [*_workers]
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.join(PATIENCE)


class Pieces(BaseStreamer):
    """Turns tokens into pieces of settled text.

    Attributes:
        sent: the text put so far.

    Args:
        detokenizer: of the model.
        stop: strings before which the text ends.
        put: takes each piece.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str], put: Callable[[str], None]
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._put = put
        self._ids: list[int] = []
        self._prompt_passed = False
        self.sent = ""

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt (ignored), then each new token."""
        if not self._prompt_passed:
            self._prompt_passed = True
            return
        self._ids.extend(int(token) for token in value.flatten().tolist())
        settled = self._detokenizer.settled(self._ids, self._stop)
        if len(settled) > len(self.sent) and settled.startswith(self.sent):
            self._put(settled[len(self.sent) :])
            self.sent = settled

    def end(self) -> None:
        """Nothing: the rest comes with the whole result."""


def stream(
    work: Work, detokenizer: Detokenizer, stop: Sequence[str], by_token: bool
) -> Iterator[Chunk]:
    """Run ``work`` in a thread and yield its text as it settles.

    Closing the iterator sets the event, waits for the worker and returns; an exception in the
    worker is raised here.

    Args:
        work: the generation.
        detokenizer: of the model.
        stop: strings before which the text ends.
        by_token: False where tokens are not final as they come (beams): then one chunk comes.
    """
    pieces: queue.SimpleQueue[str | Generation | BaseException] = queue.SimpleQueue()
    cancelled = threading.Event()
    streamer = Pieces(detokenizer, stop, pieces.put) if by_token else None

    def run() -> None:
        try:
            pieces.put(work(streamer, cancelled))
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, whatever it is
            pieces.put(without_stop_iteration(error))

    context = contextvars.copy_context()
    worker = Worker(lambda: context.run(run), "rag-windows-stream", cancelled.set)
    worker.start()
    try:
        yield from _chunks(pieces)
    finally:
        cancelled.set()
        worker.join()


def _chunks(pieces: queue.SimpleQueue[Any]) -> Iterator[Chunk]:
    sent = ""
    while True:
        piece = pieces.get()
        if isinstance(piece, BaseException):
            raise piece
        if isinstance(piece, Generation):
            if not piece.text.startswith(sent):
                raise GenerationError(
                    "The tokenizer rewrote text that was already streamed; use generate() with "
                    "this tokenizer."
                )
            yield Chunk(piece.text[len(sent) :], piece)
            return
        sent += piece
        yield Chunk(piece)
