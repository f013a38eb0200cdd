"""Passages that stay encoded, of which each question reads the few that suit it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rag_windows.cache.codec import Entry
from rag_windows.cache.keys import fields
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.codebook.index import CodebookIndex, Record, Stamp, require_json
from rag_windows.engine import Engine
from rag_windows.errors import CacheError, InputError, MethodError
from rag_windows.kv import Window
from rag_windows.methods import Codebook, Method, chain, resolve
from rag_windows.methods.codebook import page_owners
from rag_windows.passage import Note, Passage, refuse_single
from rag_windows.prefill import EncodingPlan, complete
from rag_windows.request import BatchRequest, Messages, PassageLike, Request
from rag_windows.sampling import whole_number
from rag_windows.steps.selection import encode_query
from rag_windows.threads import Lock

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
class Added:
    """What adding or updating did.

    Attributes:
        ids: of each passage given, in order; None for one that has no text and was not stored.
        evicted: ids of passages that had to go because the book was full, longest unused first.
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


@dataclass(frozen=True, slots=True)
class _Held:
    """What a book holds at one moment; never changed, so that a search needs no lock.

    ``rows`` are the pages of all records in one matrix, ``owners`` whose each one is.
    """

    records: Mapping[str, Record]
    rows: torch.Tensor
    owners: torch.Tensor

    @classmethod
    def of(cls, records: Mapping[str, Record]) -> _Held:
        """These records, their pages as views of one matrix."""
        pages = [one.pages for one in records.values() if one.pages is not None]
        if not pages:
            return cls({}, torch.zeros(0, dtype=torch.float32), page_owners([]))
        sizes, rows = [len(own) for own in pages], torch.cat(pages)
        views = zip(records.items(), rows.split(sizes), strict=True)
        viewed = {name: replace(one, pages=view) for (name, one), view in views}
        return cls(viewed, rows, page_owners(sizes))


