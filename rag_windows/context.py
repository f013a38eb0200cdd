"""An encoded context: what queries are asked against."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import DynamicCache

from rag_windows.errors import InputError
from rag_windows.kv import Members, PackedWindows, RowsCache, Window, pack
from rag_windows.methods import Method, Sequential
from rag_windows.prefill import OnEncoded, Prefill, Source, WindowEncoder, complete
from rag_windows.steps.recompute import link


@dataclass(frozen=True, slots=True)
class ContextParts:
    """Prefix and windows of a context, encoded, before they are put together.

    Attributes:
        prefix_ids: tokens of the prefix.
        prefix: its keys and values, or None without a prefix or without windows.
        windows: one by one; a method that is not windowed has one, of all tokens.
        method: how queries read them.
        lengths: tokens of each window, as they were given.
        groups: citation group of each of those.
        n_groups: number of citation groups.
        scores: retrieval score of each; empty if not all have one.
        cached_tokens: those of prefix and windows that were not computed for this context.
        found: how many windows were not.
    """

    prefix_ids: tuple[int, ...]
    prefix: Window | None
    windows: tuple[Window, ...]
    method: Method
    lengths: tuple[int, ...]
    groups: tuple[int, ...]
    n_groups: int
    scores: tuple[float, ...] = ()
    cached_tokens: int = 0
    found: int = 0

    @property
    def query_start(self) -> int:
        """Position of the query's first token."""
        if not self.windows:
            return len(self.prefix_ids)
        return max(window.start + len(window.ids) for window in self.windows)


def prefill_parts(
    encoder: WindowEncoder,
    prefix_ids: Sequence[int],
    windows: Sequence[Sequence[int]],
    method: Method,
    groups: Sequence[int] | None = None,
    on_encoded: OnEncoded | None = None,
    sources: Sequence[Source] = (),
    scores: Sequence[float | None] = (),
) -> Prefill[ContextParts]:
    """Encode prefix and windows for one method; see `encode_context`."""
    lengths = tuple(len(ids) for ids in windows)
    if 0 in lengths:
        raise InputError(f"Window {lengths.index(0)} has no tokens; leave it out.")
    numbers = tuple(range(len(windows)) if groups is None else groups)
    n_groups = max(numbers, default=-1) + 1
    prefix_ids = tuple(prefix_ids)
    if not windows:
        return ContextParts(prefix_ids, None, (), method, lengths, numbers, n_groups)
    if method.linking is not None and method.linking.everything(lengths):
        method = Sequential()
    if not method.windowed:
        windows = [[token for ids in windows for token in ids]]
    if method.combination is not None:
        names = [one.name for one in sources] or [f"Window {i}" for i in range(len(windows))]
        method.combination.check(scores or [None] * len(windows), names)
    encoded = yield from encoder.prefill(prefix_ids, windows, method, sources, on_encoded)
    made, cached_tokens = encoded.windows, encoded.cached_tokens
    if method.linking is not None:
        made, again = link(encoder.runner, made, encoded.prefix, method.linking)
        cached_tokens -= sum(again[index] for index in encoded.found)
    known = tuple(score for score in scores if score is not None)
    return ContextParts(
        prefix_ids=prefix_ids,
        prefix=encoded.prefix,
        windows=tuple(made),
        method=method,
        lengths=lengths,
        groups=numbers,
        n_groups=n_groups,
        scores=known if len(known) == len(made) else (),
        cached_tokens=cached_tokens,
        found=len(encoded.found),
    )


