"""The questions of a batch: encoded by turns, and answered a token of each at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from weakref import WeakKeyDictionary

from transformers.generation import GenerateDecoderOnlyOutput

from rag_windows.batching.budget import Budget
from rag_windows.batching.loop import BatchLoop
from rag_windows.batching.questions import Question, free_frames, sum_tokens
from rag_windows.batching.row import Row
from rag_windows.cache.passage_cache import Size
from rag_windows.engine import Engine
from rag_windows.prefill import EncodedContext
from rag_windows.results import Generation
from rag_windows.windows import WindowStore

Ended = tuple[Question, Generation | BaseException]
"""A question that left the batch, and its answer or what ended it."""

_NAP_S = 0.01
"""Longest sleep while every question waits for others; a new question may wait so long."""


class Batch:
    """The rows of one model's batch, as questions and answers. Not for several threads at once.

    Questions are encoded in turn, a forward pass of one between two tokens of the others. At most
    ``max_rows`` are encoded or answered at a time, beside those that wait for others that encode
    the same, and as many as ``budget`` has memory for.
    """

    def __init__(self, engine: Engine, max_rows: int, budget: Budget) -> None:
        self._engine = engine
        self._max_rows = max_rows
        self._budget = budget
        self._size = 0
        self._refused: tuple[Question, int] | None = None
        self._loop = BatchLoop(engine.encoder, engine.decoder)
        # Of other tenants, who read no window of each other's.
        self._encoders: WeakKeyDictionary[Engine, WindowStore] = WeakKeyDictionary()
        self._encoders[engine] = self._loop.encoder
        self._entering: list[Question] = []
        self._questions: dict[Row, Question] = {}

    def __len__(self) -> int:
        return len(self._entering) + len(self._questions)

    @property
    def full(self) -> bool:
        """Whether others have to wait."""
        busy = sum(not question.due for question in self._entering)
        return busy + len(self._questions) >= self._max_rows

    def admit(self, question: Question) -> bool:
        """Let a question in if there is a row and memory for it; `step` encodes what it reads.

        Raises:
            LimitError: there will not be either when all others have left.
        """
        budget = self._budget
        # Not computed again at each token: only memory that others release changes the result.
        if self.full or self._refused == (question, budget.changes):
            return False
        before, size = budget.changes, self._rough_size(question)
        if not budget.fits(self, size):
            size = min(size, self._exact_size(question))
        if not budget.take(self, size):
            if self or budget.could_fit(size):
                self._refused = question, before
            else:
                # What the cache held when it was asked may be gone.
                question.reserve(budget)
            return False
        self._size = size
        engine = question.engine
        encoder = self._encoders.setdefault(engine, engine.encoder.for_batch())
        question.prefill = question.request.prefill_for_query(encoder)
        self._entering.append(question)
        return True

    @property
    def _asked(self) -> list[Question]:
        return [*self._entering, *self._questions.values()]

    def _rough_size(self, *joining: Question) -> int:
        """Bytes that its questions need in the end, and those that join, if they share nothing."""
        needs = [one.need for one in (*self._asked, *joining)]
        windows = sum(sum(need.windows) for need in needs)
        return self._budget.sizes.batch(needs, windows, self._loop.capacity)

    def _exact_size(self, *joining: Question) -> int:
        """The same, but for windows that several read or the cache holds; it takes a while."""
        questions = [*self._asked, *joining]
        # What another tenant's question reads is held for that tenant.
        reads = {(id(one.engine), read.key): read for one in questions for read in one.reads}
        missing = self._budget.missing(self._engine.cache, reads.values())
        needs = [one.need for one in questions]
        return self._budget.sizes.batch(needs, sum_tokens(missing), self._loop.capacity)

    def _settle(self) -> None:
        """Release the memory of those that left; what the others share is computed later."""
        if self:
            self._size = min(self._size, self._rough_size())
            self._budget.take(self, self._size, force=True)
        else:
            self._budget.release(self)

    def step(self) -> list[Ended]:
        """A forward pass for a question that enters, and a token for each of the others.

        An error ends one question; a failed pass of many is tried again with the others.
        """
        ended: list[Ended] = []
        for question in [one for one in self._entering if one.stopped.is_set()]:
            ended.append((question, question.generation()))
            self.leave(question)
        worked = False
        for question in [*self._entering]:
            if question.due and (self.full or question.due > time.monotonic()):
                continue
            try:
                if worked := self._encode(question):
                    break
            except BaseException as error:  # noqa: BLE001 - handed to the one who waits for it
                free_frames(error)
                self.leave(question)
                ended.append((question, error))
                break
        if self._questions:
            ended += self._decode()
        elif not (worked or ended) and self._entering:
            until = min(question.due for question in self._entering) - time.monotonic()
            time.sleep(min(_NAP_S, max(0.0, until)))
        return ended

    def close(self) -> list[Question]:
        """End what is being encoded; returns all questions that were in the batch."""
        left = self._asked
        for question in [*self._entering]:
            self.leave(question)
        self._questions.clear()
        self._settle()
        return left

    def _encode(self, question: Question) -> bool:
        """Go on with a prefill; whether that was a forward pass, after which it is others' turn."""
        try:
            pause = question.context.run(next, question.prefill)  # type: ignore[arg-type]  # it entered
        except StopIteration as made:
            self._join(question, made.value)
            return False
        question.due = time.monotonic() + pause if pause else 0.0
        if pause:
            return False
        self._entering.remove(question)
        self._entering.append(question)
        return True

    def _join(self, question: Question, context: EncodedContext) -> None:
        """Let a question join that is encoded."""
        question.encoded(context)
        request = question.request
        query_ids = request.parts.query_ids
        row = Row(
            self._engine.decoder,
            context,
            query_ids,
            request.options,
            criteria=question.criteria(len(context.prefix_ids) + len(query_ids)),
            seed=request.seed,
            cited=request.citations,
            streamer=question.pieces,
        )
        self._loop.admit(row)
        self._entering.remove(question)
        question.prefill = None
        self._questions[row] = question

    def _decode(self) -> list[Ended]:
        """A token for each row; returns those that ended."""
        try:
            rows = self._loop.step()
        except BaseException as error:  # noqa: BLE001 - handed to the one who waits for it
            return [self._failed(error)]
        ended: list[Ended] = []
        for row in rows:
            question = self._questions.pop(row)
            try:
                ended.append((question, self._answer(row, question)))
            except BaseException as error:  # noqa: BLE001 - a caller's code; only its own row ends
                ended.append((question, error))
        if rows:
            self._settle()
        return ended

    def _failed(self, error: BaseException) -> Ended:
        """The question that a failed pass of all rows ends: the largest of those that came last.

        If memory ran out, those that are being encoded count as well: the pass that fails need not
        be of the question that took the memory.
        """
        among = [self._questions[row] for row in self._loop.new_rows]
        if free_frames(error):
            among += self._entering
        ended = max(among or self._questions.values(), key=lambda one: one.request.prompt_tokens)
        self.leave(ended)
        return ended, error

    def leave(self, question: Question) -> None:
        """Let a question leave, wherever it stands."""
        if question in self._entering:
            self._entering.remove(question)
        if question.prefill is not None:
            with suppress(BaseException):  # it is being ended for another reason
                question.context.run(question.prefill.close)
            question.prefill = None
        for row in [row for row, mine in self._questions.items() if mine is question]:
            self._loop.drop(row)
            del self._questions[row]
        self._settle()

    def _answer(self, row: Row, question: Question) -> Generation:
        if row.error is not None:
            raise row.error
        raw = GenerateDecoderOnlyOutput(sequences=row.sequence)
        generation = question.generation(row.tokens(), row.attention(), raw=raw)
        question.report(generation)
        return generation


def answer_all(
    engine: Engine, questions: Sequence[Question], max_rows: int, max_bytes: Size | None
) -> list[Generation]:
    """Answers in the order given; what ends a question first is raised."""
    budget = Budget(engine, max_bytes)
    budget.begin()
    for question in questions:
        question.reserve(budget)
    answers: dict[Question, Generation] = {}
    waiting = deque(question for question in questions if not question.exclusive)
    batch = Batch(engine, max_rows, budget)
    try:
        while batch or waiting:
            while waiting and batch.admit(waiting[0]):
                waiting.popleft()
            for question, result in batch.step():
                if isinstance(result, BaseException):
                    raise result
                answers[question] = result
    finally:
        batch.close()
    return [answers[one] if one in answers else one.answer() for one in questions]