class PassageBook:
    """A store of encoded passages; give it to ``generate`` or ``stream`` in place of passages.

    Make one with `WindowedLM.codebook`. Each question reads the passages whose keys are most like
    its own, see `Codebook`; of the others nothing is read but their pages' keys, which are held in
    host memory (4 bytes a number, one key a page of each compared layer). Windows are stored in a
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
        engine, codebook = lm.engine, codebook_of(method)
        if codebook is None:
            method = codebook = Codebook(reader=method)
        if engine.numbered:
            raise InputError(
                "A header with a passage's number can't be kept in a book, because the number is "
                "only known with a question. Load the model with header='title' or header='none'."
            )
        if method.alignment != "left":
            raise InputError(
                f"The method {method.name!r} can't be used for a book, because its windows "
                "don't begin behind the prefix. Choose a method such as ape, pcw or mateicl."
            )
        if method.neighbours or method.sink:
            raise InputError(
                f"The method {method.name!r} can't be used for a book, which compares windows that "
                "begin behind the prefix. Leave neighbours and sink out."
            )
        self.lm = lm
        self.cache = cache
        self.method = method
        self.codebook = codebook
        self.path = path
        self.prefix = prefix
        self._encoder, self._access = engine.encoder, engine.encoder.access
        self._question: Messages = "?" if conversation is None else conversation
        asked = BatchRequest(self._question, [Passage("?")], prefix, method)
        request = Request.of(engine, asked)
        self._prefix_ids = request.parts.prefix_ids
        self._made_for = self._identity()
        self._index = None if path is None else CodebookIndex(path, wait_s)
        self._lock = Lock()
        self._held = _Held.of({})
        self._stamp: Stamp | None = None
        self._found: dict[str, float] = {}  # when, as far as it is not written yet
        self._refresh(on_loaded)

    def __len__(self) -> int:
        return len(self._now().records)

    def __contains__(self, id: object) -> bool:
        return id in self._now().records

    def __iter__(self) -> Iterator[Passage]:
        return iter([record.passage for record in self._now().records.values()])

    def __getitem__(self, id: str) -> Passage:
        """The passage of an id; `KeyError` if there is none."""
        return self._now().records[id].passage

    @property
    def ids(self) -> tuple[str, ...]:
        """Of all passages, in the order in which they came."""
        return tuple(self._now().records)

    def add(self, passages: Iterable[PassageLike], *, on_added: OnPrepared | None = None) -> Added:
        """Encode passages and store them; give many at once, the index is written once a call.

        A passage without an id gets one made from its title and text. One that is held already,
        word for word, stays as it is. In a full book those go that no search found for the longest
        time, never one of this call's own.

        Args:
            passages: as in ``generate``.
            on_added: called while they are encoded, with the passages done and all of them.

        Raises:
            InputError: an id that is held with another text (`update` replaces it) or given twice,
                more passages than the codebook's size, or one that can't be stored.
            NonFiniteError: one whose keys or values are no numbers; nothing is stored then.
            CacheError: the index can't be written.
        """
        return self._put(passages, on_added, replacing=False)

    def update(
        self, passages: Iterable[PassageLike], *, on_added: OnPrepared | None = None
    ) -> Added:
        """Replace passages by others of the same ids.

        Raises:
            InputError: an id that is not held (`add` takes new ones); the others as in `add`.
        """
        return self._put(passages, on_added, replacing=True)

    def remove(self, ids: Iterable[str] | str) -> None:
        """Forget passages, and their windows where no other passage has the same.

        Raises:
            InputError: an id that is not held; none is removed then.
        """
        gone = {ids} if isinstance(ids, str) else set(ids)
        with self._changing() as records:
            _require(records, gone)
            self._commit({name: one for name, one in records.items() if name not in gone})

    def clear(self) -> None:
        """Forget all passages and their windows."""
        with self._changing():
            self._commit({})

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
        self._check_made_for(self._made_for)
        tokens = self._query_keys(query, prefix)
        held = self._now()
        if not held.records:
            return []
        records = list(held.records.values())
        alike = self.codebook.similarities(tokens, held.rows, held.owners, len(records))
        best = torch.sort(alike, descending=True, stable=True).indices[:count].tolist()
        with self._lock:
            self._found |= dict.fromkeys((str(records[at].passage.id) for at in best), time.time())
        return [Retrieved(records[at].passage, float(alike[at])) for at in best]

    def chosen(self, model: PreTrainedModel, asked: BatchRequest) -> tuple[Engine, BatchRequest]:
        """The engine that answers a question, and the question with the passages chosen for it."""
        if self.lm.model is not model:
            raise InputError(
                "This book belongs to another model. Ask the model that made it (book.lm)."
            )
        method = self.method if asked.method is None else resolve(asked.method)
        codebook = codebook_of(method) or self.codebook
        if not (
            method.windowed
            and method.alignment == self.method.alignment
            and method.encoding == self.method.encoding
            and codebook.compares_as(self.codebook)
        ):
            raise MethodError(
                f"{method.name} can't read this book, because it encodes, places or compares "
                f"windows differently from {self.method!r}. Use the book's own method, or make "
                f"another book for {method.name}."
            )
        found = self.search(asked.query, codebook.retrieve, prefix=asked.prefix)
        return self.lm.engine, replace(
            asked,
            passages=[one.passage for one in found],
            prefix=self.prefix if asked.prefix is None else asked.prefix,
            method=method,
        )

    def save(self) -> None:
        """Write when passages were found since the last change, and wait for the disk."""
        self.cache.flush()
        if self._index is not None and self._found:
            with self._changing() as records:
                self._commit(records)

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
        given = self._named(passages)
        encoded, notes = self._encode(given, on_added)
        with self._changing() as records:
            if replacing:
                _require(records, [str(passage.id) for passage in given])
            new, ids = {}, []
            for record in encoded:
                name = str(record.passage.id)
                held = records.get(name)
                same = held is not None and held.passage == record.passage
                if held is not None and not replacing and not same:
                    raise InputError(
                        f"The book already holds another passage with the id {name!r}. Replace "
                        "that passage with update(), or give this one an id of its own."
                    )
                if held is not None and record.pages is None:
                    raise InputError(
                        f"The new text of passage {name!r} is blank. To drop the passage, use "
                        "remove()."
                    )
                ids.append(None if record.pages is None else name)
                if record.pages is not None and not same:
                    new[name] = record
            size = self.codebook.size
            surplus = 0 if size is None else len(records.keys() | new.keys()) - size
            others = [record for name, record in records.items() if name not in ids]
            unused = [str(one.passage.id) for one in sorted(others, key=self._used)]
            evicted = unused[: max(0, surplus)]
            if new or evicted:
                remaining = {name: one for name, one in records.items() if name not in evicted}
                self._commit({**remaining, **new})
        return Added(tuple(ids), tuple(evicted), notes)

    def _named(self, passages: Iterable[PassageLike]) -> list[Passage]:
        """Passages with ids; one without gets one that only an equal text and title give."""
        refuse_single(passages)
        named: dict[str, Passage] = {}
        given = []
        for one in map(Passage.of, passages):
            if not one.id:
                texts = (one.title or "", one.text)
                parts = [text.encode("utf-8", "surrogatepass") for text in texts]
                one = replace(one, id=hashlib.sha256(fields(*parts)).hexdigest()[:32])
            if self.path is not None:
                require_json(one)
            if named.setdefault(str(one.id), one) != one:
                raise InputError(f"Two different passages have the id {one.id!r}. Rename one.")
            given.append(one)
        size = self.codebook.size
        if size is not None and len(named) > size:
            raise InputError(
                f"{len(named)} passages do not fit a book of size={size}. Make a larger one with "
                "Codebook(size=...), or with size=None."
            )
        return given

    # What is held: changed by one thread and process at a time

    def _now(self) -> _Held:
        """What the book holds now, changes of other processes included."""
        if self._index is not None and self._index.stamp() != self._stamp:
            # Without the lock of all processes: the index is replaced as a whole, and a question
            # must not wait for somebody's change.
            with self._lock:
                self._refresh()
        return self._held

    @contextmanager
    def _changing(self) -> Iterator[Mapping[str, Record]]:
        """Be the only one that changes the book; gives its records."""
        # In this order: threads that ask need this process's lock, and must not wait for others.
        with nullcontext() if self._index is None else self._index.locked(), self._lock:
            self._refresh()
            yield self._held.records

    def _commit(self, records: Mapping[str, Record]) -> None:
        """Write records, take them on, and forget windows that none of them has."""
        records = {name: replace(one, used=self._used(one)) for name, one in records.items()}
        if self._index is not None:
            self.cache.flush()
            self._stamp = self._index.write(self._made_for, records.values())
        before, self._held = self._held.records, _Held.of(records)
        self._found.clear()
        gone = {key for record in before.values() for key in record.keys}
        if gone := gone - {key for record in records.values() for key in record.keys}:
            self.cache.remove(gone)

    def _used(self, record: Record) -> float:
        return max(record.used, self._found.get(str(record.passage.id), 0.0))

    def _refresh(self, on_loaded: OnPrepared | None = None) -> None:
        """Take over what the index holds, if that is not what this process knows."""
        if self._index is None or (stamp := self._index.stamp()) == self._stamp:
            return
        made_for, records = self._index.read() or (self._made_for, {})
        self._check_made_for(made_for)
        old = self._held.records
        news = [
            record.passage
            for name, record in records.items()
            if name not in old or old[name].passage != record.passage
        ]
        made = {str(one.passage.id): one for one in self._encode(news, on_loaded)[0]}
        self._held = _Held.of(
            {name: replace(made.get(name) or old[name], used=r.used) for name, r in records.items()}
        )
        self._stamp = stamp

    # Passages and queries as the method encodes them, behind the book's prefix

    def _identity(self) -> dict[str, Any]:
        """All that windows depend on, by names for people; JSON."""
        model, tokenizer = self._access.identity()
        if model is None:
            raise CacheError(
                "This model can't have a book: it has forward hooks or a patched forward, so "
                "changes of it can't be noticed. Remove them."
            )
        return {
            "model": model.hex(),
            "tokenizer": tokenizer.hex(),
            "prefix": list(self._prefix_ids),
            "encoding": self.method.encoding,
        }

    def _check_made_for(self, made_for: Mapping[str, Any]) -> None:
        now = self._identity()
        differs = [what for name, what in _WHAT.items() if made_for.get(name) != now[name]]
        if differs:
            raise CacheError(
                f"This book was made with {'; and with '.join(differs)} than now. Open it with "
                "the same settings, or make another book in a folder of its own."
            )

    def _encode(
        self, passages: Sequence[Passage], on_prepared: OnPrepared | None = None
    ) -> tuple[list[Record], tuple[Note, ...]]:
        """Records of passages, whose windows and pages are then in the cache."""
        if not passages:
            return [], ()
        engine: Engine = self.lm.engine
        asked = BatchRequest(self._question, passages, self.prefix, self.method)
        request = Request.of(engine, asked)
        parts = request.parts
        made: list[tuple[torch.Tensor, tuple[str, str]]] = []
        for first in range(0, len(parts.windows), CHUNK):
            made += self._pages(request.plan.only(range(len(parts.windows))[first : first + CHUNK]))
            if on_prepared is not None and len(made) < len(parts.windows):
                on_prepared(parts.windows[len(made)].passage, len(passages))
        self.cache.flush()
        if on_prepared is not None:
            on_prepared(len(passages), len(passages))
        own: dict[int, list[tuple[torch.Tensor, tuple[str, str]]]] = {}
        for one, window in zip(made, parts.windows, strict=True):
            own.setdefault(window.passage, []).append(one)
        first_of = {note.passage: note.of for note in parts.notes if note.of is not None}
        records, now = [], time.time()
        for number, passage in enumerate(passages):
            encoded = own.get(first_of.get(number, number), [])
            pages = torch.cat([rows for rows, _ in encoded]) if encoded else None
            keys = tuple(key for _, pair in encoded for key in pair)
            records.append(Record(passage, now, keys, pages))
        return records, parts.notes

    def _pages(self, plan: EncodingPlan) -> list[tuple[torch.Tensor, tuple[str, str]]]:
        """Each window's pages, and its key with that of its pages.

        A window of which only the pages are stored is encoded when a query reads it.
        """
        search, encoding = self.codebook, self.method.encoding
        depth = len(self._encoder.runner.sliding_windows)
        kind = f"pages {search.layers_of(depth)} {search.page} {search.similarity == 'cosine'}"
        model = bytes.fromhex(self._identity()["model"])
        whole = self._access.scope(model, self._prefix_ids, encoding)
        searched = self._access.scope(model, self._prefix_ids, f"{kind} of {encoding}")
        keys = [
            (whole.window_key(one.ids, one.start), searched.window_key(one.ids, one.start))
            for one in plan.windows
        ]
        disk = self.cache.disk
        found = {} if disk is None else disk.get_many([pages for _, pages in keys])
        missing = [at for at, (_, pages) in enumerate(keys) if pages not in found]
        encoded = complete(self._encoder.obtain(plan.only(missing), patient=True)).windows
        rows = {key: entry.window.keys[0][0] for key, entry in found.items()}
        for at, window in zip(missing, encoded, strict=True):
            key = keys[at][1]
            rows[key] = search.pages(window).float().cpu()
            if disk is not None:
                # As the cache stores windows: one layer and head, one token a page, and no values.
                pages = rows[key].unsqueeze(0)
                none = pages.new_zeros(*pages.shape[:2], 0)
                stored = Window((0,) * pages.shape[1], window.start, (pages,), (none,))
                disk.put(key, Entry(stored, cost_s=0.0, labels=(), created=time.time()))
        return [(rows[pair[1]], pair) for pair in keys]

    def _query_keys(self, query: Messages, prefix: str | None) -> torch.Tensor:
        """What is compared of a query behind the book's prefix: (T, width) fp32 on the CPU."""
        given = self.prefix if prefix is None else prefix
        asked = BatchRequest(query, [Passage("?")], given, self.method)
        request = Request.of(self.lm.engine, asked)
        if request.parts.prefix_ids != self._prefix_ids:
            raise InputError(
                "This request has another prefix (system prompt, system message or tools) than "
                "the one behind which the book's passages were encoded. Ask with the book's "
                "prefix, or make a book with prefix= or conversation= as in your requests."
            )
        plan = EncodingPlan.of(self._prefix_ids, [], self.method)
        encoded = complete(self._encoder.obtain(plan))
        window = encode_query(self._encoder.runner, encoded.prefix, request.parts.query_ids)
        return self.codebook.tokens(window).cpu()


def codebook_of(method: Method) -> Codebook | None:
    """The codebook among a method and its readers."""
    return next((one for one in chain(method) if isinstance(one, Codebook)), None)


def _require(records: Mapping[str, Record], ids: Iterable[str]) -> None:
    missing = [one for one in ids if one not in records]
    if missing:
        raise InputError(
            f"The book has no passage with the id {missing[0]!r}. The ids are in book.ids."
        )
