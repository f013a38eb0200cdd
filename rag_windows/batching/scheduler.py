"""Threads and tasks that ask at once share forward passes."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakValueDictionary

from rag_windows.batching.batch import Batch
from rag_windows.batching.budget import Budget
from rag_windows.batching.questions import OnChunk, Question
from rag_windows.cache.passage_cache import Size
from rag_windows.engine import Engine
from rag_windows.errors import GenerationError
from rag_windows.request import BatchRequest
from rag_windows.results import Generation
from rag_windows.sampling import whole_number
from rag_windows.threads import Lock, Worker, in_children

IsIdle = Callable[[], bool]
"""Whether no other question is about to come."""

MAX_EXCLUSIVE = 4
"""Questions that are answered outside of the batch at the same time; more of them wait."""

_NAP_S = 0.05
"""Longest wait while others hold the memory; a cancellation may take so long."""


class Scheduler:
    """Answers questions of many threads and tasks together; a new question joins between tokens.

    A worker thread answers. It starts with the first question and ends when none is left. While a
    question's windows are encoded, the others get a token after each forward pass. Questions that
    can't be part of a batch (see `WindowedLM.generate_batch`) are answered in threads of their own,
    `MAX_EXCLUSIVE` at a time. An error in one question does not affect the others.

    Args:
        engine: the model.
        max_rows: number of questions that are answered at a time; the others wait.
        max_bytes: memory for all questions that are answered at a time: bytes, a text such as
            "8GiB", or a share of what is free, such as "50%"; None for `DEFAULT_SHARE`. Free memory
            is measured when a question comes while none is being answered. Questions are served in
            order; see `WindowedLM.generate_batch` for what has to fit.
    """

    def __init__(
        self, engine: Engine, *, max_rows: int = 32, max_bytes: Size | None = None
    ) -> None:
        whole_number("max_rows", max_rows)
        self._engine = engine
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._closed = False
        self.after_fork()
        in_children(self)

    def after_fork(self) -> None:
        """In a child it starts empty: the worker and the questions are the parent's."""
        self._lock = threading.Lock()
        self._released = threading.Condition(self._lock)
        self._budget = Budget(self._engine, self._max_bytes)
        self._numbers = itertools.count()
        # Questions whose turn it is, but for whom there is no memory.
        self._waiting_for_memory: set[Question] = set()
        self._asked: set[Question] = set()
        self._waiting: deque[Question] = deque()
        self._exclusive: deque[Question] = deque()
        self._exclusive_threads: set[threading.Thread] = set()
        self._worker: threading.Thread | None = None

    def submit(
        self,
        request: Mapping[str, Any] | BatchRequest,
        *,
        on_chunk: OnChunk | None = None,
        idle: IsIdle | None = None,
        engine: Engine | None = None,
    ) -> Question:
        """Ask a question.

        Args:
            request: the keyword arguments of `WindowedLM.generate`.
            on_chunk: called by the worker with each `Chunk` that `WindowedLM.stream` would give,
                and with None once the question has ended; the worker waits for it. An error in it
                ends only this question.
            idle: a function that says whether no other question is about to come. If so, and
                nothing is being answered, this question is answered without a batch, which is a
                little faster.
            engine: that of the same model with another tenant's cache, see `WindowedLM.tenant`.

        Returns:
            A future of the answer; its ``result()`` raises the errors of the generation.

        Raises:
            InputError, PromptError, LimitError: the request can't be used; nothing was computed.
            GenerationError: the scheduler is closed.
        """
        question = self._question(engine or self._engine, request, on_chunk)
        with self._lock:
            nobody = not (self._asked or self._worker)
            self._take(question, apart=idle is not None and nobody and idle())
        return question

    def answer(self, request: Mapping[str, Any] | BatchRequest) -> Generation:
        """Ask a question and wait for the answer; an interruption of the wait stops it.

        Args:
            request: see `submit`.

        Raises:
            RagWindowsError: what `WindowedLM.generate` would raise.
        """
        question = self.submit(request)
        try:
            return question.result()
        except BaseException:
            question.cancel()
            raise

    @property
    def closed(self) -> bool:
        """Whether it takes no more questions."""
        return self._closed

    def close(self, *, cancel: bool = False) -> None:
        """Take no more questions, and wait until those that were asked are answered.

        Args:
            cancel: stop them instead: those that wait at once, the others after this forward pass.
        """
        with self._lock:
            self._closed = True
            threads = [*self._exclusive_threads, *([self._worker] if self._worker else [])]
        if cancel:
            self.cancel()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def cancel(self) -> None:
        """Stop all questions: those that wait at once, the others after this forward pass."""
        with self._lock:
            asked = list(self._asked)
        for question in asked:
            question.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(cancel=error is not None)

    def _question(
        self,
        engine: Engine,
        request: Mapping[str, Any] | BatchRequest,
        on_chunk: OnChunk | None,
    ) -> Question:
        """A checked question, for which there is memory if nobody else takes any."""
        question = Question(engine, request, on_chunk)
        with self._lock:
            if not self._asked:
                self._budget.begin()
        question.reserve(self._budget)
        return question

    def _take(self, question: Question, *, apart: bool) -> None:
        """Queue a question, for the batch or for an exclusive answer."""
        if self._closed:
            raise GenerationError("This scheduler is closed. Make a new one.")
        me = threading.current_thread()
        # Asked by a callback of a question that is being answered, which may wait for it.
        inner = me is self._worker or me in self._exclusive_threads
        question.number = next(self._numbers)
        if question.exclusive or apart or inner:
            if inner or len(self._exclusive_threads) < MAX_EXCLUSIVE:
                thread = Worker(self._work_exclusive, "rag-windows-apart", self.cancel)
                thread.start()
                self._exclusive_threads.add(thread)
            if inner:
                # It can't wait for memory that is released only when it is answered.
                question.number = -1
                self._exclusive.appendleft(question)
            else:
                self._exclusive.append(question)
        else:
            if self._worker is None:
                worker = Worker(self._work, "rag-windows-batch", self.cancel)
                worker.start()
                self._worker = worker
            self._waiting.append(question)
        self._asked.add(question)

    def _first(self, line: deque[Question]) -> Question | None:
        """The first of those that wait in line, if it is its turn; the lock is held.

        Nobody overtakes an older question for which there is no memory, whichever line it is in.
        """
        while line and line[0].cancelled():
            question = line.popleft()
            question.set_running_or_notify_cancel()
            self._asked.discard(question)
            self._waiting_for_memory.discard(question)
        older = [one.number for one in self._waiting_for_memory if not one.cancelled()]
        return line[0] if line and line[0].number <= min(older, default=line[0].number) else None

    def _begin(self, question: Question, line: deque[Question]) -> bool:
        """Take the first of a line out of it; whether it wants to be answered. The lock is held."""
        line.popleft()
        self._waiting_for_memory.discard(question)
        if question.set_running_or_notify_cancel():
            return True
        self._asked.discard(question)
        return False

    def _work(self) -> None:
        """Answer until nobody waits."""
        batch = Batch(self._engine, self._max_rows, self._budget)
        while True:
            self._admit(batch)
            try:
                ended = batch.step()
            except BaseException as error:  # noqa: BLE001 - handed to those who wait for it
                ended = [(question, error) for question in batch.close()]
                batch = Batch(self._engine, self._max_rows, self._budget)
            for question, result in ended:
                self._forget(question)
                question.end(result)
            with self._lock:
                if not batch and not self._waiting:
                    self._worker = None
                    return
                if not batch and not ended:
                    # Questions that are answered exclusively hold the memory.
                    self._released.wait(_NAP_S)

    def _admit(self, batch: Batch) -> None:
        """Let those that wait join, in order, as long as they fit."""
        while not batch.full:
            with self._lock:
                question = self._first(self._waiting)
            if question is None:
                return
            refused: BaseException | None = None
            try:
                joined = batch.admit(question)
            except BaseException as error:  # noqa: BLE001 - handed to the one who waits for it
                joined, refused = False, error
            with self._lock:
                if not joined and refused is None:
                    self._waiting_for_memory.add(question)
                    return
                wanted = self._begin(question, self._waiting)
            if joined and not wanted:
                batch.leave(question)
            elif refused is not None and wanted:
                self._forget(question)
                question.end(refused)

    def _work_exclusive(self) -> None:
        """Answer one question after the other until none of them waits."""
        while (question := self._next_exclusive()) is not None:
            result = question.outcome()
            self._forget(question)
            question.end(result)

    def _next_exclusive(self) -> Question | None:
        """Wait for the next exclusive question, and take its memory; None without one."""
        with self._lock:
            while self._exclusive:
                question = self._first(self._exclusive)
                if question is not None:
                    force = question.number < 0 or not self._budget.taken
                    if self._budget.take(question, question.bytes, force=force):
                        if self._begin(question, self._exclusive):
                            return question
                        self._budget.release(question)
                        continue
                    self._waiting_for_memory.add(question)
                if self._exclusive:
                    self._released.wait(_NAP_S)
            self._exclusive_threads.discard(threading.current_thread())
            return None

    def _forget(self, question: Question) -> None:
        with self._lock:
            self._asked.discard(question)
            self._waiting_for_memory.discard(question)
            self._budget.release(question)
            self._released.notify_all()


Bounds = tuple[int, Size | None]
"""How many rows and how many bytes a scheduler may take."""

_schedulers: WeakKeyDictionary[Any, WeakValueDictionary[Bounds, Scheduler]] = WeakKeyDictionary()
_lock = Lock()


def shared_scheduler(owner: Any, bounds: Bounds, make: Callable[[], Scheduler]) -> Scheduler:
    """The scheduler with these bounds that all callers of this model share.

    References are weak: one that answers nobody and that nobody holds is freed, and the next call
    makes another, which costs nothing. A model with another cache is another owner.
    """
    with _lock:
        made = _schedulers.setdefault(owner, WeakValueDictionary())
        found = made.get(bounds)
        if found is None or found.closed:
            found = made[bounds] = make()
        return found
