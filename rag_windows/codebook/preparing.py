"""From passages to what a book keeps of them: their windows in a cache, their keys to search."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rag_windows.cache.codec import Entry
from rag_windows.cache.encoder import CachedEncoder
from rag_windows.cache.keys import KeyScope
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.engine import Engine
from rag_windows.errors import CacheError, InputError
from rag_windows.kv import Window
from rag_windows.methods import Codebook, Method
from rag_windows.passage import Note, Passage
from rag_windows.prefill import Source, ToEncode, complete
from rag_windows.request import Messages
from rag_windows.steps.selection import encode_query

CHUNK = 64
"""Windows that are encoded and stored together."""

OnPrepared = Callable[[int, int], None]
"""Told how many passages are done, of how many."""

_WHAT = {
    "model": "another model (other weights, config or precision, or another version of torch or "
    "transformers)",
    "tokenizer": "another tokenizer or chat template",
    "prefix": "another prefix (system prompt or tools)",
    "encoding": "another encoding of its windows (another refinement, or none)",
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A passage, encoded: its pages, None if it makes no window, and the keys of all of it.

    ``Note.passage`` of ``notes`` is its place among those prepared together.
    """

    pages: torch.Tensor | None
    keys: tuple[str, ...]
    notes: tuple[Note, ...] = ()


