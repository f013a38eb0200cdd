"""The model that reads passages as windows: rag-windows' front door."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from rag_windows import loading
from rag_windows.answer import answer, encode_request
from rag_windows.decoding import BATCHING
from rag_windows.detokenize import Detokenizer
from rag_windows.encoding import MAX_BATCH_TOKENS, OnEncoded
from rag_windows.errors import InputError, ModelError
from rag_windows.generation import Chunk, Generation
from rag_windows.headers import Header
from rag_windows.limits import position_limit
from rag_windows.prompt import Prompt
from rag_windows.request import Messages, PassageLike, Request, check_request
from rag_windows.rescaling import Method
from rag_windows.scoring import Score, score_ids
from rag_windows.streaming import stream
from rag_windows.token_level import TokenLM


@dataclass(frozen=True, slots=True)
class _Text:
    """What only a model with a tokenizer has."""

    prompt: Prompt
    detokenizer: Detokenizer


class WindowedLM(TokenLM):
    """A local causal LM that reads each passage in a window of its own.

    Make one with `from_pretrained`. It is safe to call from many threads at once, with different
    passages and methods; the wrapped model itself stays as it is for everybody else.

    Attributes:
        model: the plain model, untouched.
        tokenizer: or None, for token-level work only.
        method: the default method.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        method: str | Method = "ape",
        max_window_tokens: int | None = None,
        header: Header = "title",
        template_kwargs: Mapping[str, Any] | None = None,
        text_tokens: Collection[str] = (),
        max_batch_tokens: int = MAX_BATCH_TOKENS,
    ) -> None:
        super().__init__(model, method=method, max_batch_tokens=max_batch_tokens)
        self.tokenizer = tokenizer
        self._limit = position_limit(model.config)
        if max_window_tokens is not None and max_window_tokens < 1:
            raise InputError(f"max_window_tokens must be at least 1, got {max_window_tokens}.")
        self.max_window_tokens = max_window_tokens or (self._limit // 2 if self._limit else None)
        self._text_parts: _Text | None = None
        if tokenizer is not None:
            prompt = Prompt(
                tokenizer,
                header=header,
                template_kwargs=template_kwargs or {},
                text_tokens=text_tokens,
            )
            self._text_parts = _Text(prompt, Detokenizer(tokenizer))

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        method: str | Method = "ape",
        max_window_tokens: int | None = None,
        header: Header = "title",
        template_kwargs: Mapping[str, Any] | None = None,
        text_tokens: Collection[str] = (),
        max_batch_tokens: int = MAX_BATCH_TOKENS,
        dtype: str | torch.dtype = "auto",
        device_map: Any = None,
        **model_kwargs: Any,
    ) -> WindowedLM:
        """Load a model and make it read windows.

        Args:
            model: Hub name, local folder, "tiny-reader" (shipped), or a loaded model.
            tokenizer: instead of the model's own; a loaded model needs one for text.
            method: default method, by name ("ape", "pcw", "sequential") or as an object.
            max_window_tokens: a longer passage becomes several; default: half the positions.
            header: "title", "none", "number", "number+title", or a function of (passage, number).
            template_kwargs: for the chat template, such as ``{"enable_thinking": False}``.
            text_tokens: control tokens that passages may spell after all; see `Prompt`.
            max_batch_tokens: tokens in one encoding pass, padding included.
            dtype: of the weights, for a model loaded here.
            device_map: where they go: "cuda", "auto", ... (needs accelerate).
            model_kwargs: for ``AutoModelForCausalLM.from_pretrained``, quantization included.

        Raises:
            ModelLoadError: not found, or can't be loaded.
            UnsupportedModelError: its attention can't be split into windows.
        """
        if isinstance(model, PreTrainedModel):
            if model_kwargs or device_map is not None or dtype != "auto":
                raise InputError(
                    "dtype, device_map and model options apply to models loaded here by name; "
                    "this one is loaded already."
                )
            loaded = model
        elif not isinstance(model, str | Path):
            raise InputError(
                f"model must be a name, a folder or a transformers PreTrainedModel, not "
                f"{type(model).__name__}. Give a compiled model uncompiled, and a PEFT model as "
                "its get_base_model()."
            )
        else:
            if device_map is not None:
                model_kwargs["device_map"] = device_map
            loaded, tokenizer = loading.load(model, tokenizer, dtype=dtype, **model_kwargs)
            loaded.eval()
        return cls(
            loaded,
            tokenizer,
            method=method,
            max_window_tokens=max_window_tokens,
            header=header,
            template_kwargs=template_kwargs,
            text_tokens=text_tokens,
            max_batch_tokens=max_batch_tokens,
        )

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
                ends with the user.
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

    def _request(
        self,
        query: Messages,
        passages: Sequence[PassageLike],
        *,
        method: str | Method | None,
        options: Mapping[str, Any] | None = None,
        **checked: Any,
    ) -> Request:
        options = dict(options or {})
        if "stop_strings" in options:
            options.setdefault("tokenizer", self.tokenizer)
        return check_request(
            self._text().prompt,
            query,
            passages,
            method=self._method(method),
            max_window_tokens=self.max_window_tokens,
            position_limit=self._limit,
            options=options,
            **checked,
        )

    def _text(self) -> _Text:
        if self._text_parts is None:
            raise ModelError(
                "This model was wrapped without a tokenizer, so it takes token ids only. Pass "
                "tokenizer= to from_pretrained."
            )
        return self._text_parts
