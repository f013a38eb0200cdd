"""Encoding with a passage cache before it: only what nobody has encoded yet is computed."""

from __future__ import annotations

from collections.abc import Sequence

from rag_windows.cache.fingerprint import ModelIdentity
from rag_windows.cache.keys import KeyScope
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.cache.tokenizer_print import TokenizerIdentity
from rag_windows.cached_run import CachedRun
from rag_windows.methods import Method, window_starts
from rag_windows.prefill import Encoded, Encoder, OnEncoded, Prefill, Source


class CachedEncoder:
    """An `Encoder` that asks a cache first and tells it what it had to compute.

    Passages read one after the other (`Sequential`) are not cached: such a window depends on all
    passages and their order, so it would rarely be asked for again and would displace those that
    are. Their prefix is. With a lossy store the prefix is not: every window and answer reads it.

    Args:
        encoder: that computes.
        cache: that keeps.
        model: what the model is.
        tokenizer: what the tokenizer is.
    """

    def __init__(
        self,
        encoder: Encoder,
        cache: PassageCache,
        model: ModelIdentity,
        tokenizer: TokenizerIdentity,
    ) -> None:
        self._encoder = encoder
        self._cache = cache
        self._model = model
        self._tokenizer = tokenizer

    @property
    def runner(self) -> Encoder:
        """What runs the model."""
        return self._encoder

    def prefill(
        self,
        prefix_ids: Sequence[int],
        windows: Sequence[Sequence[int]],
        method: Method,
        sources: Sequence[Source] = (),
        on_encoded: OnEncoded | None = None,
        *,
        patient: bool = False,
        ttl: float | None = None,
    ) -> Prefill[Encoded]:
        """See `Encoder.prefill`.

        Args:
            prefix_ids: may be empty.
            windows: token ids.
            method: how they will be read.
            sources: of each window.
            on_encoded: told of windows found, too.
            patient: wait for the disk rather than leave something unwritten.
            ttl: seconds for which what is encoded now may be used, instead of the cache's own.

        Raises:
            NonFiniteError: keys or values hold NaN or infinity; the message names the passage.
        """
        fingerprint = self._model.fingerprint()
        if fingerprint is None:
            return self._encoder.prefill(prefix_ids, windows, method, sources, on_encoded)
        run = CachedRun(
            self._encoder,
            self._cache,
            self.scope(fingerprint, prefix_ids, method),
            lambda: self._model.fingerprint() == fingerprint,
            prefix_ids,
            method,
            patient=patient,
            ttl=ttl or self._cache.ttl,
        )
        return run.prefill(windows, sources, on_encoded)

    def missing(
        self, prefix_ids: Sequence[int], windows: Sequence[Sequence[int]], method: Method
    ) -> list[int]:
        """Indices of windows that the cache does not know of, by what it knows without reading."""
        fingerprint = self._model.fingerprint()
        if fingerprint is None or not method.windowed:
            return list(range(len(windows)))
        scope = self.scope(fingerprint, prefix_ids, method)
        starts = window_starts(method.alignment, len(prefix_ids), [len(ids) for ids in windows])
        return [
            index
            for index, (ids, start) in enumerate(zip(windows, starts, strict=True))
            if scope.window_key(ids, start) not in self._cache
        ]

    def identity(self) -> tuple[bytes | None, bytes]:
        """Fingerprints of the model, None if nothing can be said about it, and the tokenizer."""
        return self._model.fingerprint(), self._tokenizer.fingerprint()

    def scope(self, fingerprint: bytes, prefix_ids: Sequence[int], method: Method) -> KeyScope:
        """Keys behind one prefix."""
        return KeyScope(
            self._cache.salt_key,
            model=fingerprint,
            tokenizer=self._tokenizer.fingerprint(),
            encoding=method.encoding,
            store=self._cache.store,
            prefix_ids=prefix_ids,
        )
