"""Questions in words, answered together."""

from __future__ import annotations

import contextvars
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from rag_windows.batching.loop import BatchLoop
from rag_windows.batching.rows import Asked, Row, served
from rag_windows.engine import Engine
from rag_windows.errors import GenerationError
from rag_windows.prefill import EncodedContext, Prefill
from rag_windows.prompt.detokenize import Pieces
from rag_windows.request import BatchRequest, Request
from rag_windows.results import Generation, Timings
from rag_windows.sampling import FirstToken, whole_number

OnText = Callable[[str], None]
"""Told each piece of the text as it settles."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One question.

    Attributes:
        alone: whether it is answered by itself, as `WindowedLM.generate` does it.
        context: variables of the one who asks, in which callbacks run.
        cancelled: ends it early when set.
        pieces: tells ``on_text`` its text as it comes; None if nobody wants it so.
        prefill: gives what it reads; None before and afterwards.
        due: when a prefill that waits for others may go on; else 0.
        encoded_at: when its windows were there, ``time.perf_counter()``.
        counts: of tokens and windows that were computed for it or found.
    """

    engine: Engine
    request: Request
    alone: bool
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    cancelled: threading.Event = field(default_factory=threading.Event)
    pieces: Pieces | None = None
    on_text: OnText | None = None
    first: FirstToken = field(default_factory=FirstToken)
    prefill: Prefill[EncodedContext] | None = None
    due: float = 0.0
    encoded_at: float = 0.0
    counts: dict[str, Any] = field(default_factory=dict)

    def tell_rest(self, generation: Generation) -> None:
        """Tell what of the whole text was not told yet."""
        if self.on_text is None:
            return
        sent = "" if self.pieces is None else self.pieces.sent
        if not generation.text.startswith(sent):
            raise GenerationError(
                "The tokenizer rewrote text that was already streamed; leave on_text out with this "
                "tokenizer."
            )
        if rest := generation.text[len(sent) :]:
            self.on_text(rest)


def checked(engine: Engine, asked: BatchRequest, on_text: OnText | None = None) -> Ticket:
    """Check and tokenize a question, as `WindowedLM.generate` does."""
    reader, request = engine.ask(asked)
    method = request.method
    alone = (
        reader is not engine
        or request.fallback is not None
        or method.combination is not None
        or method.selection is not None
        or not served(engine.decoder, request.options)
    )
    ticket = Ticket(reader, request, alone, on_text=on_text)
    if on_text is not None and engine.decoder.by_token(request.options):
        tell, inside = on_text, ticket.context.run
        ticket.pieces = Pieces(
            engine.text.detokenizer, request.stop, lambda text: inside(tell, text)
        )
    return ticket


Ended = tuple[Ticket, Generation | BaseException | None]
"""A question that left the batch, and its answer or what ended it; None if it has to be answered
alone after all, and then nothing was told to anybody."""

_NAP_S = 0.01
"""The longest rest while every question waits for others; who comes meanwhile waits so long."""


