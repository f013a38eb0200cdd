"""The model that reads passages as windows: rag-windows' front door."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from transformers.generation.streamers import BaseStreamer

from rag_windows.answer import answer, encode_request
from rag_windows.decoding import BATCHING
from rag_windows.encoding import OnEncoded
from rag_windows.generation import Chunk, Generation
from rag_windows.listing import passages_of
from rag_windows.request import Messages, PassageLike
from rag_windows.rescaling import Method
from rag_windows.scoring import Score, score_ids
from rag_windows.streaming import stream
from rag_windows.text_level import TextLM
from rag_windows.warming import OnWarmed, Warmed, warm


class WindowedLM(TextLM):
    """A local causal LM that reads each passage in a window of its own.

    Make one with `from_pretrained`. It is safe to call from many threads at once, with different
    passages and methods; the wrapped model itself stays as it is for everybody else.

    Attributes:
        model: the plain model, untouched.
        tokenizer: or None, for token-level work only.
        method: the default method.
        template_kwargs: further variables of the chat template.
        cache: the passage cache, or None.
    """

    def generate(
        self,
        query: Messages,
        passages: Sequence[PassageLike] = (),
        *,
        prefix: str | None = None,
        method: str | Method | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        citations: bool = True,
        seed: int | None = None,
        on_encoded: OnEncoded | None = None,
        **generate_kwargs: Any,
    ) -> Generation:
        """Answer a question over passages.

        Without passages this is the model's own ``generate``, bit for bit.

        Args:
            query: a question, or a conversation as ``[{"role": ..., "content": ...}, ...]`` that
                ends with the user, or a `Conversation`.
            passages: in any order; blank and duplicate ones are left out and told in ``notes``.
            prefix: system prompt, read by every window and by the query.
            method: instead of the default one.
            max_new_tokens: 128 unless given here or in a ``generation_config``.
            stop: the text ends before any of these strings.
            citations: whether to measure each passage's attention mass.
            seed: for sampling, private to this call; None uses PyTorch's global generator.
            on_encoded: called while passages are encoded, with the windows done and all of them.
            generate_kwargs: any option of ``transformers`` generate: do_sample, temperature,
                top_p, num_beams, logits_processor, stop_strings, ...

        Raises:
            InputError, PromptError, LimitError: before any work.
            GenerationError: an option that can't work with windows.
        """
        request = self._request(
            query,
            passages,
            prefix=prefix,
            method=method,
            max_new_tokens=max_new_tokens,
            stop=stop,
            citations=citations,
            seed=seed,
            on_encoded=on_encoded,
            options=generate_kwargs,
        )
        return answer(self._encoder, self._decoder, self._text().detokenizer, request)

    def stream(
        self,
        query: Messages,
        passages: Sequence[PassageLike] = (),
        *,
        prefix: str | None = None,
        method: str | Method | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        citations: bool = True,
        seed: int | None = None,
        on_encoded: OnEncoded | None = None,
        **generate_kwargs: Any,
    ) -> Iterator[Chunk]:
        """Like `generate`, piece by piece; the last chunk carries the whole `Generation`.

        The joined chunks are exactly ``generate``'s text. Closing the iterator stops the work. With
        beams, where no token is final before the end, one chunk comes. Arguments are checked at
        the call, before the first chunk is asked for.
        """
        request = self._request(
            query,
            passages,
            prefix=prefix,
            method=method,
            max_new_tokens=max_new_tokens,
            stop=stop,
            citations=citations,
            seed=seed,
            on_encoded=on_encoded,
            options=generate_kwargs,
        )
        detokenizer = self._text().detokenizer
        by_token = all(
            self._decoder.option(generate_kwargs, name) in (None, 1) for name in BATCHING
        )

        def work(streamer: BaseStreamer | None, cancelled: threading.Event) -> Generation:
            return answer(self._encoder, self._decoder, detokenizer, request, streamer, cancelled)

        return stream(work, detokenizer, request.stop, by_token)

    def score(
        self,
        query: Messages,
        passages: Sequence[PassageLike],
        choices: Sequence[str],
        *,
        prefix: str | None = None,
        method: str | Method | None = None,
    ) -> list[Score]:
        """How likely the model finds each choice as the answer.

        Args:
            query: as in `generate`, like those below but for the choices.
            passages: read in windows.
            choices: answers, tokenized as text on their own behind the assistant header.
            prefix: system prompt.
            method: instead of the default one.

        Returns:
            One score a choice, in order; log-probabilities in nats.
        """
        text = self._text()
        ids = [text.prompt.encode_text(choice, continuation=True) for choice in choices]
        longest = max((len(choice) for choice in ids), default=1)
        request = self._request(
            query, passages, prefix=prefix, method=method, max_new_tokens=longest
        )
        context = encode_request(self._encoder, request)
        sums = score_ids(self._decoder, context, request.parts.query_ids, ids)
        return [
            Score(choice, total, len(tokens))
            for choice, total, tokens in zip(choices, sums, ids, strict=True)
        ]

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
