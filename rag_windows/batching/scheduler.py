"""Threads and tasks that ask at once share forward passes."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakValueDictionary

from rag_windows.batching.questions import (
    Batch,
    OnText,
    Ticket,
    answer_alone,
    check_rows,
    checked,
)
from rag_windows.engine import Engine
from rag_windows.errors import GenerationError, stop_iteration_told, without_stop_iteration
from rag_windows.request import BatchRequest
from rag_windows.results import Generation
from rag_windows.threads import Lock, Worker, in_children


class Scheduled(Future[Generation]):
    """A question on its way: a future of its answer."""

    def __init__(self, ticket: Ticket) -> None:
        super().__init__()
        self.ticket = ticket

    def set_exception(self, exception: BaseException | None) -> None:
        """Fail; a StopIteration is told as what the asker can await."""
        super().set_exception(None if exception is None else without_stop_iteration(exception))

    def cancel(self) -> bool:
        """Stop: at once if it has not begun, else after this forward pass, encoded or not.

        Returns:
            Whether it had not begun. Otherwise the result is what was written so far, its
            ``finish_reason`` "cancelled".
        """
        self.ticket.cancelled.set()
        return super().cancel()


Lone = Callable[[], bool]
"""Whether a question is the only one."""

APART = 4
"""Questions that are answered alone at the same time; others of their kind wait in line."""

_log = logging.getLogger(__name__)


class Scheduler:
    """Lets questions join a batch between two tokens, whoever asks them. Threads may share one.

    A worker thread answers; it starts with a question and ends when there is none left. Between two
    forward passes that encode a question's windows, each of the others gets a token. Questions that
    can't be part of a batch (see `WindowedLM.generate_batch`) are answered apart, `APART` at a
    time, each in a thread. What goes wrong with a question ends this one alone.

    Args:
        engine: the model.
        max_rows: so many questions are answered at a time; more wait in line.
    """

    def __init__(self, engine: Engine, *, max_rows: int = 32) -> None:
        check_rows(max_rows)
        self._engine = engine
        self._max_rows = max_rows
        self._closed = False
        self.after_fork()
        in_children(self)

    def after_fork(self) -> None:
        """A child starts with an empty one: it has no worker, and the parent answers its own."""
        self._lock = threading.Lock()
        self._waiting: deque[Scheduled] = deque()
        self._alone: deque[Scheduled] = deque()
        self._running: dict[Ticket, Scheduled] = {}
        self._apart: set[threading.Thread] = set()
        self._worker: threading.Thread | None = None
        # Questions that the threads of their callers answer.
        self._callers = 0

    @stop_iteration_told
    def submit(
        self,
        request: Mapping[str, Any] | BatchRequest,
        *,
        on_text: OnText | None = None,
        lone: Lone | None = None,
    ) -> Scheduled:
        """Ask a question.

        Args:
            request: the keyword arguments of `WindowedLM.generate`.
            on_text: told each piece of the text as it settles, by the worker, which waits for it;
                all pieces joined are the text. What it raises ends this question alone.
            lone: whether nobody else is about to ask. If so, and nothing is being answered, the
                question is answered alone, which is a little sooner than a batch of one.

        Returns:
            A future of the answer; what goes wrong on the way is raised by its ``result()``.

        Raises:
            InputError, PromptError, LimitError: before any work.
            GenerationError: the scheduler is closed.
        """
        ticket = checked(self._engine, BatchRequest.of(request), on_text)
        with self._lock:
            return self._take(ticket, alone=self._idle(lone))

    @stop_iteration_told
    def answer(
        self, request: Mapping[str, Any] | BatchRequest, *, lone: Lone | None = None
    ) -> Generation:
        """Ask a question and wait; what interrupts the wait stops it.

        Args:
            request: see `submit`.
            lone: see `submit`; then this thread itself answers it.

        Raises:
            RagWindowsError: what `WindowedLM.generate` would raise.
        """
        ticket = checked(self._engine, BatchRequest.of(request))
        with self._lock:
            scheduled = None if self._idle(lone) else self._take(ticket)
            self._callers += scheduled is None
        if scheduled is not None:
            try:
                return scheduled.result()
            except BaseException:
                scheduled.cancel()
                raise
        try:
            return answer_alone(ticket)
        finally:
            with self._lock:
                self._callers -= 1

    @property
    def closed(self) -> bool:
        """Whether it takes no more questions."""
        return self._closed

    def close(self, *, cancel: bool = False) -> None:
        """Take no more questions, and wait until those that were asked are answered.

        A lone question that its caller's own thread answers is left to that.

        Args:
            cancel: stop them instead: those that wait at once, the others after this forward pass.
        """
        with self._lock:
            self._closed = True
            threads = [*self._apart, *([self._worker] if self._worker else [])]
        if cancel:
            self.cancel()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def cancel(self) -> None:
        """Stop all questions: those that wait at once, the others after this forward pass."""
        with self._lock:
            asked = [*self._waiting, *self._alone, *self._running.values()]
        for scheduled in asked:
            scheduled.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(cancel=error is not None)

    def _take(self, ticket: Ticket, *, alone: bool = False) -> Scheduled:
        """Let a question stand in line, for the batch or for being answered alone."""
        if self._closed:
            raise GenerationError("This scheduler is closed; make a new one.")
        scheduled = Scheduled(ticket)
        me = threading.current_thread()
        # Asked by a callback of a question that is being answered, which may wait for it.
        inner = me is self._worker or me in self._apart
        if ticket.alone or alone or inner:
            self._start_apart(scheduled, at_once=inner)
        else:
            if self._worker is None:
                worker = Worker(self._work, "rag-windows-batch", self.cancel)
                worker.start()
                self._worker = worker
            self._waiting.append(scheduled)
        return scheduled

    def _idle(self, lone: Lone | None) -> bool:
        """Whether nothing is being answered, and a question is a lone one."""
        if lone is None or self._closed or self._worker is not None:
            return False
        return not (self._running or self._alone or self._callers) and lone()

    def _work(self) -> None:
        """Answer until nobody waits."""
        batch = Batch(self._engine, self._max_rows)
        while True:
            self._fill(batch)
            try:
                ended = batch.step()
            except BaseException as error:  # noqa: BLE001 - handed to those who wait for it
                ended = [(ticket, error) for ticket in batch.tickets]
                batch.close()
                batch = Batch(self._engine, self._max_rows)
            for ticket, result in ended:
                if result is None:
                    self._answer_apart(ticket)
                else:
                    self._resolve(ticket, result)
            with self._lock:
                if not batch and not self._waiting:
                    self._worker = None
                    return

    def _fill(self, batch: Batch) -> None:
        """Let those who wait join while there is room."""
        while not batch.full:
            with self._lock:
                if not self._waiting:
                    return
                scheduled = self._waiting.popleft()
                if not scheduled.set_running_or_notify_cancel():
                    continue
                self._running[scheduled.ticket] = scheduled
            batch.admit(scheduled.ticket)

    def _start_apart(self, scheduled: Scheduled, *, at_once: bool = False) -> None:
        """Have a question answered alone."""
        if at_once or len(self._apart) < APART:
            thread = Worker(self._work_apart, "rag-windows-apart", self.cancel)
            thread.start()
            self._apart.add(thread)
        self._alone.append(scheduled)

    def _work_apart(self) -> None:
        """Answer one question after the other until none of them waits."""
        while True:
            with self._lock:
                if not self._alone:
                    self._apart.discard(threading.current_thread())
                    return
                scheduled = self._alone.popleft()
                # One that the batch could not take is running already.
                if not scheduled.running() and not scheduled.set_running_or_notify_cancel():
                    continue
                self._running[scheduled.ticket] = scheduled
            ticket = scheduled.ticket
            try:
                # A copy: the text is told in the context itself, which can't be entered twice.
                result: Generation | BaseException = ticket.context.copy().run(answer_alone, ticket)
            except BaseException as error:  # noqa: BLE001 - handed to the one who waits for it
                result = error
            self._resolve(ticket, result)

    def _answer_apart(self, ticket: Ticket) -> None:
        """Have a question answered alone that the batch could not take."""
        try:
            with self._lock:
                self._start_apart(self._running[ticket])
        except RuntimeError as error:  # there are no more threads to be had
            self._resolve(ticket, error)

    def _resolve(self, ticket: Ticket, result: Generation | BaseException) -> None:
        with self._lock:
            scheduled = self._running.pop(ticket)
        try:
            if isinstance(result, BaseException):
                scheduled.set_exception(result)
            else:
                scheduled.set_result(result)
        except BaseException:  # noqa: BLE001 - of a callback; the future itself is done
            _log.exception("A callback of a question's future failed.")


_schedulers: WeakKeyDictionary[Any, WeakValueDictionary[int, Scheduler]] = WeakKeyDictionary()
_lock = Lock()


def shared_scheduler(owner: Any, max_rows: int, make: Callable[[], Scheduler]) -> Scheduler:
    """The scheduler with so many rows that everybody who asks this model gets now.

    Nothing is kept alive: one that answers nobody and that nobody holds is gone, and the next call
    makes another, which costs nothing. A model with another cache is another owner.
    """
    with _lock:
        by_rows = _schedulers.setdefault(owner, WeakValueDictionary())
        found = by_rows.get(max_rows)
        if found is None or found.closed:
            found = by_rows[max_rows] = make()
        return found
