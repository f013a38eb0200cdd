"""What a wrapped model is made of, for the parts that answer with it: no public interface."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rag_windows.attention.hook import register
from rag_windows.attention.layers import position_limit, prompt_limit
from rag_windows.attention.support import check_attention, check_config
from rag_windows.attention.twin import Twin
from rag_windows.cache.fingerprint import ModelIdentity
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.cache.tokenizer_print import TokenizerIdentity
from rag_windows.cached_encoding import CachedEncoder
from rag_windows.calibration import Profile
from rag_windows.errors import ModelError
from rag_windows.generate import Decoder, whole_number
from rag_windows.guard import FallbackOption, guard_of
from rag_windows.methods import Method, Sequential, linked, resolve
from rag_windows.methods.steps import Choose, LinkTokens
from rag_windows.prefill import Encoder, WindowEncoder
from rag_windows.prompt.builder import Header, Prompt
from rag_windows.prompt.detokenize import Detokenizer
from rag_windows.request import Messages, PassageLike, Request, check_request
from rag_windows.structured import with_form


@dataclass(frozen=True, slots=True)
class TextParts:
    """What only a model with a tokenizer has."""

    prompt: Prompt
    detokenizer: Detokenizer


class Engine:
    """A model, its prompt and its cache. Threads may share one; nothing of a call stays in it.

    Attributes:
        model: the plain model, untouched.
        tokenizer: or None, for token-level work only.
        method: the default method.
        cache: the passage cache, or None.
        profile: of a calibration, or None.
        max_window_tokens: a longer passage becomes several windows.
        position_limit: positions that windows may use, or None for no limit.
        prompt_limit: those of a prompt without windows.
        plain_encoder: encodes windows.
        encoder: asks the cache before it does, where there is one.
        decoder: generates against encoded windows.
        numbered: whether windows hold where their passage stands among the others.

    Args:
        model: see `rag_windows.WindowedLM.from_pretrained`, as for the others.
    """

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
        if max_batch_tokens is not None:
            max_batch_tokens = whole_number("max_batch_tokens", max_batch_tokens)
        self.model = model
        self.method = resolve(method)
        register()
        check_config(model)
        twin = Twin(model)
        check_attention(model, twin)
        twin.check = functools.partial(_check, model, twin)
        self.plain_encoder = Encoder(twin, max_batch_tokens)
        self.decoder = Decoder(model, self.plain_encoder)
        self._tokenizer_identity = TokenizerIdentity(tokenizer)
        self._revision = revision
        self._attach(PassageCache.of(cache))
        if self.profile is not None and (told := self.profile.model.mismatch(model)):
            warnings.warn(told, UserWarning, stacklevel=4)
        self.tokenizer = tokenizer
        self.position_limit = position_limit(model.config)
        self.prompt_limit = prompt_limit(model.config)
        if max_window_tokens is not None:
            max_window_tokens = whole_number("max_window_tokens", max_window_tokens)
        half = self.position_limit // 2 if self.position_limit else None
        self.max_window_tokens = max_window_tokens or half
        self._text: TextParts | None = None
        if tokenizer is not None:
            prompt = Prompt(
                tokenizer, header=header, template_kwargs=template_kwargs, text_tokens=text_tokens
            )
            self._text = TextParts(prompt, Detokenizer(tokenizer))
        self.numbered = header in ("number", "number+title")

    def with_cache(self, cache: PassageCache | bool | None) -> Self:
        """The same with another cache, or none."""
        other = copy.copy(self)
        other._attach(PassageCache.of(cache))
        return other

    @property
    def text(self) -> TextParts:
        """What only a model with a tokenizer has.

        Raises:
            ModelError: there is none.
        """
        if self._text is None:
            raise ModelError(
                "This model was wrapped without a tokenizer, so it takes token ids only. Pass "
                "tokenizer= to from_pretrained."
            )
        return self._text

    def method_of(self, method: str | Method | None) -> Method:
        """A method by name, itself, or the default one for None."""
        return self.method if method is None else resolve(method)

    def _attach(self, cache: PassageCache | None) -> None:
        self.cache = cache
        plain = self.plain_encoder
        self.encoder: WindowEncoder = plain
        if cache is not None:
            identity = ModelIdentity(
                self.model, plain.twin, self._revision, probe_bytes=cache.probe_bytes
            )
            self.encoder = CachedEncoder(plain, cache, identity, self._tokenizer_identity)

    def request(
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
        """Check and tokenize a question; see `WindowedLM.generate`, and `check_request`."""
        options = dict(options or {})
        if "stop_strings" in options:
            options.setdefault("tokenizer", self.tokenizer)

        def checked_for(chosen: Method) -> Request:
            formed = with_form(
                options,
                self.tokenizer,
                self.decoder.vocabulary,
                self.decoder.end_tokens(options),
            )
            return check_request(
                prompt or self.text.prompt,
                query,
                passages,
                method=chosen,
                max_window_tokens=max_window_tokens or self.max_window_tokens,
                position_limit=self.position_limit,
                prompt_limit=self.prompt_limit,
                options=formed,
                **checked,
            )

        request = checked_for(linked(self.method_of(method), link_tokens, link_choose))
        calibrated = None if self.profile is None else self.profile.guard
        return request.guarded(guard_of(fallback), calibrated, lambda: checked_for(Sequential()))


def _check(model: PreTrainedModel, twin: Twin) -> None:
    """Refuse a model as when it was wrapped."""
    check_config(model)
    check_attention(model, twin)
