"""A checked question on its way through a batch."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rag_windows.batch.choosing import served
from rag_windows.batch.request import BatchRequest
from rag_windows.codebook.opening import opened
from rag_windows.decoding import BATCHING
from rag_windows.errors import GenerationError
from rag_windows.generation import Generation
from rag_windows.request import Request
from rag_windows.stopping import FirstToken
from rag_windows.streaming import Pieces

if TYPE_CHECKING:
    from rag_windows.text_level import TextLM

OnText = Callable[[str], None]
"""Told each piece of the text as it settles."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One question.

    Attributes:
        lm: whose encoder and cache it uses.
        request: checked and tokenized.
        alone: whether it is answered by itself, as `WindowedLM.generate` does it.
        context: variables of the one who asks, in which callbacks run.
        cancelled: ends it early when set.
        pieces: tells its text as it comes; None if nobody wants it so.
        on_text: told the pieces.
        first: when its first token came.
        encoded_at: when its windows were there, ``time.perf_counter()``.
        cached_tokens: of its prompt, those that were not computed for it.
        windows: that it reads.
        cached_windows: those of them that were not computed for it.
    """

    lm: TextLM
    request: Request
    alone: bool
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    cancelled: threading.Event = field(default_factory=threading.Event)
    pieces: Pieces | None = None
    on_text: OnText | None = None
    first: FirstToken = field(default_factory=FirstToken)
    encoded_at: float = 0.0
    cached_tokens: int = 0
    windows: int = 0
    cached_windows: int = 0

    def tell_rest(self, generation: Generation) -> None:
        """Tell what of the whole text was not told yet.

        Raises:
            GenerationError: what was told is not how the text begins.
        """
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


def checked(lm: TextLM, asked: BatchRequest, on_text: OnText | None = None) -> Ticket:
    """Check and tokenize a question, as `WindowedLM.generate` does.

    Raises:
        InputError, PromptError, LimitError: saying what to do.
    """
    started = time.perf_counter()
    reading = opened(lm, asked.query, asked.passages, asked.prefix, asked.method)
    request = reading.lm._request(
        asked.query,
        reading.passages,
        prefix=reading.prefix,
        method=reading.method,
        started=started,
        max_new_tokens=asked.max_new_tokens,
        stop=asked.stop,
        citations=asked.citations,
        seed=asked.seed,
        on_encoded=asked.on_encoded,
        link_tokens=asked.link_tokens,
        link_choose=asked.link_choose,
        fallback=asked.fallback,
        options=asked.options,
    )
    method = request.method
    alone = (
        reading.lm is not lm
        or request.fallback is not None
        or method.combination is not None
        or method.selection is not None
        or not served(lm._decoder, request.options)
    )
    ticket = Ticket(reading.lm, request, alone, on_text=on_text)
    by_token = all(lm._decoder.option(request.options, name) in (None, 1) for name in BATCHING)
    if on_text is not None and by_token:
        tell, inside = on_text, ticket.context.run
        ticket.pieces = Pieces(
            lm._text().detokenizer, request.stop, lambda text: inside(tell, text)
        )
    return ticket
