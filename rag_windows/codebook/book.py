"""Passages that stay encoded, of which each question reads the few that suit it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rag_windows.cache.keys import fields
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.codebook.holdings import Holdings, OnPrepared, Preparer, State
from rag_windows.codebook.index import Index, Record, require_json, same_passage
from rag_windows.engine import Engine
from rag_windows.errors import InputError, MethodError
from rag_windows.methods import Codebook, Method, chain, resolve
from rag_windows.passage import Note, Passage
from rag_windows.request import BatchRequest, Messages, PassageLike
from rag_windows.sampling import whole_number


@dataclass(frozen=True, slots=True)
class Added:
    """What adding or updating did.

    Attributes:
        ids: of each passage given, in order; None for one that has no text and was not kept.
        evicted: ids of passages that had to go because the book was full, least useful first.
        notes: on blank, repeated and split passages; ``Note.passage`` counts those given.
    """

    ids: tuple[str | None, ...]
    evicted: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class Retrieved:
    """A passage that a query would read.

    Attributes:
        passage: as it was added.
        similarity: of its keys and the query's; see `Codebook`.
    """

    passage: Passage
    similarity: float


class PassageBook:
    """A store of encoded passages; give it to ``generate`` or ``stream`` in place of passages.

    Make one with `WindowedLM.codebook`. Each question reads the passages whose keys are most like
    its own, see `Codebook`; of the others nothing is read but their pages' keys, which are held in
    host memory (4 bytes a number, one key a page of each compared layer). Windows are kept in a
    passage cache of the book's own. With a folder they outlast the process, and several processes
    may share it: each sees what the others change.

    A window that was evicted or damaged is encoded again from the passage's text, which the index
    ``book.json`` holds in the clear. Threads may add, remove and ask at once: an answer is of the
    passages that were there when its search began.

    Attributes:
        lm: the `WindowedLM`, with the book's cache.
        cache: that cache.
        method: how queries read passages, unless a request has another one.
        codebook: its part that chooses them.
        path: the folder, or None.
        prefix: the instruction that passages are encoded behind, or None.
    """

    def __init__(
        self,
        lm: Any,
        cache: PassageCache,
        method: Method,
        *,
        path: Path | None,
        prefix: str | None,
        conversation: Messages | None,
        wait_s: float,
        on_loaded: OnPrepared | None = None,
    ) -> None:
        codebook = codebook_of(method)
        if codebook is None:
            raise InputError(f"A book needs a Codebook among its methods, not {method!r}.")
        self.lm = lm
        self.cache = cache
        self.method = method
        self.codebook = codebook
        self.path = path
        self.prefix = prefix
        self._preparer = Preparer(
            lm.engine, cache, method, codebook, prefix=prefix, conversation=conversation
        )
        index = None if path is None else Index(path, wait_s)
        self._holdings = Holdings(self._preparer, cache, index, on_loaded)

    def __len__(self) -> int:
        return len(self._holdings.now().records)

    def __contains__(self, id: object) -> bool:
        return id in self._holdings.now().records

    def __iter__(self) -> Iterator[Passage]:
        return iter([record.passage for record in self._holdings.now().records.values()])

    def __getitem__(self, id: str) -> Passage:
        """The passage of an id; `KeyError` if there is none."""
        return self._holdings.now().records[id].passage

    @property
    def ids(self) -> tuple[str, ...]:
        """Of all passages, in the order in which they came."""
        return tuple(self._holdings.now().records)

    def add(self, passages: Iterable[PassageLike], *, on_added: OnPrepared | None = None) -> Added:
        """Encode passages and keep them; give many at once, the index is written once a call.

        A passage without an id gets one made from its title and text. One that is held already,
        word for word, stays as it is. In a full book the least useful passages go: those that the
        smallest share of the searches found since they came, never one of this call's own.

        Args:
            passages: as in ``generate``.
            on_added: called while they are encoded, with the passages done and all of them.

        Raises:
            InputError: an id that is held with another text (`update` replaces it) or given twice,
                more passages than the codebook's size, or one that can't be kept.
            NonFiniteError: one whose keys or values are no numbers; nothing is kept then.
            CacheError: the index can't be written.
        """
        return self._put(passages, on_added, replacing=False)

    def update(
        self, passages: Iterable[PassageLike], *, on_added: OnPrepared | None = None
    ) -> Added:
        """Replace passages by others of the same ids; what was counted about them begins anew.

        Raises:
            InputError: an id that is not held (`add` takes new ones); the others as in `add`.
        """
        return self._put(passages, on_added, replacing=True)

    def remove(self, ids: Iterable[str] | str) -> None:
        """Forget passages, and their windows where no other passage has the same.

        Raises:
            InputError: an id that is not held; none is removed then.
        """
        wanted = [ids] if isinstance(ids, str) else list(ids)
        with self._holdings.changing() as state:
            _require(state, wanted)
            self._holdings.change(wanted)

    def clear(self) -> None:
        """Forget all passages and their windows."""
        with self._holdings.changing() as state:
            self._holdings.change(state.records)

    def search(
        self, query: Messages, retrieve: int | None = None, *, prefix: str | None = None
    ) -> list[Retrieved]:
        """The passages that a query would read, most similar first.

        Args:
            query: as in ``generate``.
            retrieve: how many; None for the codebook's number.
            prefix: if it is given, it must be the book's.

        Raises:
            InputError: another prefix than the book's.
            CacheError: the model's weights were changed since the book was opened.
        """
        count = self.codebook.retrieve if retrieve is None else retrieve
        whole_number("retrieve", count)
        self._preparer.check(self._holdings.made_for)
        tokens = self._preparer.query(query, prefix)
        state = self._holdings.now()
        found = state.pages.rank(self.codebook, tokens, state.records, count)
        self._holdings.count(one for one, _ in found)
        return [Retrieved(state.records[one].passage, alike) for one, alike in found]

    def chosen(self, model: PreTrainedModel, asked: BatchRequest) -> tuple[Engine, BatchRequest]:
        """What answers a question, and the question with the passages that this book chose for it.

        Raises:
            InputError: this book is another model's, or the request has another prefix.
            MethodError: a method that can't read what the book keeps.
        """
        if self.lm.model is not model:
            raise InputError(
                "This book belongs to another model; ask the one that made it (book.lm)."
            )
        method = self.method if asked.method is None else resolve(asked.method)
        _check(self, method)
        codebook = codebook_of(method) or self.codebook
        found = self.search(asked.query, codebook.retrieve, prefix=asked.prefix)
        return self.lm.engine, replace(
            asked,
            passages=[one.passage for one in found],
            prefix=self.prefix if asked.prefix is None else asked.prefix,
            method=method,
        )

    def save(self) -> None:
        """Write what was counted since the last change, and wait for the disk."""
        self.cache.flush()
        self._holdings.save()

    def close(self) -> None:
        """Save, and close the book's cache."""
        self.save()
        self.cache.close()

    def __enter__(self) -> PassageBook:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _put(
        self, passages: Iterable[PassageLike], on_added: OnPrepared | None, *, replacing: bool
    ) -> Added:
        """Encode passages, and take them in."""
        given = self._named(passages)
        prepared = self._preparer.prepare(given, on_added)
        with self._holdings.changing() as state:
            if replacing:
                _require(state, [str(passage.id) for passage in given])
            new, ids = {}, []
            for passage, one in zip(given, prepared, strict=True):
                name = str(passage.id)
                held = state.records.get(name)
                same = held is not None and same_passage(held.passage, passage)
                if held is not None and not replacing and not same:
                    raise InputError(
                        f"The book holds another passage with the id {name!r}; replace it with "
                        "update(), or give this one an id of its own."
                    )
                if held is not None and one.pages is None:
                    raise InputError(
                        f"The new text of passage {name!r} is blank; use remove() to drop it."
                    )
                ids.append(None if one.pages is None else name)
                if one.pages is not None and not same:
                    new[name] = (Record(passage), one)
            kept = {name for name in ids if name is not None}
            size = self.codebook.size
            surplus = 0 if size is None else len(state.records.keys() | kept) - size
            evicted = self._holdings.least_useful(surplus, spared=kept)
            if new or evicted:
                self._holdings.change(evicted, new)
        return Added(tuple(ids), tuple(evicted), tuple(note for p in prepared for note in p.notes))

    def _named(self, passages: Iterable[PassageLike]) -> list[Passage]:
        """Passages with ids; one without gets one that only an equal text and title give."""
        if isinstance(passages, str | Passage | Mapping):
            raise InputError(
                "passages must be a list of passages, not a single one; wrap it in []."
            )
        named: dict[str, Passage] = {}
        given = []
        for one in map(Passage.of, passages):
            if not one.id:
                parts = [
                    text.encode("utf-8", "surrogatepass") for text in (one.title or "", one.text)
                ]
                one = replace(one, id=hashlib.sha256(fields(*parts)).hexdigest()[:32])
            if self.path is not None:
                require_json(one)
            if not same_passage(named.setdefault(str(one.id), one), one):
                raise InputError(f"Two different passages have the id {one.id!r}; rename one.")
            given.append(one)
        size = self.codebook.size
        if size is not None and len(named) > size:
            raise InputError(
                f"{len(named)} passages don't fit a book of size={size}; make one with "
                "Codebook(size=...) of more, or None."
            )
        return given


def codebook_of(method: Method) -> Codebook | None:
    """The codebook among a method and its readers."""
    return next((one for one in chain(method) if isinstance(one, Codebook)), None)


def _require(state: State, ids: Iterable[str]) -> None:
    missing = [one for one in ids if one not in state.records]
    if missing:
        raise InputError(f"The book holds no passage with the id {missing[0]!r}.")


def _check(book: PassageBook, method: Method) -> None:
    """Refuse a method that would not find its windows in the book."""
    reason = None
    codebook = codebook_of(method)
    if not method.windowed:
        reason = "it reads passages one after the other, and a book keeps windows"
    elif method.alignment != book.method.alignment:
        reason = "its windows stand at other positions than the book's"
    elif method.encoding != book.method.encoding:
        reason = (
            f"its windows are encoded in another way ({method.encoding!r}) than the book's "
            f"({book.method.encoding!r})"
        )
    elif codebook is not None and not codebook.compares_as(book.codebook):
        reason = "it compares other keys than the book keeps"
    if reason is not None:
        raise MethodError(
            f"{method.name} can't read this book: {reason}. Use the book's own method, or make a "
            "book for this one."
        )
