"""What a book holds: in memory, and in the index that processes share."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from rag_windows.cache.passage_cache import PassageCache
from rag_windows.codebook.blocks import Blocks, with_pages, without
from rag_windows.codebook.identity import require_same, same_passage
from rag_windows.codebook.index import Contents, Index, Stamp
from rag_windows.codebook.preparing import OnPrepared, Prepared, Preparer
from rag_windows.codebook.record import Record
from rag_windows.forks import in_children


@dataclass(frozen=True, slots=True)
class State:
    """What a book holds at one moment; never changed, so that a search needs no lock.

    Attributes:
        records: by id, in the order in which they came.
        blocks: the keys of all of them.
        searches: how many there were, as far as they are written.
    """

    records: Mapping[str, Record] = field(default_factory=dict)
    blocks: Blocks = ()
    searches: int = 0


class Holdings:
    """Changes a book's state, one thread and process at a time.

    Args:
        preparer: encodes what another process added.
        cache: in which the windows are.
        index: the file, or None.
        on_loaded: told of passages that are prepared now because the index holds them.

    Raises:
        CacheError: the index is damaged, or was made for something else.
    """

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

    def put(self, new: Mapping[str, tuple[Record, Prepared]], evicted: Sequence[str]) -> None:
        """Take in passages in place of those of the same ids, and drop others; while `changing`.

        Args:
            new: by id.
            evicted: ids to drop.
        """
        old = self._state
        searches = old.searches + self._searches
        fresh = {
            name: replace(record, keys=one.keys, hits=0, since=searches, used=searches)
            for name, (record, one) in new.items()
        }
        gone = set(evicted)
        # A replaced passage keeps its place.
        records = {
            name: fresh.get(name, record)
            for name, record in old.records.items()
            if name not in gone
        }
        blocks = without(old.blocks, gone | set(new))
        pages = {name: one.pages for name, (_, one) in new.items() if one.pages is not None}
        self._commit(records | fresh, with_pages(blocks, pages))

    def drop(self, ids: Iterable[str]) -> None:
        """Forget passages; while `changing`."""
        gone = set(ids)
        records = {name: one for name, one in self._state.records.items() if name not in gone}
        self._commit(records, without(self._state.blocks, gone))

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
                self._commit(state.records, state.blocks)

    def _commit(self, records: Mapping[str, Record], blocks: Blocks) -> None:
        """Write a new state, and take it on when it is written."""
        counted = {name: self._counted(record) for name, record in records.items()}
        searches = self._state.searches + self._searches
        if self._index is not None:
            self._cache.flush()
            self._stamp = self._index.write(Contents(self.made_for, searches, counted))
        before, self._state = self._state, State(counted, blocks, searches)
        self._hits.clear()
        self._last.clear()
        self._searches = 0
        self._forget(before)

    def _forget(self, before: State) -> None:
        """Take windows out of the cache that no passage has any more."""
        records = self._state.records
        changed = [one for name, one in before.records.items() if records.get(name) is not one]
        gone = {key for record in changed for key in record.keys}
        if gone:
            gone -= {key for record in records.values() for key in record.keys}
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
        require_same(contents.made_for, self._preparer.made_for())
        old = self._state.records
        news = [
            record
            for name, record in contents.records.items()
            if name not in old or not same_passage(old[name].passage, record.passage)
        ]
        passages = [record.passage for record in news]
        prepared = self._preparer.prepare(passages, on_loaded, ahead=False)
        made = {str(r.passage.id): one for r, one in zip(news, prepared, strict=True)}
        records = {
            name: replace(record, keys=made[name].keys if name in made else old[name].keys)
            for name, record in contents.records.items()
        }
        gone = {name for name in old if name not in records} | set(made)
        pages = {name: one.pages for name, one in made.items() if one.pages is not None}
        blocks = with_pages(without(self._state.blocks, gone), pages)
        self._state = State(records, blocks, contents.searches)
        self._stamp = stamp
