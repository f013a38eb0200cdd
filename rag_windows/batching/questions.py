"""Questions in words, answered together."""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from rag_windows.attention.layers import table_limit
from rag_windows.batching.budget import Budget, Need, need_of
from rag_windows.batching.loop import BatchLoop
from rag_windows.batching.row import Row, served
from rag_windows.cache.passage_cache import Size
from rag_windows.engine import Engine, rest_of
from rag_windows.errors import without_stop_iteration
from rag_windows.loading import autocast_here
from rag_windows.prefill import EncodedContext, Prefill
from rag_windows.prompt.detokenize import Pieces
from rag_windows.request import BatchRequest, Request
from rag_windows.results import Chunk, Generation, Timings
from rag_windows.sampling import BATCHING, FirstToken
from rag_windows.threads import Worker
from rag_windows.windows import Wanted, WindowStore

OnText = Callable[[str], None]
"""Called with each piece of the text once it is final."""

_log = logging.getLogger(__name__)


class Question(Future[Generation]):
    """A question being answered: a future of its answer.

    Attributes:
        exclusive: whether it is answered by itself, as `WindowedLM.generate` does it.
        need: of memory, in tokens.
        bytes: the same in bytes, as the only question.
        number: its place among those that were asked.
        context: variables of the one who asks, in which callbacks run.
        pieces: passes its text to ``on_text`` as it comes; None if nobody wants that.
        prefill: gives what it reads; None before and afterwards.
        due: when a prefill that waits for others may go on; else 0.
        counts: of tokens and windows that were computed for it or found.
    """

    def __init__(
        self,
        engine: Engine,
        request: Request,
        *,
        exclusive: bool,
        on_text: OnText | None = None,
        on_reasoning: OnText | None = None,
    ) -> None:
        super().__init__()
        # Rows of a batch are computed alike, so a question under autocast is answered by itself.
        self.autocast = autocast_here()
        self.engine, self.request = engine, request
        self.exclusive = exclusive or bool(self.autocast)
        self.context = contextvars.copy_context()
        option = engine.decoder.option
        self._sequences = max(option(request.options, name) or 1 for name in BATCHING)
        self.need: Need = need_of(request, self._sequences)
        self.bytes = self.number = 0
        self.stopped = threading.Event()
        self.first = FirstToken()
        self.prefill: Prefill[EncodedContext] | None = None
        self.due = self.encoded_at = 0.0
        self.counts: dict[str, Any] = {}
        self.pieces: Pieces | None = None
        self._on_text = on_text or _ignored
        self._on_reasoning = on_reasoning or _ignored
        asked = on_text is not None or on_reasoning is not None
        if asked and engine.decoder.by_token(request.options):
            inside = self.context.run
            self.pieces = engine.pieces(
                request,
                lambda text: inside(self._on_text, text),
                lambda text: inside(self._on_reasoning, text),
            )

    def cancel(self) -> bool:
        """Stop: at once if it has not begun, else after this forward pass, encoded or not.

        Returns:
            Whether it had not begun. Otherwise the result is what was written so far, its
            ``finish_reason`` "cancelled".
        """
        self.stopped.set()
        return super().cancel()

    def end(self, result: Generation | BaseException) -> None:
        """Give those who wait the answer, or what ended it."""
        try:
            if isinstance(result, BaseException):
                self.set_exception(without_stop_iteration(result))
            else:
                self.set_result(result)
        except BaseException:  # noqa: BLE001 - of a callback; the future itself is done
            _log.exception("A callback of a question's future failed.")

    def tell_rest(self, generation: Generation) -> None:
        """Report what of the whole text was not reported yet."""
        reasoning, text = rest_of(generation, self.pieces)
        if reasoning:
            self._on_reasoning(reasoning)
        if text:
            self._on_text(text)

    @cached_property
    def reads(self) -> list[Wanted]:
        """Prefix and windows."""
        return self.engine.encoder.reads(self.request.plan) if self.need.windows else []

    def reserve(self, budget: Budget) -> None:
        """Compute how many bytes it needs as the only question.

        Raises:
            LimitError: that is more than there are.
        """
        tokens = sum(self.need.windows)
        if not budget.could_fit(self._size(budget, tokens)):
            tokens = _sum_tokens(budget.missing(self.engine.cache, self.reads))
        self.bytes = self._size(budget, tokens)
        if not budget.could_fit(self.bytes):
            raise budget.refusal(self.need, tokens, self.bytes)

    def _size(self, budget: Budget, windows: int) -> int:
        if not self.exclusive:
            return budget.sizes.batch([self.need], windows, (0, 0))
        sizes = [budget.sizes.exclusive(self.need, windows)]
        if isinstance(ordinary := self.request.ordinary, Request):
            other = need_of(ordinary, self._sequences)
            sizes.append(budget.sizes.exclusive(other, sum(other.windows)))
        return max(sizes)

    def exclusive_answer(self) -> Generation:
        """The answer as `WindowedLM.generate` makes it, reported to its end."""
        generation = self.answered()
        self.tell_rest(generation)
        return generation

    def answered(self) -> Generation:
        """The same, of which the rest (see `tell_rest`) is not reported."""
        with ExitStack() as scope:
            for mode in self.autocast:
                scope.enter_context(mode)
            return self.engine.answer(self.request, self.pieces, self.stopped)