@dataclass(frozen=True, slots=True)
class EncodedContext:
    """Prefix and windows, encoded; immutable, so any number of queries and threads may share it.

    Attributes:
        prefix_ids: tokens of the prefix.
        prefix: its keys and values, or None without a prefix or without windows.
        windows: all windows, packed, or as members of an ensemble; or None: then the context is an
            ordinary prompt.
        method: how queries read the windows.
        query_start: position of the query's first token: where the furthest window ends.
        window_tokens: tokens in all windows together.
        cached_tokens: those of prefix and windows that were not computed for this context.
        encoded_windows: how many windows were computed for it.
        cached_windows: how many were found.
        singles: the windows one by one, in order; empty where the method reads them only together.
        groups: citation group of each window; empty where nobody needs to know.
        scores: retrieval score of each window; empty there too, and if not all have one.
        chosen: where the method chooses windows for each query: None before, then which of all
            windows are read; `window_tokens` remain those of all.
    """

    prefix_ids: tuple[int, ...]
    prefix: Window | None
    windows: PackedWindows | Members | None
    method: Method
    query_start: int
    window_tokens: int
    cached_tokens: int = 0
    encoded_windows: int = 0
    cached_windows: int = 0
    singles: tuple[Window, ...] = ()
    groups: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    chosen: tuple[int, ...] | None = None

    def narrowed(
        self, windows: Sequence[Window], groups: Sequence[int], scores: Sequence[float] = ()
    ) -> EncodedContext:
        """The same context with other windows, such as some of `singles`.

        Args:
            windows: at least one.
            groups: citation group of each, of those that this context has.
            scores: retrieval score of each, if this context has them.
        """
        n_groups = 0 if self.windows is None else self.windows.n_groups
        lengths = [len(window.ids) for window in windows]
        return replace(
            self,
            windows=_together(self.method, windows, groups, lengths, n_groups, scores),
            query_start=max(window.start + len(window.ids) for window in windows),
            window_tokens=sum(lengths),
            singles=tuple(windows),
            groups=tuple(groups),
            scores=tuple(scores),
        )

    def new_tail(self, rows: int = 1) -> DynamicCache:
        """A fresh HF cache that holds the prefix, for ``rows`` queries, a batch row each.

        In an ensemble, each query takes a row a window, of which callers need not know.

        It has no config on purpose: with one, sliding layers would forget the prefix by counting
        tokens instead of positions.
        """
        tail = DynamicCache()
        if isinstance(self.windows, Members):
            tail = RowsCache(self.windows.per_query)
            rows *= self.windows.per_query
        if self.prefix is not None:
            pairs = zip(self.prefix.keys, self.prefix.values, strict=True)
            for layer, (key, value) in enumerate(pairs):
                tail.update(
                    key.unsqueeze(0).expand(rows, -1, -1, -1),
                    value.unsqueeze(0).expand(rows, -1, -1, -1),
                    layer,
                )
        return tail


def encode_context(
    encoder: WindowEncoder,
    prefix_ids: Sequence[int],
    windows: Sequence[Sequence[int]],
    method: Method,
    groups: Sequence[int] | None = None,
    on_encoded: OnEncoded | None = None,
    sources: Sequence[Source] = (),
    scores: Sequence[float | None] = (),
    cancelled: threading.Event | None = None,
) -> EncodedContext:
    """Encode prefix and windows for one method.

    Args:
        encoder: of the model.
        prefix_ids: may be empty.
        windows: token ids; a method that is not windowed gets them as one long window.
        method: how queries will read them.
        groups: citation group of each window; by default each window is its own.
        on_encoded: see `Encoder.encode_windows`.
        sources: of each window, see `Encoder.encode`.
        scores: retrieval score of each window, or none.
        cancelled: ends the work when set.

    Raises:
        InputError: a window without tokens, or without a score that the method needs.
        PrefillCancelledError: it was cancelled.
    """
    prefill = prefill_parts(
        encoder, prefix_ids, windows, method, groups, on_encoded, sources, scores
    )
    parts = complete(prefill, cancelled)
    made, method = parts.windows, parts.method
    if not made:
        return EncodedContext(parts.prefix_ids, None, None, method, parts.query_start, 0)
    singly = method.selection is not None
    apart = singly or method.combination is not None
    return EncodedContext(
        prefix_ids=parts.prefix_ids,
        prefix=parts.prefix,
        windows=_together(method, made, parts.groups, parts.lengths, parts.n_groups, parts.scores),
        method=method,
        query_start=parts.query_start,
        window_tokens=sum(parts.lengths),
        cached_tokens=parts.cached_tokens,
        encoded_windows=len(made) - parts.found,
        cached_windows=parts.found,
        singles=made if singly else (),
        groups=parts.groups if apart else (),
        scores=parts.scores if apart else (),
    )


def _together(
    method: Method,
    windows: Sequence[Window],
    groups: Sequence[int],
    lengths: Sequence[int],
    n_groups: int,
    scores: Sequence[float],
) -> PackedWindows | Members:
    """Windows as the method's queries read them: side by side, or each for itself."""
    combination = method.combination
    if combination is None:
        return pack(windows, groups, n_groups, lengths)
    return Members(
        windows=tuple(windows),
        prior=combination.prior,
        fixed=combination.fixed(scores, groups),
        groups=torch.tensor(list(groups)),
        n_groups=n_groups,
    )


def require_narrowed(context: EncodedContext) -> None:
    """Refuse to read windows of which a query has still to choose.

    Raises:
        InputError: several rows, or a later part of a query, can't choose.
    """
    if context.method.selection is not None and context.windows and context.chosen is None:
        raise InputError(
            f"The method {context.method.name!r} chooses windows for each query; narrow the "
            "context to one query first, with Decoder.narrowed(context, query_ids)."
        )
