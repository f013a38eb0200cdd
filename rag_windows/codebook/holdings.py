"""What a book holds: keys to search and records in memory, and the index that processes share."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from rag_windows.cache.passage_cache import PassageCache
from rag_windows.codebook.index import Contents, Index, Record, Stamp, same_passage
from rag_windows.codebook.preparing import OnPrepared, Prepared, Preparer
from rag_windows.methods import Codebook
from rag_windows.methods.codebook import page_owners
from rag_windows.threads import in_children


@dataclass(frozen=True, slots=True)
class Pages:
    """The keys that are searched: (P, width) fp32 rows in host memory, and whose each one is."""

    ids: tuple[str, ...] = ()
    owners: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    rows: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0))

    def changed(self, gone: Collection[str], new: Mapping[str, torch.Tensor]) -> Pages:
        """Without some passages, and with others, by their ids, behind the rest."""
        kept = [index for index, one in enumerate(self.ids) if one not in gone]
        rows, owners = self.rows, self.owners
        if len(kept) < len(self.ids):
            places = torch.full((len(self.ids),), -1)
            places[kept] = torch.arange(len(kept))
            present = places[owners] >= 0
            rows, owners = rows[present], places[owners][present]
        if new:
            added = page_owners([len(own) for own in new.values()]) + len(kept)
            owners = torch.cat([owners, added])
            rows = torch.cat([*([rows] if len(rows) else []), *new.values()])
        return Pages((*(self.ids[index] for index in kept), *new), owners, rows)

    def rank(
        self, search: Codebook, tokens: torch.Tensor, order: Iterable[str], count: int
    ) -> list[tuple[str, float]]:
        """The most similar passages with their similarity, highest first; of equal ones in order.

        ``tokens`` are (T, width) of the query, from `Codebook.tokens`.
        """
        if not self.ids:
            return []
        alike = search.similarities(tokens, self.rows, self.owners, len(self.ids))
        least = torch.topk(alike, min(count, len(alike))).values[-1]
        # All that are as similar as the last one, so that ties are broken by the order alone.
        near = torch.nonzero(alike >= least).flatten().tolist()
        found = [(self.ids[index], float(alike[index])) for index in near]
        places = {one: place for place, one in enumerate(order)}
        return sorted(found, key=lambda one: (-one[1], places[one[0]]))[:count]


@dataclass(frozen=True, slots=True)
class State:
    """What a book holds at one moment; never changed, so that a search needs no lock.

    ``records`` are by id, in the order in which they came; ``searches`` as far as they are written.
    """

    records: Mapping[str, Record] = field(default_factory=dict)
    pages: Pages = field(default_factory=Pages)
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