def stream(engine: Engine, request: Request) -> Iterator[Chunk]:
    """Answer a question in a thread of its own and yield the text as it becomes final.

    Closing the iterator stops the work and waits for it; an exception in it is raised here.
    """
    results: queue.SimpleQueue[Chunk | Generation | BaseException] = queue.SimpleQueue()
    question = Question(
        engine,
        request,
        exclusive=True,
        on_text=lambda text: results.put(Chunk(text)),
        on_reasoning=lambda text: results.put(Chunk("", reasoning=text)),
    )

    def run() -> None:
        try:
            results.put(question.context.copy().run(question.answered))
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, whatever it is
            results.put(without_stop_iteration(error))

    worker = Worker(run, "rag-windows-stream", question.stopped.set)

    def chunks() -> Iterator[Chunk]:
        worker.start()
        try:
            while not isinstance(piece := results.get(), Generation):
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
            reasoning, text = rest_of(piece, question.pieces)
            yield Chunk(text, piece, reasoning)
        finally:
            question.stopped.set()
            worker.join()

    return chunks()


def _ignored(_: str) -> None:
    pass


def checked(
    engine: Engine,
    asked: BatchRequest,
    on_text: OnText | None = None,
    on_reasoning: OnText | None = None,
) -> Question:
    """Check and tokenize a question, as `WindowedLM.generate` does."""
    reader, request = engine.ask(asked)
    method, parts = request.method, request.parts
    limit = table_limit(engine.model.config.get_text_config(decoder=True))
    last = len(parts.prefix_ids) + len(parts.query_ids) + request.max_new_tokens
    separate = (
        reader is not engine
        or request.guard is not None
        # Its answer is read again for each passage, for which the others should not wait.
        or request.removals is not None
        or method.combination is not None
        or not served(engine.decoder, request.options)
        # The rotary tables of the plain model grow with such a prompt, those of a batch don't.
        or (not parts.windows and limit is not None and last > limit)
    )
    return Question(reader, request, exclusive=separate, on_text=on_text, on_reasoning=on_reasoning)


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
        question.prefill = engine.prefill_for_query(question.request, encoder)
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
        return self._budget.sizes.batch(needs, _sum_tokens(missing), self._loop.capacity)

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
            ended.append((question, self._engine.unbegun(question.request)))
            self.leave(question)
        worked = False
        for question in [*self._entering]:
            if question.due and (self.full or question.due > time.monotonic()):
                continue
            try:
                if worked := self._encode(question):
                    break
            except BaseException as error:  # noqa: BLE001 - handed to the one who waits for it
                let_go(error)
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
        request, query_ids = question.request, question.request.parts.query_ids
        question.encoded_at = time.perf_counter()
        question.counts = {
            "cached_tokens": context.cached_tokens,
            "windows": context.encoded_windows + context.cached_windows,
            "cached_windows": context.cached_windows,
            "chosen": context.chosen,
        }
        prompt = len(context.prefix_ids) + len(query_ids)
        row = Row(
            self._engine.decoder,
            context,
            query_ids,
            {**request.options, "max_new_tokens": request.max_new_tokens},
            criteria=self._engine.criteria(request, question.first, question.stopped, prompt),
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
        if let_go(error):
            among += self._entering
        ended = max(among or self._questions.values(), key=_tokens)
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
        request = question.request
        generation = self._engine.generation(
            request,
            row.tokens(),
            row.attention(),
            timings=Timings.of(request.started, question.encoded_at, question.first.seen_at),
            stopped_early=question.stopped.is_set(),
            raw=GenerateDecoderOnlyOutput(sequences=row.sequence),
            **question.counts,
        )
        question.context.run(question.tell_rest, generation)
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
    return [answers[one] if one in answers else one.exclusive_answer() for one in questions]


def _sum_tokens(reads: Sequence[Wanted]) -> int:
    return sum(len(one.planned.ids) for one in reads)


def _tokens(question: Question) -> int:
    """Of its prompt: what it reads, and so roughly what memory it takes."""
    parts = question.request.parts
    return sum(map(len, (parts.prefix_ids, parts.query_ids, *(one.ids for one in parts.windows))))


def let_go(error: BaseException) -> bool:
    """Free what the frames of a pass that ran out of memory hold; whether it ran out."""
    if not _out_of_memory(error):
        return False
    one: BaseException | None = error
    seen: set[int] = set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__
    return True


def _out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch, on an accelerator or a CPU, or Python got no more memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "bad_alloc",
    "could not create a primitive",
)
