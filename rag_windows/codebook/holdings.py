"""What a book holds: encoded passages, their keys to search, and the index that processes share."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from rag_windows.cache.codec import Entry
from rag_windows.cache.encoder import CachedEncoder
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.codebook.index import Contents, Index, Record, Stamp, same_passage
from rag_windows.engine import Engine
from rag_windows.errors import CacheError, InputError
from rag_windows.kv import Window
from rag_windows.methods import Codebook, Method
from rag_windows.methods.codebook import page_owners
from rag_windows.passage import Note, Passage
from rag_windows.prefill import Source, ToEncode, complete
from rag_windows.request import Messages
from rag_windows.steps.selection import encode_query
from rag_windows.threads import in_children

CHUNK = 64
"""Windows that are encoded and stored together."""

OnPrepared = Callable[[int, int], None]
"""Called with how many passages are done, and of how many."""

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
        model, _ = self._identity()
        whole = self._encoder.scope(model, self._prefix_ids, encoding)
        searched = self._encoder.scope(model, self._prefix_ids, f"{kind} of {encoding}")
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


@dataclass(frozen=True, slots=True)
class Pages:
    """The keys that are searched: (P, width) fp32 rows in host memory, and whose each one is."""

    by_id: Mapping[str, torch.Tensor]
    owners: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, pages: Mapping[str, torch.Tensor]) -> Pages:
        """Those of some passages, in one matrix of which ``by_id`` are views."""
        sizes = [len(own) for own in pages.values()]
        rows = torch.cat([torch.zeros(0), *pages.values()])
        return cls(dict(zip(pages, rows.split(sizes), strict=True)), page_owners(sizes), rows)

    def changed(self, gone: Collection[str], new: Mapping[str, torch.Tensor]) -> Pages:
        """Without some passages, and with others behind the rest."""
        kept = {name: own for name, own in self.by_id.items() if name not in gone}
        return Pages.of({**kept, **new})

    def rank(
        self, search: Codebook, tokens: torch.Tensor, order: Iterable[str], count: int
    ) -> list[tuple[str, float]]:
        """The most similar passages with their similarity, highest first; of equal ones in order.

        ``tokens`` are (T, width) of the query, from `Codebook.tokens`.
        """
        ids = list(self.by_id)
        if not ids:
            return []
        alike = search.similarities(tokens, self.rows, self.owners, len(ids))
        least = torch.topk(alike, min(count, len(alike))).values[-1]
        # All that are as similar as the last one, so that ties are broken by the order alone.
        near = torch.nonzero(alike >= least).flatten().tolist()
        found = [(ids[index], float(alike[index])) for index in near]
        places = {one: place for place, one in enumerate(order)}
        return sorted(found, key=lambda one: (-one[1], places[one[0]]))[:count]


@dataclass(frozen=True, slots=True)
class State:
    """What a book holds at one moment; never changed, so that a search needs no lock.

    ``records`` are by id, in the order in which they came; ``searches`` as far as they are written.
    """

    records: Mapping[str, Record] = field(default_factory=dict)
    pages: Pages = field(default_factory=partial(Pages.of, {}))
    searches: int = 0


class Holdings:
    """Changes a book's state, one thread and process at a time."""

    def __init__(
        self,
        preparer: Preparer,
        cache: PassageCache,
        index: Index | None,
        on_loaded: OnPrepared | None = None,
    ) -> None:
        self._preparer = preparer
        self._cache = cache
        self._index = index
        self._state = State()
        self.after_fork()
        in_children(self)
        self.made_for = preparer.made_for()
        self._refresh(on_loaded)

    def after_fork(self) -> None:
        """A child reads the index again, and leaves to the parent what that has counted."""
        self._lock = threading.RLock()
        self._stamp: Stamp | None = None
        # What was counted and is not written yet.
        self._hits: Counter[str] = Counter()
        self._last: dict[str, int] = {}
        self._searches = 0

    def now(self) -> State:
        """What the book holds now, changes of other processes included."""
        if self._index is not None and self._index.stamp() != self._stamp:
            # Without the lock of all processes: the index is replaced as a whole, and a question
            # must not wait for somebody's change.
            with self._lock:
                self._refresh()
        return self._state

    @contextmanager
    def changing(self) -> Iterator[State]:
        """Be the only one that changes the book; gives what it holds."""
        # In this order: threads that ask need this process's lock, and must not wait for others.
        with nullcontext() if self._index is None else self._index.locked(), self._lock:
            self._refresh()
            yield self._state

    def count(self, found: Iterable[str]) -> None:
        """Count a search and what it found; `save` and every change write that."""
        with self._lock:
            self._searches += 1
            for one in found:
                self._hits[one] += 1
                self._last[one] = self._state.searches + self._searches

    def change(
        self, gone: Collection[str], new: Mapping[str, tuple[Record, Prepared]] | None = None
    ) -> None:
        """Forget passages, and take in others in place of those of the same ids; while `changing`.

        A replaced passage keeps its place.
        """
        new = new or {}
        old, searches = self._state, self._state.searches + self._searches
        records = {name: one for name, one in old.records.items() if name not in gone}
        for name, (record, one) in new.items():
            records[name] = replace(record, keys=one.keys, hits=0, since=searches, used=searches)
        pages = {name: one.pages for name, (_, one) in new.items() if one.pages is not None}
        self._commit(records, old.pages.changed({*gone, *new}, pages))

    def least_useful(self, count: int, spared: set[str]) -> list[str]:
        """Ids of the passages found by the smallest share of searches, but for some."""
        searches = self._state.searches + self._searches
        names = [name for name in self._state.records if name not in spared]
        worth = {
            name: self._counted(self._state.records[name]).usefulness(searches) for name in names
        }
        return sorted(names, key=lambda name: worth[name])[: max(0, count)]

    def save(self) -> None:
        """Write what was counted."""
        if self._index is not None and self._searches:
            with self.changing() as state:
                self._commit(state.records, state.pages)

    def _commit(self, records: Mapping[str, Record], pages: Pages) -> None:
        """Write a new state, take it on, and forget windows that no passage has any more."""
        counted = {name: self._counted(record) for name, record in records.items()}
        before, searches = self._state.records, self._state.searches + self._searches
        if self._index is not None:
            self._cache.flush()
            self._stamp = self._index.write(Contents(self.made_for, searches, counted))
        self._state = State(counted, pages, searches)
        self._hits.clear()
        self._last.clear()
        self._searches = 0
        gone = {key for record in before.values() for key in record.keys}
        if gone := gone - {key for record in counted.values() for key in record.keys}:
            self._cache.remove(gone)

    def _counted(self, record: Record) -> Record:
        """A record with what was counted since it was written."""
        name = str(record.passage.id)
        if name not in self._hits:
            return record
        used = max(record.used, self._last[name])
        return replace(record, hits=record.hits + self._hits[name], used=used)

    def _refresh(self, on_loaded: OnPrepared | None = None) -> None:
        """Take over what the index holds, if that is not what this process knows."""
        if self._index is None:
            return
        stamp = self._index.stamp()
        if stamp == self._stamp:
            return
        contents = self._index.read() or Contents(self.made_for, 0, {})
        self._preparer.check(contents.made_for)
        old = self._state.records
        news = [
            record.passage
            for name, record in contents.records.items()
            if name not in old or not same_passage(old[name].passage, record.passage)
        ]
        prepared = self._preparer.prepare(news, on_loaded, ahead=False)
        made = {str(passage.id): one for passage, one in zip(news, prepared, strict=True)}
        records = {
            name: replace(record, keys=made[name].keys if name in made else old[name].keys)
            for name, record in contents.records.items()
        }
        gone = {name for name in old if name not in records} | set(made)
        pages = {name: one.pages for name, one in made.items() if one.pages is not None}
        self._state = State(records, self._state.pages.changed(gone, pages), contents.searches)
        self._stamp = stamp