class Batch:
    """The rows of one model's batch, as questions and answers. Not for several threads at once.

    Questions are encoded in turn, a forward pass of one between two tokens of the others. At most
    ``max_rows`` are encoded or answered at a time, beside those that wait for others that encode
    the same.
    """

    def __init__(self, engine: Engine, max_rows: int) -> None:
        self._engine = engine
        self._max_rows = max_rows
        self._loop = BatchLoop(engine.encoder, engine.decoder)
        self._entering: list[Ticket] = []
        self._tickets: dict[Row, Ticket] = {}

    def __len__(self) -> int:
        return len(self._entering) + len(self._tickets)

    @property
    def tickets(self) -> list[Ticket]:
        """Those that are in the batch."""
        return [*self._entering, *self._tickets.values()]

    @property
    def full(self) -> bool:
        """Whether others have to wait."""
        busy = sum(not ticket.due for ticket in self._entering)
        return busy + len(self._tickets) >= self._max_rows

    def admit(self, ticket: Ticket) -> None:
        """Let a question in; `step` encodes what it reads."""
        ticket.prefill = self._engine.prefill(ticket.request, self._loop.encoder)
        self._entering.append(ticket)

    def step(self) -> list[Ended]:
        """A forward pass for a question that enters, and a token for each of the others.

        What fails ends one question; a pass of many that fails is tried again with the others.
        """
        ended: list[Ended] = []
        for ticket in [one for one in self._entering if one.cancelled.is_set()]:
            ended.append((ticket, self._engine.unbegun(ticket.request)))
            self._leave(ticket)
        worked = False
        for ticket in [*self._entering]:
            if ticket.due and (self.full or ticket.due > time.monotonic()):
                continue
            try:
                if worked := self._encode(ticket, ended):
                    break
            except BaseException as error:  # noqa: BLE001 - handed to the one who waits for it
                self._leave(ticket)
                ended.append((ticket, error))
                break
        if self._tickets:
            ended += self._decode()
        elif not (worked or ended) and self._entering:
            until = min(ticket.due for ticket in self._entering) - time.monotonic()
            time.sleep(min(_NAP_S, max(0.0, until)))
        return ended

    def close(self) -> None:
        """Stop what is being encoded."""
        for ticket in [*self._entering]:
            self._leave(ticket)

    def _encode(self, ticket: Ticket, ended: list[Ended]) -> bool:
        """Go on with a prefill; whether that was a forward pass, after which it is others' turn.

        One that a batch can't answer after all is added to ``ended``.
        """
        try:
            pause = ticket.context.run(next, ticket.prefill)  # type: ignore[arg-type]  # it entered
        except StopIteration as made:
            self._entering.remove(ticket)
            ticket.prefill = None
            if not self._join(ticket, made.value):
                ended.append((ticket, None))
            return False
        ticket.due = time.monotonic() + pause if pause else 0.0
        if pause:
            return False
        self._entering.remove(ticket)
        self._entering.append(ticket)
        return True

    def _join(self, ticket: Ticket, context: EncodedContext) -> bool:
        """Let a question join that is encoded; False if a batch can't answer it."""
        request = ticket.request
        ticket.encoded_at = time.perf_counter()
        ticket.counts = {
            "cached_tokens": context.cached_tokens,
            "windows": len(context.singles),
            "cached_windows": context.cached_windows,
        }
        prompt = len(context.prefix_ids) + len(request.parts.query_ids)
        row = self._loop.admit(
            Asked(
                context=context,
                query_ids=request.parts.query_ids,
                options={**request.options, "max_new_tokens": request.max_new_tokens},
                criteria=self._engine.criteria(request, ticket.first, ticket.cancelled, prompt),
                seed=request.seed,
                cited=request.citations,
                streamer=ticket.pieces,
            )
        )
        if row is not None:
            self._tickets[row] = ticket
        return row is not None

    def _decode(self) -> list[Ended]:
        """A token for each row; returns those that ended."""
        try:
            rows = self._loop.step()
        except BaseException as error:  # noqa: BLE001 - handed to the one who waits for it
            return [self._failed(error)]
        ended: list[Ended] = []
        for row in rows:
            ticket = self._tickets.pop(row)
            try:
                ended.append((ticket, self._ended(row, ticket)))
            except BaseException as error:  # noqa: BLE001 - a caller's code; only its own row ends
                ended.append((ticket, error))
        return ended

    def _failed(self, error: BaseException) -> Ended:
        """The question that a pass of all rows ends: the largest of those that came last.

        Where memory ends, those that are being encoded count as well: whoever asks for more next
        runs into it, which need not be who took it.
        """
        among = [self._tickets[row] for row in self._loop.new_rows]
        if _out_of_memory(error):
            # What a failed pass has made is held by its frames.
            traceback.clear_frames(error.__traceback__)
            among += self._entering
        ended = max(among or self._tickets.values(), key=_tokens)
        self._leave(ended)
        return ended, error

    def _leave(self, ticket: Ticket) -> None:
        if ticket in self._entering:
            self._entering.remove(ticket)
        if ticket.prefill is not None:
            with suppress(BaseException):  # it is being ended for another reason
                ticket.context.run(ticket.prefill.close)
            ticket.prefill = None
        for row in [row for row, mine in self._tickets.items() if mine is ticket]:
            self._loop.drop(row)
            del self._tickets[row]

    def _ended(self, row: Row, ticket: Ticket) -> Generation:
        if row.error is not None:
            raise row.error
        request = ticket.request
        generation = self._engine.generation(
            request,
            row.tokens(),
            row.attention(),
            timings=Timings.of(request.started, ticket.encoded_at, ticket.first.seen_at),
            stopped_early=ticket.cancelled.is_set(),
            raw=GenerateDecoderOnlyOutput(sequences=row.sequence),
            **ticket.counts,
        )
        ticket.context.run(ticket.tell_rest, generation)
        return generation


def answer_alone(ticket: Ticket) -> Generation:
    """Answer one question as `WindowedLM.generate` does."""
    generation = ticket.engine.answer(ticket.request, ticket.pieces, ticket.cancelled)
    ticket.tell_rest(generation)
    return generation


def answer_all(engine: Engine, tickets: Sequence[Ticket], max_rows: int) -> list[Generation]:
    """Answers in the order given; what ends a question first is raised."""
    check_rows(max_rows)
    answers: dict[Ticket, Generation] = {}
    alone = [ticket for ticket in tickets if ticket.alone]
    waiting = deque(ticket for ticket in tickets if not ticket.alone)
    batch = Batch(engine, max_rows)
    try:
        while batch or waiting:
            while waiting and not batch.full:
                batch.admit(waiting.popleft())
            for ticket, ended in batch.step():
                if isinstance(ended, BaseException):
                    raise ended
                if ended is None:
                    alone.append(ticket)
                else:
                    answers[ticket] = ended
    finally:
        batch.close()
    for ticket in alone:
        answers[ticket] = answer_alone(ticket)
    return [answers[ticket] for ticket in tickets]


def check_rows(max_rows: int) -> None:
    """Refuse a batch without rows."""
    whole_number("max_rows", max_rows)


def _tokens(ticket: Ticket) -> int:
    """Of its prompt: what it reads, and so roughly what memory it takes."""
    parts = ticket.request.parts
    return sum(map(len, (parts.prefix_ids, parts.query_ids, *(one.ids for one in parts.windows))))


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
