"""One question, from its arguments to its answer."""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from transformers import StoppingCriteria

from rag_windows.attention.layers import table_limit
from rag_windows.batching.budget import Budget, Need, need_of
from rag_windows.batching.row import served
from rag_windows.citations import TokenWeights, cited, is_supported, shares_of, statements
from rag_windows.engine import Engine
from rag_windows.errors import GenerationError, without_stop_iteration
from rag_windows.loading import autocast_here
from rag_windows.prefill import EncodedContext, Prefill, PrefillCancelledError, complete
from rag_windows.prompt.detokenize import Pieces, cut
from rag_windows.request import BatchRequest, Removals, Request
from rag_windows.results import Chunk, FinishReason, Generation, Statement, Timings, Usage
from rag_windows.sampling import BATCHING, Cancelled, FirstToken, StopStrings
from rag_windows.steps.removal import Removal
from rag_windows.threads import Worker
from rag_windows.windows import Wanted

OnChunk = Callable[[Chunk | None], None]
"""Called with each piece of an answer once it is final, the last of which holds the whole answer,
and with None when the question has ended, whatever ended it."""

_log = logging.getLogger(__name__)


class Question(Future[Generation]):
    """A question being answered: a future of its answer.

    Args:
        engine: that is asked; a book that stands in the place of passages brings its own.
        asked: the arguments of `WindowedLM.generate`.
        on_chunk: called from the thread that answers, in the context of the one who asks.

    Raises:
        InputError, PromptError, LimitError: the arguments can't be used; nothing was computed.

    Attributes:
        request: the question, checked.
        engine: what answers it.
        context: variables of the one who asks, in which callbacks run.
        stopped: set when nobody wants more of the answer.
        first: when the first token was there.
        pieces: passes its text on as it comes; None if nobody wants that.
        bytes: of memory that it needs as the only question.
        number: its place among those that were asked.
        prefill: of a batch: gives what it reads; None before and afterwards.
        due: of a batch: when a prefill that waits for others may go on; else 0.
    """

    def __init__(
        self,
        engine: Engine,
        asked: BatchRequest | Mapping[str, Any],
        on_chunk: OnChunk | None = None,
    ) -> None:
        super().__init__()
        self.request = request = Request.of(engine, asked)
        self.engine = request.engine
        self._asked_of = engine
        self.context = contextvars.copy_context()
        self._autocast = autocast_here()
        self.bytes = self.number = 0
        self.stopped = threading.Event()
        self.first = FirstToken()
        self.prefill: Prefill[EncodedContext] | None = None
        self.due = 0.0
        self.pieces: Pieces | None = None
        self._encoded_at: float | None = None
        self._usage = Usage(0, 0, 0)
        self._chosen: tuple[int, ...] | None = None
        self._put: Callable[[Chunk], None] | None = None
        if on_chunk is None:
            return

        def put(chunk: Chunk) -> None:
            self.context.run(on_chunk, chunk)

        self._put = put
        self.add_done_callback(lambda _: on_chunk(None))
        if engine.decoder.by_token(request.options):
            form = request.reasoning
            self.pieces = Pieces(
                request.detokenizer,
                request.stop,
                lambda text: put(Chunk(text)),
                None if form is None else form.parts(),
                lambda text: put(Chunk("", reasoning=text)),
            )

    @cached_property
    def exclusive(self) -> bool:
        """Whether it is of a kind that no row of a batch can answer, but only `answer`."""
        request, decoder, parts = self.request, self.engine.decoder, self.request.parts
        limit = table_limit(decoder.model.config.get_text_config(decoder=True))
        last = len(parts.prefix_ids) + len(parts.query_ids) + request.max_new_tokens
        return (
            # A book brings windows of its own.
            self.engine is not self._asked_of
            # Rows of a batch share an attention.
            or self.engine.in_rows
            # Its answer is read again for each passage, for which the others should not wait.
            or request.removals is not None
            or request.method.combination is not None
            or not served(decoder, request.options)
            # Rows of a batch are computed alike.
            or bool(self._autocast)
            # The rotary tables of the plain model grow with such a prompt, those of a batch don't.
            or (not parts.windows and limit is not None and last > limit)
        )

    @cached_property
    def need(self) -> Need:
        """Of memory, in tokens."""
        option = self.engine.decoder.option
        sequences = max(option(self.request.options, name) or 1 for name in BATCHING)
        return need_of(self.request, sequences)

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
            tokens = sum_tokens(budget.missing(self.engine.cache, self.reads))
        self.bytes = self._size(budget, tokens)
        if not budget.could_fit(self.bytes):
            raise budget.refusal(self.need, tokens, self.bytes)

    def _size(self, budget: Budget, windows: int) -> int:
        if not self.exclusive:
            return budget.sizes.batch([self.need], windows, (0, 0))
        return budget.sizes.exclusive(self.need, windows)

    def answer(self) -> Generation:
        """Encode and generate by itself, in this thread, and report the answer to its end."""
        try:
            context = complete(self.request.prefill_for_query(), self.stopped)
        except PrefillCancelledError:
            generation = self.generation()
        else:
            generation = self._generate(context)
        self.report(generation)
        return generation

    def outcome(self) -> Generation | BaseException:
        """`answer` for another thread than the one that asks: the answer, or what ended it."""
        try:
            with ExitStack() as scope:
                for mode in self._autocast:
                    scope.enter_context(mode)
                # A copy: callbacks run in the context itself, which can't be entered twice.
                return self.context.copy().run(self.answer)
        except BaseException as error:  # noqa: BLE001 - handed to the one who waits for it
            free_frames(error)
            return error

    def _generate(self, context: EncodedContext) -> Generation:
        """Let transformers' own loop generate behind what was read."""
        request = self.request
        self.encoded(context)
        decoded = self.engine.decoder.generate(
            context,
            request.parts.query_ids,
            options=request.options,
            seed=request.seed,
            record_weights=request.citations,
            streamer=self.pieces,
            stopping=self.criteria,
        )
        answers = []
        for index, ids in enumerate(decoded.sequences):
            weights = decoded.token_weights(index) if request.citations else None
            answers.append(self.generation(ids, weights, raw=decoded.raw, context=context))
        return replace(answers[0], alternatives=tuple(answers[1:]))

    def _removal(
        self,
        asked: Removals,
        context: EncodedContext,
        ids: Sequence[int],
        weights: TokenWeights | None,
    ) -> Removal | None:
        """What an answer loses without each passage; None without an answer.

        What is cancelled ends between two passes, without.
        """
        if not ids:
            return None

        def check() -> None:
            if self.stopped.is_set():
                raise PrefillCancelledError("The question was cancelled.")

        groups = list(dict.fromkeys(context.groups))
        if asked.top is not None and weights is not None:
            masses = shares_of(weights)
            groups = sorted(groups, key=lambda group: -masses[group])[: asked.top]
        query_ids = self.request.parts.query_ids
        try:
            return self.engine.decoder.removal(context, query_ids, ids, groups, check)
        except PrefillCancelledError:
            return None

    def encoded(self, context: EncodedContext) -> None:
        """Note when what it reads was there, and what of that was cached."""
        windows = context.encoded_windows + context.cached_windows
        self._encoded_at = time.perf_counter()
        self._usage = Usage(0, context.cached_tokens, 0, windows, context.cached_windows)
        self._chosen = context.chosen

    def criteria(self, prompt_length: int) -> list[StoppingCriteria]:
        """Our stopping criteria, beside those in its options."""
        request, form = self.request, self.request.reasoning
        criteria: list[StoppingCriteria] = [self.first, Cancelled(self.stopped)]
        if request.stop:
            parts = None if form is None else form.parts()
            criteria.append(StopStrings(request.detokenizer, request.stop, prompt_length, parts))
        return criteria

    def generation(
        self,
        ids: Sequence[int] = (),
        weights: TokenWeights | None = None,
        *,
        raw: Any = None,
        context: EncodedContext | None = None,
    ) -> Generation:
        """Put the result together.

        Args:
            ids: the generated tokens; none where it was cancelled before the first.
            weights: of each token, attention of the citation groups, the prefix and the query, in
                this order; None where it was not recorded.
            raw: what transformers returned.
            context: what was read, for `Removal`, if that was asked for.
        """
        stopped_early = self.stopped.is_set()
        request, parts, form = self.request, self.request.parts, self.request.reasoning
        removal = None
        if request.removals is not None and context is not None and context.windows is not None:
            removal = self._removal(request.removals, context, ids, weights)
        now = time.perf_counter()
        timings = Timings.of(request.started, self._encoded_at or now, self.first.seen_at)
        windows = parts.windows if request.method.windowed else ()
        if windows and self._chosen is not None:
            windows = tuple(windows[i] for i in self._chosen)
        citations = prefix_mass = query_mass = None
        if request.citations:
            citations, prefix_mass, query_mass = cited(request.passages, weights, removal)
        written, reasoning, text = request.divided(ids)
        answer = cut(text, request.stop)
        return Generation(
            text=answer,
            token_ids=tuple(ids),
            finish_reason=self._finish_reason(ids, written, text, stopped_early),
            usage=replace(
                self._usage,
                prompt_tokens=request.prompt_tokens,
                completion_tokens=len(ids),
                reasoning_tokens=0 if form is None else form.tokens(ids),
            ),
            timings=timings,
            citations=citations,
            prefix_mass=prefix_mass,
            query_mass=query_mass,
            notes=parts.notes,
            windows=windows,
            fallback=request.fallback,
            logprobs=None if request.logprobs is None else request.logprobs.tokens(ids),
            raw=raw,
            reasoning=reasoning,
            supported=None if removal is None else is_supported(float(removal.gain.sum())),
            statements=self._statements(ids, written, text, answer, weights, removal),
        )

    def _statements(
        self,
        ids: Sequence[int],
        written: str,
        text: str,
        answer: str,
        weights: TokenWeights | None,
        removal: Removal | None,
    ) -> tuple[Statement, ...]:
        """The sentences of an answer, and the passages that carried each of them."""
        request = self.request
        if weights is None or not request.citations:
            return ()
        # What is for the user stands behind the reasoning.
        start = max(0, written.rfind(text))
        spans = [(a - start, b - start) for a, b in request.detokenizer.spans(ids, written)]
        return statements(answer, spans, request.passages, weights, removal)

    def _finish_reason(
        self, ids: Sequence[int], written: str, text: str, stopped_early: bool
    ) -> FinishReason:
        """``written`` is that of all ``ids``, ``text`` what of it is for the user."""
        request = self.request
        if ids and ids[-1] in self.engine.decoder.end_tokens(request.options):
            return "stop"
        strings = request.options.get("stop_strings") or ()
        strings = (strings,) if isinstance(strings, str) else tuple(strings)
        if any(string in text for string in request.stop):
            return "stop"
        if any(string in written for string in strings):
            return "stop"
        if stopped_early:
            return "cancelled"
        timed = request.options.get("max_time") is not None
        return "length" if timed or len(ids) >= request.max_new_tokens else "stop"

    def report(self, generation: Generation) -> None:
        """Report what of the answer's text was not reported yet, and the answer.

        Raises:
            GenerationError: the whole answer differs from what was reported.
        """
        if self._put is None:
            return
        reasoning = "" if self.pieces is None else self.pieces.sent_reasoning
        text = "" if self.pieces is None else self.pieces.sent
        if not (generation.text.startswith(text) and generation.reasoning.startswith(reasoning)):
            raise GenerationError(
                "The tokenizer changed text that was already streamed. Use generate(), or leave "
                "on_chunk out, with this tokenizer."
            )
        rest = generation.reasoning[len(reasoning) :]
        self._put(Chunk(generation.text[len(text) :], generation, rest))

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


def received(question: Question, get: Callable[[], Chunk | None]) -> Iterator[Chunk]:
    """The chunks of an answer, as whatever stores what ``on_chunk`` is given gives them back.

    An error that ended the question is raised here. Closing the iterator stops the question.
    """
    try:
        while (chunk := get()) is not None:
            yield chunk
        question.result()
    finally:
        question.cancel()


def stream(engine: Engine, asked: BatchRequest) -> Iterator[Chunk]:
    """Answer a question in a thread of its own and yield the text as it becomes final.

    Closing the iterator stops the work and waits for it; an exception in it is raised here.
    """
    chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
    question = Question(engine, asked, chunks.put)

    def run() -> None:
        if question.set_running_or_notify_cancel():
            question.end(question.outcome())

    worker = Worker(run, "rag-windows-stream", question.cancel)

    def answered() -> Iterator[Chunk]:
        worker.start()
        try:
            yield from received(question, chunks.get)
        finally:
            question.cancel()
            worker.join()

    return answered()


def sum_tokens(reads: Sequence[Wanted]) -> int:
    """Of prefixes and windows together."""
    return sum(len(one.planned.ids) for one in reads)


def free_frames(error: BaseException) -> bool:
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
