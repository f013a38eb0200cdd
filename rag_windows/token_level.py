"""The model below any text: contexts, logits and generation over token ids."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from rag_windows.attention.hook import register
from rag_windows.attention.support import check_attention, check_config
from rag_windows.attention.twin import Twin
from rag_windows.cache.fingerprint import ModelIdentity
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.cache.tokenizer_print import TokenizerIdentity
from rag_windows.cached_encoding import CachedEncoder
from rag_windows.context import EncodedContext, encode_context
from rag_windows.decoding import Decoder
from rag_windows.encoding import Encoder, WindowEncoder
from rag_windows.errors import InputError
from rag_windows.refused_options import check_counts, whole_number
from rag_windows.request import DEFAULT_NEW_TOKENS
from rag_windows.rescaling import Method, resolve


class TokenLM:
    """A causal LM that reads windows of token ids: for research and parity tests.

    Attributes:
        model: the plain model, untouched.
        method: the default method.
        cache: keeps encoded windows, or None.

    Raises:
        UnsupportedModelError: the model's attention can't be split into windows.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        method: str | Method = "ape",
        max_batch_tokens: int | None = None,
        cache: PassageCache | bool | None = None,
        tokenizer: Any = None,
        revision: str | None = None,
    ) -> None:
        if max_batch_tokens is not None:
            max_batch_tokens = whole_number("max_batch_tokens", max_batch_tokens)
        self.model = model
        self.method = resolve(method)
        register()
        check_config(model)
        twin = Twin(model)
        check_attention(model, twin)
        twin.check = functools.partial(_check, model, twin)
        self._plain_encoder = Encoder(twin, max_batch_tokens)
        self._decoder = Decoder(model, self._plain_encoder)
        self._tokenizer_identity = TokenizerIdentity(tokenizer)
        self._revision = revision
        self._attach(PassageCache.of(cache))

    def with_cache(self, cache: PassageCache | bool | None) -> Self:
        """The same model and options with another cache, such as that of a tenant, or none."""
        other = copy.copy(self)
        other._attach(PassageCache.of(cache))
        return other

    def _attach(self, cache: PassageCache | None) -> None:
        self.cache = cache
        plain = self._plain_encoder
        self._encoder: WindowEncoder = plain
        if cache is not None:
            identity = ModelIdentity(
                self.model, plain.twin, self._revision, probe_bytes=cache.probe_bytes
            )
            self._encoder = CachedEncoder(plain, cache, identity, self._tokenizer_identity)

    def encode_ids(
        self,
        prefix_ids: Sequence[int],
        windows: Sequence[Sequence[int]],
        *,
        method: str | Method | None = None,
        scores: Sequence[float] = (),
    ) -> EncodedContext:
        """Encode token ids as they are.

        Args:
            prefix_ids: may be empty.
            windows: one list of ids a window; no windows make an ordinary prompt.
            method: instead of the default one.
            scores: retrieval score of each window, for a method that reads them.
        """
        return encode_context(
            self._encoder, prefix_ids, windows, self._method(method), scores=scores
        )

    def logits(self, context: EncodedContext, query_ids: Sequence[int]) -> torch.Tensor:
        """Logits of each query token.

        Returns:
            (len(query_ids), vocabulary), fp32, on the model's device; of an ensemble, the
            log-probabilities of its windows together.
        """
        if not query_ids:
            raise InputError("logits needs at least one query token.")
        ids = torch.tensor([list(query_ids)], dtype=torch.int64)
        return self._decoder.forward(context, ids)[0].float()

    def generate_ids(
        self,
        context: EncodedContext,
        query_ids: Sequence[int],
        *,
        max_new_tokens: int = DEFAULT_NEW_TOKENS,
        seed: int | None = None,
        **generate_kwargs: Any,
    ) -> list[int]:
        """Continue a query at token level, greedily unless told otherwise.

        Returns:
            The generated ids, end token included.

        Raises:
            InputError: a context of another model, no query tokens, or a count that is none.
        """
        check_counts({"max_new_tokens": max_new_tokens, **generate_kwargs})
        options = {"max_new_tokens": max_new_tokens, **generate_kwargs}
        if "generation_config" not in options:
            options.setdefault("do_sample", False)
        decoded = self._decoder.generate(context, query_ids, options=options, seed=seed)
        return decoded.sequences[0]

    def _method(self, method: str | Method | None) -> Method:
        return self.method if method is None else resolve(method)


def _check(model: PreTrainedModel, twin: Twin) -> None:
    """Refuse a model as when it was wrapped."""
    check_config(model)
    check_attention(model, twin)