class Preparer:
    """Encodes passages behind one prefix as a method reads them, and queries like them."""

    def __init__(
        self,
        engine: Engine,
        cache: PassageCache,
        method: Method,
        search: Codebook,
        *,
        prefix: str | None,
        conversation: Messages | None,
    ) -> None:
        encoder = engine.encoder
        if not isinstance(encoder, CachedEncoder):
            raise InputError("A book keeps its windows in a cache; give the model one.")
        if engine.numbered:
            raise InputError(
                "The header writes a passage's number into its window, and numbers are only known "
                "with a question; load the model with header='title' or header='none'."
            )
        if method.alignment != "left":
            raise InputError(
                f"The method {method.name!r} places windows by the longest one of a request, so "
                "none can be kept for others; choose a reader such as ape, pcw or mateicl."
            )
        self._engine, self._encoder, self._cache = engine, encoder, cache
        self._method, self._search, self._prefix = method, search, prefix
        self._question: Messages = "?" if conversation is None else conversation
        request = engine.request(self._question, [Passage("?")], prefix=prefix, method=method)
        self._prefix_ids = request.parts.prefix_ids

    def made_for(self) -> dict[str, Any]:
        """All that windows depend on, by names for people; JSON."""
        model, tokenizer = self._identity()
        return {
            "model": model.hex(),
            "tokenizer": tokenizer.hex(),
            "prefix": list(self._prefix_ids),
            "encoding": self._method.encoding,
        }

    def check(self, made_for: Mapping[str, Any]) -> None:
        """Refuse windows that were made for something else than there is now, naming all of it."""
        now = self.made_for()
        differs = [what for name, what in _WHAT.items() if made_for.get(name) != now[name]]
        if differs:
            raise CacheError(
                f"This book was made with {'; and with '.join(differs)} than there is now. Open it "
                "as it was made, or make another book, in a folder of its own."
            )

    def prepare(
        self,
        passages: Sequence[Passage],
        on_prepared: OnPrepared | None = None,
        *,
        ahead: bool = True,
    ) -> list[Prepared]:
        """Encode passages and keep them; what is kept already is found.

        ``on_prepared`` is called after every few of them. Without ``ahead``, windows of which only
        the pages are kept are encoded when a query reads them.
        """
        if not passages:
            return []
        request = self._engine.request(
            self._question, passages, prefix=self._prefix, method=self._method
        )
        parts = request.parts
        made: list[tuple[torch.Tensor, tuple[str, str]]] = []
        for first in range(0, len(parts.windows), CHUNK):
            chunk = slice(first, first + CHUNK)
            windows = [one.ids for one in parts.windows[chunk]]
            made += self._pages(windows, request.sources[chunk], ahead)
            if on_prepared is not None and len(made) < len(parts.windows):
                on_prepared(parts.windows[len(made)].passage, len(passages))
        self._cache.flush()
        if on_prepared is not None:
            on_prepared(len(passages), len(passages))
        own: dict[int, list[tuple[torch.Tensor, tuple[str, str]]]] = {}
        for one, window in zip(made, parts.windows, strict=True):
            own.setdefault(window.passage, []).append(one)
        notes: dict[int, list[Note]] = {}
        for note in parts.notes:
            notes.setdefault(note.passage, []).append(note)
            if note.kind == "duplicate" and note.of in own:
                own[note.passage] = own[note.of]
        return [
            Prepared(
                torch.cat([pages for pages, _ in own[number]]) if number in own else None,
                tuple(key for _, keys in own.get(number, ()) for key in keys),
                tuple(notes.get(number, ())),
            )
            for number in range(len(passages))
        ]

    def query(self, query: Messages, prefix: str | None) -> torch.Tensor:
        """What is compared of a query behind the book's prefix: (T, width) fp32 on the CPU."""
        given = self._prefix if prefix is None else prefix
        request = self._engine.request(query, [Passage("?")], prefix=given, method=self._method)
        if request.parts.prefix_ids != self._prefix_ids:
            raise InputError(
                "This request has another prefix (system prompt, system message or tools) than the "
                "book's passages were encoded behind. Ask with the book's own, or make a book with "
                "prefix= or conversation= as requests have it."
            )
        encoded = complete(self._encoder.prefill(ToEncode(self._prefix_ids, [], self._method)))
        window = encode_query(self._encoder.runner, encoded.prefix, request.parts.query_ids)
        return self._search.tokens(window).cpu()

    def _pages(
        self, windows: Sequence[tuple[int, ...]], sources: Sequence[Source], ahead: bool
    ) -> list[tuple[torch.Tensor, tuple[str, str]]]:
        """Each window's pages, and its key with that of its pages."""
        start = len(self._prefix_ids)
        depth = len(self._encoder.runner.sliding_windows)
        search, encoding = self._search, self._method.encoding
        kind = f"pages {search.layers_of(depth)} {search.page} {search.similarity == 'cosine'}"
        whole, searched = self._scope(encoding), self._scope(f"{kind} of {encoding}")
        keys = [(whole.window_key(ids, start), searched.window_key(ids, start)) for ids in windows]
        disk = self._cache.disk
        found = {} if disk is None else disk.get_many([pages for _, pages in keys])
        missing = [
            index
            for index, (window, pages) in enumerate(keys)
            if pages not in found or (ahead and window not in self._cache)
        ]
        asked = ToEncode(
            self._prefix_ids,
            [windows[index] for index in missing],
            self._method,
            [sources[index] for index in missing],
            patient=True,
        )
        encoded = complete(self._encoder.prefill(asked)).windows
        rows = {key: entry.window.keys[0][0] for key, entry in found.items()}
        for index, window in zip(missing, encoded, strict=True):
            key = keys[index][1]
            rows[key] = search.pages(window).float().cpu()
            if disk is not None:
                disk.put(key, _entry(rows[key], start))
        return [(rows[pages], (window, pages)) for window, pages in keys]

    def _scope(self, encoding: str) -> KeyScope:
        model, tokenizer = self._identity()
        return KeyScope(
            self._cache.salt_key,
            model=model,
            tokenizer=tokenizer,
            encoding=encoding,
            store=self._cache.store,
            prefix_ids=self._prefix_ids,
        )

    def _identity(self) -> tuple[bytes, bytes]:
        model, tokenizer = self._encoder.identity()
        if model is None:
            raise CacheError(
                "A book needs to know that its model stays the same, and forward hooks or a "
                "patched forward make that impossible; take them off."
            )
        return model, tokenizer


def _entry(rows: torch.Tensor, start: int) -> Entry:
    """Pages as the cache keeps windows: one layer and head, one token a page, and no values."""
    keys = rows.unsqueeze(0)
    window = Window((0,) * len(rows), start, (keys,), (keys.new_zeros(1, len(rows), 0),))
    return Entry(window, cost_s=0.0, labels=(), created=time.time())
