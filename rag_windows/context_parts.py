"""What a context is made of: its prefix and windows, encoded, not yet put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rag_windows.encoding import OnEncoded, Prefill, Source, WindowEncoder
from rag_windows.errors import InputError
from rag_windows.kv import Window
from rag_windows.rescaling import Method, Sequential


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
        made, again = method.linking.link(encoder.runner, made, encoded.prefix)
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
