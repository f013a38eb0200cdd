"""Questions in words, answered together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from transformers.generation import GenerateDecoderOnlyOutput

from rag_windows.answer import Answered, answer, criteria_of, encoded_by, generation_of
from rag_windows.batch.loop import BatchLoop
from rag_windows.batch.row import Asked, Row
from rag_windows.batch.ticket import Ticket
from rag_windows.context_parts import encode_parts
from rag_windows.generation import Generation, Timings
from rag_windows.refused_options import whole_number

if TYPE_CHECKING:
    from rag_windows.text_level import TextLM

Ended = tuple[Ticket, Generation | BaseException]
"""A question that left the batch, and its answer or what ended it."""


class Batch:
    """The rows of one model's batch, as questions and answers. Not for several threads at once.

    Args:
        lm: the model.
    """

    def __init__(self, lm: TextLM) -> None:
        self._lm = lm
        self._loop = BatchLoop(lm._encoder, lm._decoder)
        self._tickets: dict[Row, Ticket] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def tickets(self) -> list[Ticket]:
        """Those that are in the batch."""
        return list(self._tickets.values())

    def admit(self, ticket: Ticket) -> bool:
        """Encode what a question reads and let it join.

        Returns:
            False if it has to be answered alone after all; then nothing was told to anybody.

        Raises:
            RagWindowsError: what `WindowedLM.generate` would raise.
        """
        request = ticket.request
        context = ticket.context.run(encoded_by, encode_parts, self._loop.encoder, request)
        ticket.encoded_at = time.perf_counter()
        # Not the context itself: its windows may stand elsewhere soon, and once is enough.
        ticket.cached_tokens = context.cached_tokens
        ticket.windows = len(context.windows)
        ticket.cached_windows = context.found
        prompt = len(context.prefix_ids) + len(request.parts.query_ids)
        asked = Asked(
            context=context,
            query_ids=request.parts.query_ids,
            options={**request.options, "max_new_tokens": request.max_new_tokens},
            criteria=criteria_of(
                request, self._lm._text().detokenizer, ticket.first, ticket.cancelled, prompt
            ),
            seed=request.seed,
            record_mass=request.citations,
            streamer=ticket.pieces,
        )
        if not self._loop.fits(asked, request.max_new_tokens):
            return False
        row = self._loop.admit(asked)
        if row is None:
            return False
        self._tickets[row] = ticket
        return True

    def step(self) -> list[Ended]:
        """A token for each question; returns those that ended."""
        ended: list[Ended] = []
        for row in self._loop.step():
            ticket = self._tickets.pop(row)
            try:
                ended.append((ticket, self._ended(row, ticket)))
            except Exception as error:  # noqa: BLE001 - a caller's code; only its own row ends
                ended.append((ticket, error))
        return ended

    def _ended(self, row: Row, ticket: Ticket) -> Generation:
        if row.error is not None:
            raise row.error
        now = time.perf_counter()
        started = ticket.request.started
        generation = generation_of(
            self._lm._decoder,
            self._lm._text().detokenizer,
            ticket.request,
            Answered(
                ids=row.chooser.result(),
                masses=row.masses(),
                cached_tokens=ticket.cached_tokens,
                windows=ticket.windows,
                cached_windows=ticket.cached_windows,
                chosen=None,
                timings=Timings(
                    encode_s=ticket.encoded_at - started,
                    ttft_s=(ticket.first.seen_at or now) - started,
                    total_s=now - started,
                ),
                fallback=None,
                stopped_early=ticket.cancelled.is_set(),
                raw=GenerateDecoderOnlyOutput(sequences=row.chooser.sequence),
            ),
        )
        ticket.context.run(ticket.tell_rest, generation)
        return generation


def answer_alone(ticket: Ticket) -> Generation:
    """Answer one question as `WindowedLM.generate` does."""
    lm = ticket.lm
    generation = answer(
        lm._encoder,
        lm._decoder,
        lm._text().detokenizer,
        ticket.request,
        ticket.pieces,
        ticket.cancelled,
    )
    ticket.tell_rest(generation)
    return generation


def answer_all(lm: TextLM, tickets: Sequence[Ticket], max_rows: int) -> list[Generation]:
    """Answer questions, at most ``max_rows`` at a time.

    Returns:
        In the order given.

    Raises:
        InputError: ``max_rows`` is not at least 1.
        Exception: the first that ended a question.
    """
    check_rows(max_rows)
    answers: dict[Ticket, Generation] = {}
    alone = [ticket for ticket in tickets if ticket.alone]
    waiting = iter([ticket for ticket in tickets if not ticket.alone])
    batch = Batch(lm)
    while True:
        alone += _fill(batch, waiting, max_rows)
        if not batch:
            break
        for ticket, ended in batch.step():
            if isinstance(ended, BaseException):
                raise ended
            answers[ticket] = ended
    for ticket in alone:
        answers[ticket] = answer_alone(ticket)
    return [answers[ticket] for ticket in tickets]


def check_rows(max_rows: int) -> None:
    """Refuse a batch without rows.

    Raises:
        InputError: ``max_rows`` is no whole number from 1 on.
    """
    whole_number("max_rows", max_rows)


def _fill(batch: Batch, waiting: Iterable[Ticket], max_rows: int) -> list[Ticket]:
    """Let questions join while there is room; returns those that have to be answered alone."""
    alone = []
    while len(batch) < max_rows:
        ticket = next(iter(waiting), None)
        if ticket is None:
            break
        if not batch.admit(ticket):
            alone.append(ticket)
    return alone
