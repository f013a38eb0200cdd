"""What a wrapped model is made of: the model, its prompt, its encoder, its decoder and its cache.

No public interface: `WindowedLM` is.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rag_windows.attention.hook import register
from rag_windows.attention.layers import (
    check_attention,
    check_config,
    check_kind,
    position_limit,
    probe_ids,
    prompt_limit,
    refusal,
)
from rag_windows.attention.mirror import ModelMirror
from rag_windows.cache.fingerprint import ModelIdentity, TokenizerIdentity
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.errors import ModelError, UnsupportedModelError
from rag_windows.generate import Decoder
from rag_windows.methods import APE, PCED, PCW, Auto, Method, resolve
from rag_windows.prefill import ModelEncoder
from rag_windows.prompt.builder import Header, Prompt
from rag_windows.prompt.detokenize import Detokenizer
from rag_windows.prompt.reasoning import ReasoningFormat
from rag_windows.sampling import whole_number
from rag_windows.steps.row_encoder import RowEncoder
from rag_windows.window_adapter import WindowAdapter, attach
from rag_windows.windows import CacheAccess, WindowStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextParts:
    """What only a model with a tokenizer has."""

    prompt: Prompt
    detokenizer: Detokenizer
    reasoning: ReasoningFormat | None


class Engine:
    """A model, its prompt and its cache. Threads may share one; nothing of a call stays in it.

    Attributes:
        position_limit: positions that windows may use, or None for no limit.
        prompt_limit: those of a prompt without windows.
        plain_encoder: runs the model over windows.
        encoder: finds windows where there is a cache, and encodes the others.
        numbered: whether windows hold where their passage stands among the others.
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
        window_adapter: WindowAdapter | None = None,
    ) -> None:
        if max_batch_tokens is not None:
            max_batch_tokens = whole_number("max_batch_tokens", max_batch_tokens)
        self.model = model
        register()
        self._clock_known = False
        self._text: TextParts | None = None
        if tokenizer is not None:
            prompt = Prompt(
                tokenizer, header=header, template_kwargs=template_kwargs, text_tokens=text_tokens
            )
            reasoning = ReasoningFormat.of(tokenizer, template_kwargs or {})
            self._text = TextParts(prompt, Detokenizer(tokenizer), reasoning)
        encode_text = None if self._text is None else self._text.prompt.encode_text
        self.decoder = decoder_of(model, max_batch_tokens, encode_text)
        self.plain_encoder = self.decoder.runner
        if window_adapter is not None:
            attach(self.plain_encoder, model, window_adapter, max_batch_tokens)
        self.method = resolve(method or (PCED.name if self.in_rows else Auto.name))
        self.plain_encoder.check_method(self.method)
        self._tokenizer_identity = TokenizerIdentity(tokenizer)
        self._revision = revision
        self._attach(PassageCache.of(cache))
        self.tokenizer = tokenizer
        self.position_limit = position_limit(model.config)
        self.prompt_limit = prompt_limit(model.config)
        if max_window_tokens is not None:
            max_window_tokens = whole_number("max_window_tokens", max_window_tokens)
        half = self.position_limit // 2 if self.position_limit else None
        self.max_window_tokens = max_window_tokens or half
        self.numbered = header in ("number", "number+title")

    @property
    def state_bytes(self) -> int:
        """Bytes of what a window holds beside what it holds of each token: states, or 0."""
        return 0 if self.plain_encoder.form is None else self.plain_encoder.form.state_bytes

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
                "This model has no tokenizer, so it takes token ids only. Pass tokenizer= to "
                "from_pretrained."
            )
        return self._text

    def method_of(self, method: str | Method | None) -> Method:
        """A method by name, itself, or the default one for None.

        Raises:
            MethodError: there is none of that name, or the model can't read by it.
        """
        if method is None:
            return self.method
        chosen = resolve(method)
        self.plain_encoder.check_method(chosen)
        return chosen

    @property
    def in_rows(self) -> bool:
        """Whether each window is read in a row of its own, as none share an attention."""
        return self.plain_encoder.form is not None

    def reading_all(self, method: str | Method | None) -> Method:
        """The same for what reads all windows: demonstrations, or those that a book chose.

        "auto" chooses among passages, so "ape" stands in for it where no method is named, or
        "pced" where windows are read in rows.
        """
        chosen = self.method_of(method)
        if method is not None or not isinstance(chosen, Auto):
            return chosen
        return PCED() if self.in_rows else APE()

    def _attach(self, cache: PassageCache | None) -> None:
        self.cache = cache
        plain = self.plain_encoder
        access = None
        if cache is not None:
            self._warn_of_clock()
            if self.in_rows:
                cache.take_any_shape()
            identity = ModelIdentity(self.model, plain, self._revision, cache.weight_sums)
            access = CacheAccess(cache, identity, self._tokenizer_identity)
        self.encoder = WindowStore(plain, access)

    def _warn_of_clock(self) -> None:
        """Say once that the cache finds little, where the chat template asks the clock."""
        if self._text is None or self._clock_known:
            return
        self._clock_known = True
        if (clock := self._text.prompt.clock) is not None:
            logger.warning("%s", clock)


