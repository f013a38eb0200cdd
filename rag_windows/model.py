"""The model that reads passages as windows: rag-windows' front door."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from transformers.generation.streamers import BaseStreamer

from rag_windows.answer import answer
from rag_windows.batch.answers import answer_all, check_rows
from rag_windows.batch.request import BatchRequest
from rag_windows.batch.scheduler import Scheduler
from rag_windows.batch.shared import shared_scheduler
from rag_windows.batch.ticket import checked
from rag_windows.calibration.language_model import CalibratingLM
from rag_windows.codebook.book import PassageBook
from rag_windows.codebook.language_model import KeepingLM
from rag_windows.codebook.opening import opened
from rag_windows.decoding import BATCHING
from rag_windows.device import autocast_here
from rag_windows.encoding import OnEncoded
from rag_windows.errors import StopIterationTold
from rag_windows.generation import Chunk, Generation
from rag_windows.guard import FallbackOption
from rag_windows.learning.language_model import LearningLM
from rag_windows.linking.plan import Choose, LinkTokens
from rag_windows.listing import passages_of
from rag_windows.request import Messages, PassageLike
from rag_windows.rescaling import Method
from rag_windows.streaming import stream
from rag_windows.warming import OnWarmed, Warmed, warm


class WindowedLM(CalibratingLM, KeepingLM, LearningLM):
    """A local causal LM that reads each passage in a window of its own.

    Make one with `from_pretrained`. It is safe to call from many threads at once, with different
    passages and methods; the wrapped model itself stays as it is for everybody else. Who edits it
    (adapters, weights, modules, attributes) edits what reads the windows: the next call sees it.

    Attributes:
        model: the plain model, untouched.
        tokenizer: or None, for token-level work only.
        method: the default method.
        header: of each window: its name, or the function that writes it.
        template_kwargs: further variables of the chat template.
        cache: the passage cache, or None.
        profile: of a calibration, or None.
    """

    @StopIterationTold()
    def generate(
        self,
        query: Messages,
        passages: Sequence[PassageLike] | PassageBook = (),
        *,
        prefix: str | None = None,
        method: str | Method | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        citations: bool = True,
        seed: int | None = None,
        on_encoded: OnEncoded | None = None,
        link_tokens: LinkTokens | None = None,
        link_choose: Choose = "first",
        fallback: FallbackOption = None,
        **generate_kwargs: Any,
    ) -> Generation:
        """Answer a question over passages.

        Without passages this is the model's own ``generate``, bit for bit.

        Args:
            query: a question, or a conversation as ``[{"role": ..., "content": ...}, ...]``, in any
                order that the chat template takes, or a `Conversation`. Where it ends with the
                assistant, the answer goes on with that message, and its text is what was added.
            passages: in any order; blank and duplicate ones are left out and told in ``notes``.
                Or a book of them, made by `codebook`, that chooses those which are read.
            prefix: system prompt, read by every window and by the query.
            method: instead of the default one.
            max_new_tokens: 128 unless given here or in a ``generation_config``.
            stop: the text ends before any of these strings.
            citations: whether to measure each passage's attention mass.
            seed: for sampling, private to this call; None uses PyTorch's global generator.
            on_encoded: called while passages are encoded, with the windows done and all of them.
            link_tokens: tokens of each window that are encoded in sight of the others: a number
                (int), a share of the window (float), or "all", which is sequential; see `Linked`.
            link_choose: which ones: "first" or those of largest "deviation".
            fallback: "sequential" or a `Guard`: where windows are likely to lose, the passages are
                read one after the other, and ``Generation.fallback`` says why.
            generate_kwargs: any option of ``transformers`` generate: do_sample, temperature,
                top_p, num_beams, logits_processor, stop_strings, ... Beside them
                ``json_schema`` (a mapping) or ``grammar`` (llguidance's Lark), to which the answer
                is held token by token (needs the extra ``structured``; see docs/frameworks.md),
                and ``logprobs=True`` with ``top_logprobs`` (0 to 20) for
                ``Generation.logprobs``.

        Raises:
            InputError, PromptError, LimitError: before any work.
            MissingExtraError: a form for the answer without the extra ``structured``.
            GenerationError: an option that can't work with windows.
        """
        started = time.perf_counter()
        reading = opened(self, query, passages, prefix, method)
        request = reading.lm._request(
            query,
            reading.passages,
            prefix=reading.prefix,
            method=reading.method,
            started=started,
            max_new_tokens=max_new_tokens,
            stop=stop,
            citations=citations,
            seed=seed,
            on_encoded=on_encoded,
            link_tokens=link_tokens,
            link_choose=link_choose,
            fallback=fallback,
            options=generate_kwargs,
        )
        return answer(reading.lm._encoder, self._decoder, self._text().detokenizer, request)

    @StopIterationTold()
    def stream(
        self,
        query: Messages,
        passages: Sequence[PassageLike] | PassageBook = (),
        *,
        prefix: str | None = None,
        method: str | Method | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        citations: bool = True,
        seed: int | None = None,
        on_encoded: OnEncoded | None = None,
        link_tokens: LinkTokens | None = None,
        link_choose: Choose = "first",
        fallback: FallbackOption = None,
        **generate_kwargs: Any,
    ) -> Iterator[Chunk]:
        """Like `generate`, piece by piece; the last chunk carries the whole `Generation`.

        The joined chunks are exactly ``generate``'s text. Closing the iterator stops the work. With
        beams, where no token is final before the end, one chunk comes. Arguments are checked at
        the call, before the first chunk is asked for.
        """
        started = time.perf_counter()
        reading = opened(self, query, passages, prefix, method)
        request = reading.lm._request(
            query,
            reading.passages,
            prefix=reading.prefix,
            method=reading.method,
            started=started,
            max_new_tokens=max_new_tokens,
            stop=stop,
            citations=citations,
            seed=seed,
            on_encoded=on_encoded,
            link_tokens=link_tokens,
            link_choose=link_choose,
            fallback=fallback,
            options=generate_kwargs,
        )
        detokenizer = self._text().detokenizer
        by_token = all(
            self._decoder.option(generate_kwargs, name) in (None, 1) for name in BATCHING
        )

        autocast = autocast_here()

        def work(streamer: BaseStreamer | None, cancelled: threading.Event) -> Generation:
            encoder = reading.lm._encoder
            with autocast():
                return answer(encoder, self._decoder, detokenizer, request, streamer, cancelled)

        return stream(work, detokenizer, request.stop, by_token)

    @StopIterationTold()
    def generate_batch(
        self, requests: Sequence[Mapping[str, Any] | BatchRequest], *, max_rows: int = 32
    ) -> list[Generation]:
        """Answer many questions together, with the answers that `generate` gives one by one.

        Each forward pass gives every question its next token, so the weights are read once for all
        of them, and windows that several questions read are encoded, held and read once (they count
        as cached tokens then). A question that
        ends makes room for the next. Questions whose options need a loop of their own (beams,
        several sequences, assistants, scores or hidden states, stop_strings), ensembles, books and
        guarded ones are answered one by one, as `generate` does it.

        Greedy answers are those of `generate`, and sampled ones with a ``seed`` too, up to the
        rounding of floating point: in bfloat16 two tokens of nearly the same logit may change
        places. Without a seed, rows draw from PyTorch's global generator in turn.

        Args:
            requests: the keyword arguments of `generate` each, as a dict or a `BatchRequest`.
            max_rows: so many are answered at a time; each takes memory for what it alone reads.

        Returns:
            One answer a request, in their order. ``raw`` holds the sequence alone.

        Raises:
            InputError, PromptError, LimitError: in any of them, before any work.
            GenerationError: as in `generate`; then no answer is returned.
        """
        check_rows(max_rows)
        tickets = [checked(self, BatchRequest.of(request)) for request in requests]
        return answer_all(self, tickets, max_rows)

    def scheduler(self, *, max_rows: int = 32) -> Scheduler:
        """A new `Scheduler`, with which threads and tasks that ask at once share forward passes.

        Args:
            max_rows: so many questions are answered at a time; more wait in line.
        """
        return Scheduler(self, max_rows=max_rows)

    def shared_scheduler(self, *, max_rows: int = 32) -> Scheduler:
        """The `scheduler` of all who call this with equal ``max_rows``, in whatever thread or task.

        The adapters for LangChain and LlamaIndex ask it. It needs no closing.

        Args:
            max_rows: see `scheduler`.
        """
        return shared_scheduler(self, max_rows)

    @StopIterationTold()
    def warm(
        self,
        passages: Iterable[PassageLike],
        *,
        prefix: str | None = None,
        conversation: Messages | None = None,
        on_warmed: OnWarmed | None = None,
        ttl: float | None = None,
    ) -> Warmed:
        """Encode passages ahead of the questions, and put them into the cache.

        What the cache holds already is left out, so a call that was interrupted goes on where it
        stopped. Windows fit requests of the same prefix: the same system prompt and tools.

        Args:
            passages: as in `generate`; an iterable is read as it goes.
            prefix: as requests will have it.
            conversation: where requests hold a system message or tools, one such request.
            on_warmed: called with the passages done, and with all of them if that is known.
            ttl: seconds for which these may be used, instead of the cache's own.

        Raises:
            InputError: this model has no cache, or its header numbers the passages.
        """
        return warm(
            self,
            passages,
            prefix=prefix,
            conversation=conversation,
            on_warmed=on_warmed,
            ttl=ttl,
        )

    @StopIterationTold()
    def warm_from_retriever(self, retriever: object, **options: Any) -> Warmed:
        """`warm` with all documents that a retriever, index or store can list.

        Args:
            retriever: one of ours; a LangChain retriever, vector store or index of documents; a
                LlamaIndex index, retriever or document store.
            options: of `warm`.

        Raises:
            InputError: it does not let its documents be listed; warm() takes them as a list.
        """
        return self.warm(passages_of(retriever), **options)
