"""Questions from many threads, answered together by one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rag_windows.batch.answers import Batch, answer_alone, check_rows
from rag_windows.batch.request import BatchRequest
from rag_windows.batch.ticket import OnText, Ticket, checked
from rag_windows.errors import GenerationError
from rag_windows.generation import Generation

if TYPE_CHECKING:
    from rag_windows.text_level import TextLM


class Scheduled(Future[Generation]):
    """A question on its way.

    Args:
        ticket: of the question.
    """

    def __init__(self, ticket: Ticket) -> None:
        super().__init__()
        self.ticket = ticket

    def cancel(self) -> bool:
        """Stop: at once if it has not begun, else at the next token.

        Returns:
            Whether it had not begun. Otherwise the result is what was written so far, its
            ``finish_reason`` "cancelled".
        """
        self.ticket.cancelled.set()
        return super().cancel()


class Scheduler:
    """Lets questions join a batch between two tokens, whoever asks them. Threads may share one.

    A worker thread answers; it starts with a question and ends when there is none left. While a
    question's windows are encoded, the others wait. Questions that can't be part of a batch (see
    `WindowedLM.generate_batch`) are answered beside it, each in a thread.

    Args:
        lm: the model.
        max_rows: so many questions are answered at a time; more wait in line.
    """

    def __init__(self, lm: TextLM, *, max_rows: int = 32) -> None:
        check_rows(max_rows)
        self._lm = lm
        self._max_rows = max_rows
        self._lock = threading.Lock()
        self._waiting: deque[Scheduled] = deque()
        self._running: dict[Ticket, Scheduled] = {}
        self._beside: set[threading.Thread] = set()
        self._worker: threading.Thread | None = None
        self._closed = False

    def submit(
        self, request: Mapping[str, Any] | BatchRequest, *, on_text: OnText | None = None
    ) -> Scheduled:
        """Ask a question.

        Args:
            request: the keyword arguments of `WindowedLM.generate`.
            on_text: told each piece of the text as it settles, by the worker, which waits for it;
                all pieces joined are the text. What it raises ends this question alone.

        Returns:
            A future of the answer; what goes wrong on the way is raised by its ``result()``.

        Raises:
            InputError, PromptError, LimitError: before any work.
            GenerationError: the scheduler is closed.
        """
        scheduled = Scheduled(checked(self._lm, BatchRequest.of(request), on_text))
        with self._lock:
            if self._closed:
                raise GenerationError("This scheduler is closed; make a new one.")
            if scheduled.ticket.alone:
                self._start_beside(scheduled)
            else:
                self._waiting.append(scheduled)
                if self._worker is None:
                    self._worker = threading.Thread(
                        target=self._work, name="rag-windows-batch", daemon=True
                    )
                    self._worker.start()
        return scheduled

    def close(self, *, cancel: bool = False) -> None:
        """Take no more questions, and wait until those that were asked are answered.

        Args:
            cancel: stop them instead: those that wait at once, the others at the next token.
        """
        with self._lock:
            self._closed = True
            threads = [*self._beside, *([self._worker] if self._worker else [])]
            asked = [*self._waiting, *self._running.values()]
        if cancel:
            for scheduled in asked:
                scheduled.cancel()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(cancel=error is not None)

    def _work(self) -> None:
        """Answer until nobody waits."""
        batch = Batch(self._lm)
        while True:
            try:
                self._fill(batch)
                ended = batch.step()
            except BaseException as error:  # noqa: BLE001 - handed to those who wait for it
                # A pass that failed has left its rows half done.
                ended = [(ticket, error) for ticket in batch.tickets]
                batch = Batch(self._lm)
            for ticket, result in ended:
                self._resolve(ticket, result)
            with self._lock:
                if not batch and not self._waiting:
                    self._worker = None
                    return

    def _fill(self, batch: Batch) -> None:
        """Let those who wait join while there is room."""
        while len(batch) < self._max_rows:
            with self._lock:
                if not self._waiting:
                    return
                scheduled = self._waiting.popleft()
                if not scheduled.set_running_or_notify_cancel():
                    continue
                self._running[scheduled.ticket] = scheduled
            try:
                joined = batch.admit(scheduled.ticket)
            except BaseException as error:  # noqa: BLE001 - handed to the one who waits for it
                self._resolve(scheduled.ticket, error)
                continue
            if not joined:
                with self._lock:
                    self._start(scheduled)

    def _start_beside(self, scheduled: Scheduled) -> None:
        if scheduled.set_running_or_notify_cancel():
            self._running[scheduled.ticket] = scheduled
            self._start(scheduled)

    def _start(self, scheduled: Scheduled) -> None:
        """Answer a question alone, in a thread; the lock is held."""

        def work() -> None:
            try:
                result: Generation | BaseException = answer_alone(scheduled.ticket)
            except BaseException as error:  # noqa: BLE001 - handed to the one who waits for it
                result = error
            self._resolve(scheduled.ticket, result)
            with self._lock:
                self._beside.discard(thread)

        thread = threading.Thread(target=work, name="rag-windows-beside", daemon=True)
        self._beside.add(thread)
        thread.start()

    def _resolve(self, ticket: Ticket, result: Generation | BaseException) -> None:
        with self._lock:
            scheduled = self._running.pop(ticket)
        if isinstance(result, BaseException):
            scheduled.set_exception(result)
        else:
            scheduled.set_result(result)