def decoder_of(
    model: PreTrainedModel,
    max_batch_tokens: int | None = None,
    encode_text: Callable[[str], Sequence[int]] | None = None,
) -> Decoder:
    """What encodes and reads with a model: windows together, or in rows where that can't be.

    Args:
        max_batch_tokens: see `ModelEncoder`.
        encode_text: the tokenizer's ids of a text, for `probe_ids`.

    Raises:
        UnsupportedModelError: it can read neither.
    """
    check_kind(model)
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    ids = probe_ids(vocabulary, encode_text)
    try:
        check_config(model)
        mirror = ModelMirror(model)
        decoder = Decoder(model, ModelEncoder(mirror, max_batch_tokens))
        mirror.check = functools.partial(_check, model, decoder, ids)
        mirror.check()
    except UnsupportedModelError as error:
        try:
            decoder = _in_rows(model, max_batch_tokens, ids, error.reason)
        except UnsupportedModelError as other:
            if error.measured:
                raise error from other
            why = other.reason or str(other)
            raise refusal(
                model.config.model_type,
                f"{error.reason}; and rows can't go on from a cache: {why}",
            ) from other
        logger.warning(
            "Model type '%s' reads each passage in a row of its own (method 'pced'), because %s.",
            model.config.model_type,
            error.reason,
        )
    return decoder


_FAILING = "it does not run behind one"


def _in_rows(
    model: PreTrainedModel,
    max_batch_tokens: int | None,
    ids: Sequence[Sequence[int]],
    reason: str,
) -> Decoder:
    mirror = ModelMirror(model, attention=None)
    encoder = RowEncoder(mirror, max_batch_tokens, reason=reason)
    decoder = Decoder(model, encoder)

    def check() -> None:
        check_kind(model)
        form = encoder.form
        form.continues = True
        try:
            check_attention(model, split, ids, cut, _FAILING)
        except UnsupportedModelError:
            form.continues = False
            check_attention(model, split, ids, cut, _FAILING)

    def split(prefix: Sequence[int], window: Sequence[int], query: Sequence[int]) -> torch.Tensor:
        # Beside a longer one, the row is padded.
        windows = [window, [*window, *query]]
        context = WindowStore(encoder).encode_ids(prefix, windows, PCED())
        return encoder.first_row(context, query)

    def cut(prefix: Sequence[int], window: Sequence[int], query: Sequence[int]) -> torch.Tensor:
        return encoder.by_token([*prefix, *window], query)

    mirror.check = check
    check()
    return decoder


def _check(model: PreTrainedModel, decoder: Decoder, ids: Sequence[Sequence[int]]) -> None:
    """Refuse a model whose attention can't be split, when it is wrapped and when it was edited."""

    def split(prefix: Sequence[int], window: Sequence[int], query: Sequence[int]) -> torch.Tensor:
        context = WindowStore(decoder.runner).encode_ids(prefix, [window], PCW())
        return decoder.forward(context, torch.tensor([list(query)]))[0].float()

    check_kind(model)
    check_config(model)
    check_attention(model, split, ids)
