"""The model's text side: its tokenizer, its prompt, and requests made of words."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rag_windows import loading
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.calibration.profile import Profile
from rag_windows.detokenize import Detokenizer
from rag_windows.errors import ModelError
from rag_windows.guard import FallbackOption, guard_of
from rag_windows.headers import Header
from rag_windows.limits import position_limit, prompt_limit
from rag_windows.linking.plan import Choose, LinkTokens
from rag_windows.loading import OnLoaded
from rag_windows.prompt import Prompt
from rag_windows.refused_options import whole_number
from rag_windows.request import Messages, PassageLike, Request, check_request
from rag_windows.rescaling import Method, Sequential, linked
from rag_windows.structured import with_form
from rag_windows.token_level import TokenLM

RANKED = ("number", "number+title")
"""Headers that write into a window where its passage stands among the others."""


@dataclass(frozen=True, slots=True)
class TextParts:
    """What only a model with a tokenizer has."""

    prompt: Prompt
    detokenizer: Detokenizer


class TextLM(TokenLM):
    """A causal LM with its tokenizer; `WindowedLM` is what users hold."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        method: str | Method | None = None,
        max_window_tokens: int | None = None,
        header: Header = "title",
        template_kwargs: Mapping[str, Any] | None = None,
        text_tokens: Collection[str] = (),
        max_batch_tokens: int | None = None,
        cache: PassageCache | bool | None = None,
        revision: str | None = None,
        profile: Profile | str | Path | None = None,
    ) -> None:
        self.profile = None if profile is None else Profile.of(profile)
        if method is None:
            method = "ape" if self.profile is None else self.profile.method
        super().__init__(
            model,
            method=method,
            max_batch_tokens=max_batch_tokens,
            cache=cache,
            tokenizer=tokenizer,
            revision=revision,
        )
        if self.profile is not None and (told := self.profile.model.mismatch(model)):
            warnings.warn(told, UserWarning, stacklevel=3)
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self._limit = position_limit(model.config)
        self._prompt_limit = prompt_limit(model.config)
        if max_window_tokens is not None:
            max_window_tokens = whole_number("max_window_tokens", max_window_tokens)
        self.max_window_tokens = max_window_tokens or (self._limit // 2 if self._limit else None)
        self._text_parts: TextParts | None = None
        if tokenizer is not None:
            prompt = Prompt(
                tokenizer, header=header, template_kwargs=template_kwargs, text_tokens=text_tokens
            )
            self._text_parts = TextParts(prompt, Detokenizer(tokenizer))
        self.header = header
        self._rank_in_window = header in RANKED

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        method: str | Method | None = None,
        max_window_tokens: int | None = None,
        header: Header = "title",
        template_kwargs: Mapping[str, Any] | None = None,
        text_tokens: Collection[str] = (),
        max_batch_tokens: int | None = None,
        cache: PassageCache | bool | None = None,
        profile: Profile | str | Path | None = None,
        dtype: str | torch.dtype = "auto",
        device_map: Any = None,
        on_loaded: OnLoaded | None = None,
        **model_kwargs: Any,
    ) -> Self:
        """Load a model and make it read windows.

        Args:
            model: Hub name, local folder, "tiny-reader" (shipped), a GGUF file, a PEFT adapter's
                folder or Hub name (needs the extra ``peft``), or a loaded model.
            tokenizer: instead of the model's own, or the name or folder of one; a loaded model
                needs one for text.
            method: default method, by name ("ape", "pcw", "sequential") or as an object; None takes
                the profile's, and "ape" without one.
            max_window_tokens: a longer passage becomes several; default: half the positions.
            header: "title", "none", "number", "number+title", or a function of (passage, number).
            template_kwargs: for the chat template, such as ``{"enable_thinking": False}``.
            text_tokens: control tokens that passages may spell after all; see `Prompt`.
            max_batch_tokens: tokens in one encoding pass; None for what suits the device.
            cache: keeps encoded windows: a `PassageCache`, or True for one with good defaults.
            profile: of a calibration, or the path of one: brings the method and the guard's
                threshold; a warning tells if it was made for another model.
            dtype: of the weights, for a model loaded here.
            device_map: where they go: "cpu", "cuda", "cuda:1"; "auto" or a mapping spreads them
                (needs accelerate). None for the best device: CUDA where there is one.
            on_loaded: called while weights are loaded here, with the tensors done and all of them.
            model_kwargs: for ``AutoModelForCausalLM.from_pretrained``: revision,
                quantization_config, gguf_file (needs the extra ``gguf``), ...; arguments of
                ``BitsAndBytesConfig`` such as ``load_in_4bit`` are taken as well.

        Raises:
            InputError: a device that is not there.
            MissingExtraError: what is asked for needs a package that is not installed.
            ModelLoadError: not found, or can't be loaded.
            UnsupportedModelError: its attention can't be split into windows.
            ProfileError: the profile can't be used.
        """
        if profile is not None:
            # A profile that can't be used is told before gigabytes are loaded.
            profile = Profile.of(profile)
        loaded, own_tokenizer = loading.resolve(
            model,
            tokenizer,
            dtype=dtype,
            device_map=device_map,
            on_loaded=on_loaded,
            **model_kwargs,
        )
        return cls(
            loaded,
            own_tokenizer,
            method=method,
            max_window_tokens=max_window_tokens,
            header=header,
            template_kwargs=template_kwargs,
            text_tokens=text_tokens,
            max_batch_tokens=max_batch_tokens,
            cache=cache,
            revision=model_kwargs.get("revision"),
            profile=profile,
        )

    def _request(
        self,
        query: Messages,
        passages: Sequence[PassageLike],
        *,
        method: str | Method | None,
        link_tokens: LinkTokens | None = None,
        link_choose: Choose = "first",
        fallback: FallbackOption = None,
        prompt: Prompt | None = None,
        max_window_tokens: int | None = None,
        options: Mapping[str, Any] | None = None,
        **checked: Any,
    ) -> Request:
        options = dict(options or {})
        if "stop_strings" in options:
            options.setdefault("tokenizer", self.tokenizer)

        def checked_for(chosen: Method) -> Request:
            formed = with_form(
                options,
                self.tokenizer,
                self._decoder.vocabulary,
                self._decoder.end_tokens(options),
            )
            return check_request(
                prompt or self._text().prompt,
                query,
                passages,
                method=chosen,
                max_window_tokens=max_window_tokens or self.max_window_tokens,
                position_limit=self._limit,
                prompt_limit=self._prompt_limit,
                options=formed,
                **checked,
            )

        request = checked_for(linked(self._method(method), link_tokens, link_choose))
        calibrated = None if self.profile is None else self.profile.guard
        return request.guarded(guard_of(fallback), calibrated, lambda: checked_for(Sequential()))

    def _text(self) -> TextParts:
        if self._text_parts is None:
            raise ModelError(
                "This model was wrapped without a tokenizer, so it takes token ids only. Pass "
                "tokenizer= to from_pretrained."
            )
        return self._text_parts
