"""What a book holds: keys to search and records in memory, and the index that processes share."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from rag_windows.cache.passage_cache import PassageCache
from rag_windows.codebook.index import Contents, Index, Record, Stamp, require_same, same_passage
from rag_windows.codebook.preparing import OnPrepared, Prepared, Preparer
from rag_windows.methods.key_search import KeySearch, page_owners
from rag_windows.threads import in_children

MOST_PASSAGES = 4096
"""Passages of one block at most, so that a change copies little."""


@dataclass(frozen=True, slots=True)
class Block:
    """The keys of some passages.

    Attributes:
        ids: of the passages.
        owners: (P,) int64, whose page each row is.
        rows: (P, width) fp32 in host memory, from `KeySearch.pages`.
    """

    ids: tuple[str, ...]
    owners: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, pages: Mapping[str, torch.Tensor]) -> Block:
        """A block of passages, at least one, by their ids."""
        owners = page_owners([len(rows) for rows in pages.values()])
        return cls(tuple(pages), owners, torch.cat(list(pages.values())))

    def without(self, ids: Collection[str]) -> Block | None:
        """The block without some passages; None if nothing is left."""
        kept = [index for index, one in enumerate(self.ids) if one not in ids]
        if len(kept) == len(self.ids):
            return self
        if not kept:
            return None
        places = torch.full((len(self.ids),), -1)
        places[kept] = torch.arange(len(kept))
        owners = places[self.owners]
        present = owners >= 0
        return Block(tuple(self.ids[i] for i in kept), owners[present], self.rows[present])


Blocks = tuple[Block, ...]


def with_pages(blocks: Blocks, pages: Mapping[str, torch.Tensor]) -> Blocks:
    """Blocks with more passages; small ones are joined, so that there are never many."""
    if not pages:
        return blocks
    grown = [*blocks, Block.of(pages)]
    while len(grown) > 1:
        first, second = grown[-2:]
        together = len(first.ids) + len(second.ids)
        if len(first.ids) > 2 * len(second.ids) or together > MOST_PASSAGES:
            break
        owners = torch.cat([first.owners, second.owners + len(first.ids)])
        joined = Block(first.ids + second.ids, owners, torch.cat([first.rows, second.rows]))
        grown[-2:] = [joined]
    return tuple(grown)


def without(blocks: Blocks, ids: Collection[str]) -> Blocks:
    """Blocks without some passages."""
    rest = (block.without(ids) for block in blocks)
    return tuple(block for block in rest if block is not None)


def rank(
    blocks: Blocks, search: KeySearch, tokens: torch.Tensor, order: Sequence[str], count: int
) -> list[tuple[str, float]]:
    """The most similar passages with their similarity, highest first.

    Args:
        blocks: to look in.
        search: how to compare.
        tokens: (T, width) of the query, from `KeySearch.tokens`.
        order: ids in the order in which equally similar ones are taken.
        count: how many.
    """
    found: list[tuple[str, float]] = []
    for block in blocks:
        alike = search.similarities(tokens, block.rows, block.owners, len(block.ids))
        kept = torch.topk(alike, min(count, len(alike))).values[-1]
        # All that are as similar as the last one, so that ties are broken by the order alone.
        near = torch.nonzero(alike >= kept).flatten().tolist()
        found += [(block.ids[index], float(alike[index])) for index in near]
    places = {one: place for place, one in enumerate(order)}
    found.sort(key=lambda one: (-one[1], places.get(one[0], len(places))))
    return found[:count]


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
