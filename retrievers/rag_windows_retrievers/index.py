"""Documents and their passages in one SQLite database: found by words and by meaning.

One file of a folder holds texts, words (FTS5) and vectors (sqlite-vec), so that a document comes,
changes and goes in one transaction, and whoever reads meanwhile, or starts after a crash, finds
whole documents only. What was removed is overwritten in the file, not just unlinked.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, LifoQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from rag_windows import Passage
from rag_windows.errors import DocumentError, InputError, RetrievalError, require
from rag_windows.threads import Lock, in_children
from rag_windows_retrievers import index_tables as tables
from rag_windows_retrievers.documents import (
    Document,
    DocumentFile,
    Skipped,
    found_files,
    no_text,
    path_names,
    read_all,
)
from rag_windows_retrievers.in_memory import (
    PROBE,
    Encoder,
    Model,
    Progress,
    Vectors,
    encoder_of,
    moved,
)
from rag_windows_retrievers.index_ranking import ByMeaning, ByWords, Where
from rag_windows_retrievers.retriever import (
    DEFAULT_K,
    DEPTH,
    ScoredPassage,
    check_k,
    fused,
    ranked_text,
)
from rag_windows_retrievers.splitting import DEFAULT_WORDS, split_document
from rag_windows_retrievers.words import VERSION

if TYPE_CHECKING:
    import apsw


FILE = "index.sqlite"
TOGETHER = 64
"""Files whose documents are written in one transaction."""


@dataclass(frozen=True, slots=True)
class IndexedDocument:
    """A document that an index holds.

    Attributes:
        id: its name, by which it is replaced and removed.
        source: the file that it came from, as labels name it; None if it was added as text.
        title: its title.
        sha256: of its title, text and metadata, in hexadecimal digits.
        added: when it came, or was last replaced, in seconds since 1970.
        passages: how many it has.
        size: of its passages' texts in UTF-8, in bytes.
    """

    id: str
    source: str | None
    title: str | None
    sha256: str
    added: float
    passages: int
    size: int


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """A file whose documents an index holds, or a document that was added as text.

    Attributes:
        name: the file's label, or the document's id.
        added: when the last of its documents came, in seconds since 1970.
        documents: how many it has.
        passages: how many these have.
        size: of the passages' texts in UTF-8, in bytes.
    """

    name: str
    added: float
    documents: int
    passages: int
    size: int


@dataclass(frozen=True, slots=True)
class IndexCounts:
    """How many files, documents and passages an index holds; see `IndexedFile`."""

    files: int
    documents: int
    passages: int


@dataclass(frozen=True, slots=True)
class Changes:
    """What a call has changed in an index.

    Attributes:
        added, replaced, removed: ids of documents.
        unchanged: how many documents were there already, as they are.
        skipped: files, lines and pages that were left out, and why.
    """

    added: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    unchanged: int = 0
    skipped: tuple[Skipped, ...] = ()

    @property
    def stale(self) -> tuple[str, ...]:
        """Ids of documents whose old windows no answer may read: those replaced and removed."""
        return (*self.replaced, *self.removed)

    def __bool__(self) -> bool:
        return bool(self.added or self.replaced or self.removed)

    def and_then(self, later: Changes) -> Changes:
        """Both, one after the other."""
        return Changes(
            self.added + later.added,
            self.replaced + later.replaced,
            self.removed + later.removed,
            self.unchanged + later.unchanged,
            self.skipped + later.skipped,
        )


@dataclass(slots=True)
class _Entry:
    """A document as it is written."""

    id: str
    source: str | None
    title: str | None
    sha256: str
    passages: Sequence[Passage]


class Index:
    """Documents in a folder, whose passages are found by words and, with a model, by meaning.

    Several threads and processes may use one index at once. Every question sees what was there
    when it was asked. `retrieve` fuses both rankings; `by_words` and `by_meaning` are each of them.

    Args:
        folder: of the index; made where it is missing.
        model: embeds passages: an `Encoder`, or what `SentenceEncoder` takes; None for words only.
            Passages that have no vector yet get one when the index is opened.
        words: of a passage's text at most, see `split_document`; the same for the whole index, so
            None is what an index has, and `DEFAULT_WORDS` in a new one.
        root: folder that labels of files are relative to; None is the working directory, and for an
            index that exists the one that it began with.
        progress: called with the number of passages embedded and of all; see `progress_bar`.

    Raises:
        RetrievalError: the folder can't be read or written, is damaged, of another version, or
            holds the vectors of another model.
        InputError: passages were split otherwise before.
        ModelLoadError, MissingExtraError: see `SentenceEncoder`.
    """

    def __init__(
        self,
        folder: str | Path,
        model: Model | None = None,
        *,
        words: int | None = None,
        root: str | Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        require("An index on disk", "apsw", "sqlite-vec", extra="cli")
        self.folder, self.path = Path(folder), Path(folder) / FILE
        self.encoder: Encoder | None = None
        self._lock = Lock()
        self.dot = False
        self.after_fork()
        in_children(self)
        self._listed: tuple[int, tuple[Passage, ...]] | None = None
        with tables.readable(self.path):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RetrievalError(
                    f"The index {self.folder} can't be written: {error.strerror}. Check the "
                    "folder, its permissions and the free space."
                ) from error
            here = os.path.abspath(root if root is not None else ".")
            self._begin(None if words is None else f"words={words}", here)
        if model is not None:
            self._attach(encoder_of(model), progress)

    def after_fork(self) -> None:
        """In a child, the parent's connections are not used."""
        self._free: LifoQueue[apsw.Connection] = LifoQueue()
        # Its tokenizer holds a connection, so that nothing else closes one.
        weakref.finalize(self, _close, self._free, os.getpid()).atexit = False

    # What is there.

    @property
    def version(self) -> int:
        """Grows with every change, whichever process makes it."""
        with self.reading() as connection:
            return int(tables.setting(connection, "version") or 0)

    def __len__(self) -> int:
        with self.reading() as connection:
            return int(tables.first(connection, "SELECT count(*) FROM passages")[0])

    @property
    def passages(self) -> tuple[Passage, ...]:
        """All passages, document after document, as `retrieve` finds them but without scores."""
        with self.reading() as connection:
            version = int(tables.setting(connection, "version") or 0)
            if self._listed is None or self._listed[0] != version:
                numbers = tables.select(
                    connection, "SELECT number FROM passages ORDER BY document, place, number"
                )
                made = tables.passages_at(connection, [number for (number,) in numbers])
                self._listed = version, tuple(made)
            return self._listed[1]

    def passages_of(self, ids: Collection[str]) -> tuple[Passage, ...]:
        """The passages of some documents, in order."""
        return self._passages("SELECT number FROM documents WHERE id = ? ORDER BY number", ids)

    def concerned(self, names: Collection[str]) -> tuple[Passage, ...]:
        """The passages that `remove` would remove, in order."""
        documents = "SELECT number FROM documents WHERE id = ?1 OR source = ?1 ORDER BY number"
        return self._passages(documents, names)

    def in_file(self, name: str) -> tuple[Passage, ...]:
        """The passages of a file, see `files`, in order."""
        documents = "SELECT number FROM documents WHERE coalesce(source, id) = ? ORDER BY number"
        return self._passages(documents, [name])

    def _passages(self, documents: str, names: Iterable[str]) -> tuple[Passage, ...]:
        """The passages, each once, of the documents that a query finds for some names."""
        with self.reading() as connection:
            of = dict.fromkeys(number for (number,) in tables.each(connection, documents, names))
            found = tables.each(
                connection,
                "SELECT number FROM passages WHERE document = ? ORDER BY place, number",
                of,
            )
            return tuple(tables.passages_at(connection, [number for (number,) in found]))

    def documents_with(self, texts: Collection[str]) -> list[str]:
        """Ids of the documents that have a passage of one of these texts; reads every passage."""
        wanted = frozenset(texts)
        with self.reading() as connection:
            rows: Iterable[Any] = connection.execute(  # one by one: it is every text
                "SELECT d.id, p.text FROM passages p JOIN documents d ON p.document = d.number "
                "ORDER BY d.number"
            )
            return list(dict.fromkeys(id for id, text in rows if text in wanted))

    def named(self, ids: Collection[str]) -> tuple[Passage, ...]:
        """Passages by their own ids, in the order of the ids; unknown ones are left out."""
        with self.reading() as connection:
            found = tables.passages_named(connection, ids)
            return tuple(tables.passages_at(connection, [number for number, *_ in found]))

    def originals(self, ids: Collection[str]) -> dict[str, Any]:
        """What `add_passages` was given to keep of passages, by their own ids."""
        with self.reading() as connection:
            found = tables.each(
                connection,
                "SELECT id, original FROM passages WHERE id = ? AND original IS NOT NULL",
                ids,
            )
            return {id: json.loads(original) for id, original in found}

    def vectors(self, ids: Collection[str]) -> dict[str, Vectors]:
        """Vectors of passages, by their own ids; those without one are left out."""
        with self.reading() as connection:
            found = tables.each(
                connection,
                "SELECT p.id, v.embedding FROM passages p JOIN vectors v ON v.rowid = p.number "
                "WHERE p.id = ?",
                ids if tables.has_vectors(connection) else (),
            )
            return {id: np.frombuffer(one, dtype=np.float32) for id, one in found}

    def documents(
        self,
        id: str | None = None,
        *,
        source: str | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> list[IndexedDocument]:
        """The documents, or those of one id or file, in the order in which they came.

        At most `limit` of them, those behind the document `after`; none if it is not there. Page by
        page, of several documents of one id only the last that came is listed.
        """
        with self.reading() as connection:
            rows = connection.execute(
                "SELECT d.id, d.source, d.title, d.sha256, d.added, count(p.number), "
                "coalesce(sum(length(CAST(p.text AS BLOB))), 0) "
                "FROM documents d LEFT JOIN passages p ON p.document = d.number "
                "WHERE (?1 IS NULL OR d.id = ?1) AND (?2 IS NULL AND ?3 < 0 OR d.number = "
                "(SELECT max(number) FROM documents WHERE id = d.id)) AND (?2 IS NULL OR "
                "d.number > (SELECT max(number) FROM documents WHERE id = ?2)) AND (?4 IS NULL OR "
                "d.source = ?4) GROUP BY d.number ORDER BY d.number LIMIT ?3",
                (id, after, -1 if limit is None else limit, source),
            )
            return [IndexedDocument(*row) for row in rows]

    def files(
        self, name: str | None = None, *, after: str | None = None, limit: int | None = None
    ) -> list[IndexedFile]:
        """The files that documents came from, and documents of none; see `documents`."""
        with self.reading() as connection:
            rows = connection.execute(
                "SELECT coalesce(d.source, d.id) AS name, max(d.added), "
                "count(DISTINCT d.number), count(p.number), "
                "coalesce(sum(length(CAST(p.text AS BLOB))), 0) "
                "FROM documents d LEFT JOIN passages p ON p.document = d.number "
                "WHERE ?1 IS NULL OR coalesce(d.source, d.id) = ?1 GROUP BY name "
                "HAVING ?2 IS NULL OR max(d.number) > (SELECT max(number) FROM documents "
                "WHERE coalesce(source, id) = ?2) ORDER BY max(d.number) LIMIT ?3",
                (name, after, -1 if limit is None else limit),
            )
            return [IndexedFile(*row) for row in rows]

    def counts(self) -> IndexCounts:
        """How much there is."""
        with self.reading() as connection:
            row = tables.first(
                connection, "SELECT count(DISTINCT coalesce(source, id)), count(*) FROM documents"
            )
            files, documents = row
            return IndexCounts(files, documents, int(tables.setting(connection, "passages") or 0))

    def skipped(self) -> list[Skipped]:
        """Files, lines and pages that could not be read or were left out, as they stand now."""
        with self.reading() as connection:
            rows = tables.select(connection, "SELECT skipped FROM files ORDER BY source")
        return [Skipped(**one) for (text,) in rows for one in json.loads(text)]

    def roots(self) -> list[str]:
        """The paths that `follow` was given, of which files are still known and not removed."""
        with self.reading() as connection:
            rows = tables.select(
                connection,
                "SELECT DISTINCT root FROM files WHERE source NOT IN "
                "(SELECT source FROM removed WHERE id = ?) ORDER BY root",
                (_WHOLE,),
            )
            return [os.fsdecode(root) for (root,) in rows]

    def sources(self, below: str | Path | None = None) -> list[str]:
        """Labels of the files that `follow` has found, also of those that were removed since.

        Args:
            below: a file, a folder or a URL; None for all files.
        """
        if below is not None and not os.fsdecode(below).strip():
            raise InputError("below must be the path of a file or folder, not an empty one.")
        at = None if below is None else _absolute(os.fsdecode(below)).rstrip("/")
        with self.reading() as connection:
            rows = tables.select(connection, "SELECT source, path FROM files ORDER BY source")
            return [one for one, path in rows if at is None or _below(os.fsdecode(path), at)]

    @property
    def model_name(self) -> str | None:
        """The embedding model whose vectors the index holds; None where it holds none."""
        with self.reading() as connection:
            return tables.setting(connection, "model")

    @property
    def nbytes(self) -> int:
        """Its size on disk, the log of changes included."""
        files = (f"{self.path}{ending}" for ending in ("", "-wal", "-shm"))
        return sum(os.stat(one).st_size for one in files if os.path.exists(one))

    def stale_since(self, version: int) -> tuple[int, list[str] | None]:
        """The version now, and ids of documents that were replaced or removed since another one.

        None in their place where so much has changed that nobody remembers.
        """
        with self.reading() as connection:
            now = int(tables.setting(connection, "version") or 0)
            forgotten = int(tables.setting(connection, "forgotten") or 0)
            if version < forgotten:
                return now, None
            rows = tables.select(connection, "SELECT id FROM stale WHERE version > ?", (version,))
            return now, list(dict.fromkeys(one for (one,) in rows))

    # How it changes.

    def add(
        self,
        documents: Document | Iterable[Document],
        *,
        source: str | None = None,
        progress: Progress | None = None,
    ) -> Changes:
        """Add documents in one transaction; one whose id is there takes the place of the old one.

        Args:
            documents: one or several.
            source: a file's label, where they are all that a file holds, such as one that was sent
                by its bytes: then all that was there of this file goes. `remove` takes the label.
            progress: called with the number of passages embedded and of all.

        Raises:
            InputError: a document's metadata can't be saved as JSON, or it is no document.
            RetrievalError: the index can't be written; then nothing of it changes.
        """
        listed = [documents] if isinstance(documents, Document) else list(documents)
        if source is not None:
            return self._put_file(source, [self._entry(one, source) for one in listed], progress)
        entries = [self._entry(one, None) for one in {one.id: one for one in listed}.values()]
        return self._put(entries, progress)

    def add_passages(
        self,
        passages: Iterable[Passage],
        *,
        vectors: Sequence[Sequence[float]] | None = None,
        originals: Sequence[Any] | None = None,
        progress: Progress | None = None,
    ) -> Changes:
        """Add passages as they are, in one transaction; one whose id is there is replaced.

        Each belongs to the document that it names, else to one of its own. A passage without an id
        is refused, since nobody could replace or remove it.

        Args:
            passages: what is added.
            vectors: one for each passage, of an index without a model; compared by cosine. A vector
                of zeros is left out.
            originals: for each passage what `originals` gives back, as JSON has it, or None.
            progress: called with the number of passages embedded and of all.

        Raises:
            InputError: a passage has no id, metadata can't be saved, or vectors don't fit.
            RetrievalError: the index can't be written; then nothing of it changes.
        """
        given = list(passages)
        if any(one.id is None for one in given):
            raise InputError("A passage that is added needs an id. Give it one: Passage(id=...).")
        sources = [None] * len(given) if originals is None else list(originals)
        own = None if vectors is None else self._given(given, vectors)
        made = self._embedded(given, progress)
        with self._writing() as connection:
            if own is not None:
                self._check_given(connection, own)
            now = time.time()
            changed: dict[str, None] = {}
            fresh: dict[str, None] = {}
            touched: set[int] = set()
            for at, one in enumerate(given):
                name = one.document or str(one.id)
                old = tables.passages_named(connection, [str(one.id)])
                changed.update((document, None) for _, _, document in old)
                touched.update(number for _, number, _ in old)
                tables.drop_passages(connection, [number for number, _, _ in old])
                row = tables.first(
                    connection,
                    "SELECT number FROM documents WHERE id = ? ORDER BY number LIMIT 1",
                    (name,),
                )
                if row is None:
                    number = tables.insert_document(connection, name, None, one.title, "", now)
                    fresh[name] = None
                else:
                    number = row[0]
                    connection.execute("UPDATE documents SET sha256 = '' WHERE number = ?", row)
                if own is not None:
                    made = {} if (vector := own[at]) is None else {tables.digest_of(one): vector}
                self._insert(connection, number, [one], made, given=True, original=sources[at])
            tables.touch(connection, touched)
            tables.drop_empty(connection, touched)
            stale = [one for one in changed if one not in fresh]
            there = tables.each(connection, "SELECT DISTINCT id FROM documents WHERE id = ?", stale)
            left = [one for (one,) in there]
            tables.note_stale(connection, stale)
        gone = tuple(one for one in stale if one not in left)
        return Changes(tuple(fresh), tuple(left), gone)

    def remove(self, ids: Collection[str] | str) -> Changes:
        """Remove documents by id, or files by their label, for good.

        A file that is still in its folder stays out until `follow` takes it with ``again=True``.
        """
        names = [ids] if isinstance(ids, str) else list(ids)
        with self._writing() as connection:
            gone: list[str] = []
            for name in names:
                rows = tables.select(
                    connection,
                    "SELECT number, id, source FROM documents WHERE id = ?1 OR source = ?1",
                    (name,),
                )
                gone += [one for _, one, _ in rows]
                tables.drop_documents(connection, [number for number, *_ in rows])
                out = [(source, one) for _, one, source in rows if source is not None]
                if tables.first(connection, "SELECT 1 FROM files WHERE source = ?", (name,)):
                    out.append((name, _WHOLE))
                    connection.execute("UPDATE files SET skipped = '[]' WHERE source = ?", (name,))
                tables.keep_out(connection, out)
            removed = tuple(dict.fromkeys(gone))
            tables.note_stale(connection, removed)
        return Changes(removed=removed)

    def remove_passages(self, ids: Collection[str]) -> Changes:
        """Remove passages by their own ids, and documents of which none is left."""
        with self._writing() as connection:
            rows = tables.passages_named(connection, dict.fromkeys(ids))
            names = list(dict.fromkeys(name for _, _, name in rows))
            documents = {number for _, number, _ in rows}
            tables.touch(connection, documents)
            tables.drop_passages(connection, [number for number, _, _ in rows])
            emptied = tables.drop_empty(connection, documents)
            # A file that is read again brings back what it had only where its text has changed.
            tables.keep_out(connection, emptied)
            tables.note_stale(connection, names)
        return Changes(removed=tuple(names))

    def follow(
        self,
        paths: str | Path | Iterable[str | Path],
        *,
        again: bool = False,
        strict: bool = False,
        missing: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> Changes:
        """Make the index hold what the files behind some paths hold now.

        Only files whose size or time has changed are read, and those that could not be read before
        for a missing package or a permission. What is gone from below the paths, or can't be read
        any more, goes from the index; documents of other paths stay.

        Args:
            paths: see `load_documents`.
            again: whether to take files again that `remove` took out.
            strict: whether a file that can't be read is an error; else it is reported.
            missing: whether a path that does not exist any more is reported, too, and what came
                from it goes.
            storage_options: see `load_documents`.
            progress: called with the number of files read and of all that have to be.

        Raises:
            DocumentError: a path does not exist, or, with ``strict``, a file can't be read.
            RetrievalError, InputError: see `add`; files before the one concerned are there.
        """
        with self.reading() as connection:
            root = Path(str(tables.setting(connection, "root")))
            known = {row[0]: row[1:] for row in tables.select(connection, _FILES)}
            counts = dict(tables.select(connection, _COUNTS))
            removed = _removed(connection)
        out = {} if again else removed
        changes = Changes()
        present: set[str] = set()
        todo: list[tuple[DocumentFile, str]] = []
        given = path_names(paths)
        names = [_absolute(one) for one in given]
        for path, name in zip(given, names, strict=True):
            try:
                # By the path as it was given, which is what an error names.
                found = list(found_files([path], root=root, storage_options=storage_options))
            except DocumentError as error:
                if not missing:
                    raise
                found = [Skipped(name, str(error).removeprefix(f"{name}: "), problem=True)]
            for one in found:
                if isinstance(one, Skipped):
                    changes = changes.and_then(Changes(skipped=(one,)))
                    continue
                if one.label in present:
                    continue  # it lies below another path, too
                present.add(one.label)
                if _WHOLE in out.get(one.label, ()):
                    continue
                before = known.get(one.label)
                back = again and one.label in removed
                if back or before is None or _stat(one) != before[1:3]:
                    todo.append((one, name))
                else:
                    old = tuple(Skipped(**each) for each in json.loads(before[3]))
                    changes = changes.and_then(
                        Changes(unchanged=counts.get(one.label, 0), skipped=old)
                    )
        bad = [one for one in changes.skipped if one.problem]
        if strict and bad:
            raise _unreadable(bad[0])
        gone = [
            source
            for source, (root_of, *_, path) in known.items()
            if source not in present
            and (os.fsdecode(root_of) in names or _is_gone(os.fsdecode(path), names))
        ]
        if gone:
            changes = changes.and_then(self._forget(gone))
        for start in range(0, len(todo), TOGETHER):
            if progress is not None:
                progress(start, len(todo))
            some = todo[start : start + TOGETHER]
            changes = changes.and_then(self._take(some, out, removed, strict))
        if progress is not None:
            progress(len(todo), len(todo))
        return changes

    def empty_log(self) -> bool:
        """Empty the log of changes, in which removed texts may still stand.

        Every change does so at its end, unless somebody reads for longer than two seconds. Then
        this is False, and True once it was called without such readers.
        """
        with self._lock, tables.readable(self.path), self._connection() as connection:
            return tables.empty_log(connection)

    def close(self) -> None:
        """Close the files; the index may be used again, which opens them."""
        _close(self._free, os.getpid())

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # How it is asked.

    @property
    def retriever(self) -> Index:
        """Itself, which is a `Retriever`."""
        return self

    @property
    def by_words(self) -> ByWords:
        """Okapi BM25 over titles and texts."""
        return ByWords(self)

    @property
    def by_meaning(self) -> ByMeaning:
        """Nearness of vectors.

        Raises:
            InputError: the index was opened without an embedding model.
        """
        if self.encoder is None:
            raise InputError("This index was opened without an embedding model. Give it one.")
        return ByMeaning(self)

    def retrieve(
        self, query: str, k: int = DEFAULT_K, where: Where | None = None
    ) -> list[ScoredPassage]:
        """Rank by words, and by meaning where there is a model, both fused; see `Retriever`.

        Only passages for which `where` is true are found.
        """
        check_k(k)
        with self.snapshot():
            if self.encoder is None:
                return self.by_words.retrieve(query, k, where)
            depth = max(k, DEPTH)
            words = self.by_words.retrieve(query, depth, where)
            return fused([words, self.by_meaning.retrieve(query, depth, where)], (1.0, 1.0), k)

    def nearest(
        self, vector: Sequence[float], k: int = DEFAULT_K, where: Where | None = None
    ) -> list[ScoredPassage]:
        """Rank by nearness to a vector of the model that made the index's; none are there: none."""
        return ByMeaning(self).nearest(vector, k, where)

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Inside the block, this thread sees the index as it was at its beginning."""
        with self.reading():
            yield

    # Connections.

    @contextmanager
    def reading(self) -> Iterator[apsw.Connection]:
        """A connection that sees one version; the same one inside a block that has one."""
        held = getattr(_held, "of", {}).get(id(self))
        if held is not None:
            yield held
            return
        with tables.readable(self.path), self._connection() as connection:
            connection.execute("BEGIN")
            # What is seen is what stands there at the first look.
            tables.select(connection, "SELECT 1 FROM settings LIMIT 1")
            _held.of = {**getattr(_held, "of", {}), id(self): connection}
            try:
                yield connection
            finally:
                _held.of = {key: one for key, one in _held.of.items() if key != id(self)}
                with suppress(Exception):  # of a connection that is broken
                    connection.execute("ROLLBACK")

    @contextmanager
    def _writing(self) -> Iterator[apsw.Connection]:
        """A connection that changes the index as a whole or not at all."""
        with self._lock, tables.readable(self.path), self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                version = int(tables.setting(connection, "version") or 0) + 1
                tables.put(connection, "version", str(version))
                connection.execute("COMMIT")
            except BaseException:
                with suppress(Exception):  # SQLite may have rolled back already
                    connection.execute("ROLLBACK")
                raise
            tables.empty_log(connection)

    @contextmanager
    def _connection(self) -> Iterator[apsw.Connection]:
        free = self._free
        try:
            connection = free.get_nowait()
        except Empty:
            connection = tables.connect(self.path)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        free.put(connection)

    def _begin(self, split: str | None, root: str) -> None:
        """Make the tables, or check that those that are there are ours."""
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                if not tables.first(connection, "SELECT 1 FROM sqlite_schema LIMIT 1"):
                    connection.execute(tables.SCHEMA)
                    split = split or f"words={DEFAULT_WORDS}"
                    made = {
                        "format": str(tables.FORMAT),
                        "split": split,
                        "root": root,
                        "version": "0",
                    }
                    for name, value in {**made, "words": VERSION}.items():
                        tables.put(connection, name, value)
                self._check(connection, split)
                connection.execute("COMMIT")
            except BaseException:
                with suppress(Exception):
                    connection.execute("ROLLBACK")
                raise

    def _check(self, connection: apsw.Connection, split: str | None) -> None:
        if (found := tables.setting(connection, "format")) != str(tables.FORMAT):
            raise RetrievalError(
                f"The index {self.path} has the format {found}, and this version reads "
                f"{tables.FORMAT}. Delete it and build it again."
            )
        before = str(tables.setting(connection, "split"))
        if before != split and (split is not None or not before.startswith("words=")):
            raise InputError(
                f"The passages of the index {self.folder} have {before}, not "
                f"{split or 'a number of words'}. Use the same, or another folder."
            )
        self._words = int(before.removeprefix("words="))
        if tables.setting(connection, "words") != VERSION:
            # Another version of this package or of ICU splits texts into other words.
            connection.execute("INSERT INTO words(words) VALUES('rebuild')")
            rows = tables.select(connection, "SELECT number, title, text FROM passages")
            lengths = [(tables.length_of(Passage(text, title=title)), n) for n, title, text in rows]
            connection.executemany("UPDATE passages SET length = ? WHERE number = ?", lengths)
            tables.put(connection, "length", str(sum(length for length, _ in lengths)))
            tables.put(connection, "words", VERSION)

    def _attach(self, encoder: Encoder, progress: Progress | None) -> None:
        """Find by meaning, too: passages without a vector get one."""
        probe = encoder.embed(PROBE, query=False)
        with self._writing() as connection:
            if not tables.has_vectors(connection):
                tables.make_vectors(connection, encoder.dimension)
                tables.put(connection, "model", encoder.name)
                tables.put(connection, "probe", json.dumps(probe.tolist()))
            if tables.setting(connection, "probe") is None:
                raise RetrievalError(
                    f"The vectors in {self.path} were given to it, so no model can be compared "
                    "with theirs. Open the index without a model, or build it again with one."
                )
            stored = np.array(
                json.loads(str(tables.setting(connection, "probe"))), dtype=np.float32
            )
            name = tables.setting(connection, "model")
        # A name is not compared: the same model may lie in another folder now.
        if moved(probe, stored):
            raise RetrievalError(
                f"The vectors in {self.path} were made by {name!r}, not by {encoder.name!r}. Load "
                "that model, or delete the folder and build the index again."
            )
        self.encoder = encoder
        self.dot = not np.allclose(np.linalg.norm(probe, axis=1), 1.0, atol=1e-3)
        self.complete(progress)

    def complete(self, progress: Progress | None = None) -> None:
        """Embed the passages that have no vector, as those that a process without a model added."""
        if self.encoder is None:
            return
        with self.reading() as connection:
            rows = tables.select(
                connection,
                "SELECT number FROM passages WHERE number NOT IN (SELECT rowid FROM vectors)",
            )
            missing = tables.passages_at(connection, [number for (number,) in rows])
        missing = [one for one in missing if one.text.strip()]
        if not missing:
            return
        vectors = self._embedded(missing, progress)
        with self._writing() as connection:
            for digest, vector in vectors.items():
                rows = tables.select(
                    connection,
                    "SELECT number FROM passages WHERE digest = ? AND number NOT IN "
                    "(SELECT rowid FROM vectors)",
                    (digest,),
                )
                for (number,) in rows:
                    tables.insert_vector(connection, number, vector)

    # Writing.

    def _given(
        self, passages: Sequence[Passage], vectors: Sequence[Sequence[float]]
    ) -> list[Vectors | None]:
        """Vectors that came with passages, of length 1; None for those of zeros."""
        if self.encoder is not None:
            raise InputError(
                "This index embeds passages with its own model. Leave vectors= out, or open the "
                "index without a model."
            )
        if len(vectors) != len(passages):
            raise InputError(
                f"{len(passages)} passages came with {len(vectors)} vectors. Give one for each."
            )
        made = [np.asarray(one, dtype=np.float32) for one in vectors]
        if len({one.shape for one in made}) > 1 or any(
            one.ndim != 1 or not len(one) for one in made
        ):
            raise InputError(
                f"The vectors of the passages differ in shape: "
                f"{sorted({one.shape for one in made})}. Use one embedding model for all."
            )
        if not all(np.isfinite(one).all() for one in made):
            raise InputError("A vector holds NaN or infinity. Check the embedding model.")
        return [one / norm if (norm := np.linalg.norm(one)) else None for one in made]

    def _check_given(self, connection: apsw.Connection, vectors: Sequence[Vectors | None]) -> None:
        """Make the table of vectors that come with their passages, or check that they fit in."""
        if (model := tables.setting(connection, "model")) is not None:
            raise InputError(
                f"The vectors in {self.path} were made by {model!r}. Open the index with that "
                "model, and leave vectors= out."
            )
        dimension = next((len(one) for one in vectors if one is not None), None)
        if dimension is None:
            return
        before = tables.setting(connection, "dimension")
        if before is not None and before != str(dimension):
            if connection.execute("SELECT 1 FROM vectors LIMIT 1").fetchone():
                raise InputError(
                    f"The vectors in {self.path} have {before} numbers, not {dimension}. Use the "
                    "same embedding model, or another folder."
                )
            connection.execute("DROP TABLE vectors")
        if before != str(dimension):
            tables.make_vectors(connection, dimension)

    def _entry(self, document: Document, source: str | None) -> _Entry:
        passages = split_document(document, words=self._words)
        said = {"title": document.title, "text": document.text, "metadata": document.metadata}
        return _Entry(document.id, source, document.title, _sha256(tables.as_json(said)), passages)

    def _embedded(
        self, passages: Sequence[Passage], progress: Progress | None = None
    ) -> dict[bytes, Vectors]:
        """Vectors by digest, of those that hold text; known ones are not embedded again."""
        if self.encoder is None:
            return {}
        texts = {tables.digest_of(one): ranked_text(one) for one in passages if one.text.strip()}
        with self.reading() as connection:
            rows = tables.each(
                connection,
                "SELECT p.digest, v.embedding FROM passages p JOIN vectors v "
                "ON v.rowid = p.number WHERE p.digest = ? LIMIT 1",
                texts,
            )
        found = {digest: np.frombuffer(one, dtype=np.float32) for digest, one in rows}
        if new := [digest for digest in texts if digest not in found]:
            made = self.encoder.embed([texts[one] for one in new], query=False, progress=progress)
            found.update(zip(new, made, strict=True))
        return found

    def _put(self, entries: Sequence[_Entry], progress: Progress | None = None) -> Changes:
        """Write documents that were added as text, each in the place of those of its id."""
        vectors = self._embedded([one for each in entries for one in each.passages], progress)
        with self._writing() as connection:
            added: list[str] = []
            replaced: list[str] = []
            unchanged = 0
            for entry in entries:
                rows = tables.select(
                    connection,
                    "SELECT number, sha256, source FROM documents WHERE id = ?",
                    (entry.id,),
                )
                if [sha256 for _, sha256, _ in rows] == [entry.sha256]:
                    unchanged += 1
                    continue
                (replaced if rows else added).append(entry.id)
                tables.drop_documents(connection, [number for number, *_ in rows])
                # A file that had it has it no more, also when this one is removed again.
                taken = [(source, entry.id) for *_, source in rows if source is not None]
                tables.keep_out(connection, taken)
                self._write(connection, entry, vectors)
            tables.note_stale(connection, replaced)
        return Changes(tuple(added), tuple(replaced), unchanged=unchanged)

    def _put_file(
        self, source: str, entries: Sequence[_Entry], progress: Progress | None
    ) -> Changes:
        """Write the documents of a file that came by its bytes."""
        vectors = self._embedded([one for each in entries for one in each.passages], progress)
        with self._writing() as connection:
            changes = self._replace(connection, source, entries, vectors)
            tables.note_stale(connection, changes.stale)
        return changes

    def _take(
        self,
        files: Sequence[tuple[DocumentFile, str]],
        out: Mapping[str, Collection[str]],
        removed: Mapping[str, Collection[str]],
        strict: bool,
    ) -> Changes:
        """Read some files and write their documents in one transaction.

        ``out`` are documents that stay out, of those that were ``removed`` before.
        """
        read = []
        # Before their bytes: what is written meanwhile is another time, and read again.
        states = [(_stat(file), time.time_ns()) for file, _ in files]
        contents = read_all(file for file, _ in files)
        for (file, root), ((size, modified), now), found in zip(
            files, states, contents, strict=True
        ):
            skipped = [one for one in found if isinstance(one, Skipped)]
            again = now - modified < _FRESH_NS or any(one.environment for one in skipped)
            status = size, -1 if again else modified
            if strict and (bad := [one for one in skipped if one.problem]):
                raise _unreadable(bad[0])
            left = out.get(file.label, ())
            made = [
                self._entry(one, file.label)
                for one in found
                if isinstance(one, Document) and one.id not in left
            ]
            read.append((file, root, status, made, skipped))
        entries = [one for *_, made, _ in read for one in made]
        vectors = self._embedded([one for each in entries for one in each.passages])
        changes = Changes()
        with self._writing() as connection:
            now_removed = _removed(connection)
            for file, root, status, made, skipped in read:
                # What was removed while its file was read stays out.
                late = now_removed.get(file.label, set()) - {*removed.get(file.label, ())}
                if _WHOLE in late:
                    continue
                made = [one for one in made if one.id not in late]
                changes = changes.and_then(self._replace(connection, file.label, made, vectors))
                changes = changes.and_then(Changes(skipped=tuple(skipped)))
                notes = tables.as_json([asdict(one) for one in skipped])
                connection.execute(
                    "INSERT OR REPLACE INTO files(source, root, path, size, modified, skipped) "
                    "VALUES(?, ?, ?, ?, ?, ?)",
                    (file.label, _stored(root), _stored(file.path), *status, notes),
                )
                if not out.get(file.label) and not late:
                    connection.execute("DELETE FROM removed WHERE source = ?", (file.label,))
            tables.note_stale(connection, changes.stale)
        return changes

    def _replace(
        self,
        connection: apsw.Connection,
        source: str,
        entries: Sequence[_Entry],
        vectors: Mapping[bytes, Vectors],
    ) -> Changes:
        """Write a file's documents in the place of those that it had."""
        before = tables.select(
            connection,
            "SELECT number, id, sha256 FROM documents WHERE source = ? ORDER BY number",
            (source,),
        )
        now = [(one.id, one.sha256) for one in entries]
        if now == [(one, sha256) for _, one, sha256 in before]:
            return Changes(unchanged=len(before))
        # What was added as text in the place of one of them gives way, or both would be found.
        for one in dict.fromkeys(one for one, _ in now):
            before += connection.execute(
                "SELECT number, id, '' FROM documents WHERE id = ? AND source IS NULL", (one,)
            ).fetchall()
        names, old = [one for one, _ in now], [one for _, one, _ in before]
        same = {(one, sha256) for _, one, sha256 in before} & set(now)
        tables.drop_documents(connection, [number for number, *_ in before])
        for entry in entries:
            self._write(connection, entry, vectors)
        untouched = {one for one, _ in same}
        return Changes(
            tuple(one for one in dict.fromkeys(names) if one not in old),
            tuple(o for o in dict.fromkeys(names) if o in old and o not in untouched),
            tuple(one for one in dict.fromkeys(old) if one not in names),
            len(same),
        )

    def _write(
        self, connection: apsw.Connection, entry: _Entry, vectors: Mapping[bytes, Vectors]
    ) -> None:
        number = tables.insert_document(
            connection, entry.id, entry.source, entry.title, entry.sha256, time.time()
        )
        self._insert(connection, number, entry.passages, vectors)

    def _insert(
        self,
        connection: apsw.Connection,
        document: int,
        passages: Sequence[Passage],
        vectors: Mapping[bytes, Vectors],
        *,
        given: bool = False,
        original: Any = None,
    ) -> None:
        place = tables.first(
            connection,
            "SELECT coalesce(max(place) + 1, 0) FROM passages WHERE document = ?",
            (document,),
        )[0]
        for one in passages:
            digest = tables.digest_of(one)
            at = place if one.index is None else one.index
            place = max(place, at) + 1
            # Of a document that was split here, neighbours are read from where they stand.
            before = tables.as_json(list(one.before)) if given and one.before else None
            row = (document, at, one.id, one.title, one.text, tables.as_json(dict(one.metadata)))
            if any(
                isinstance(part, str) and tables.HALF.search(part) for part in (*row, one.document)
            ):
                raise InputError(
                    f"The passage {one.id!r:.80} holds half a character (an unpaired surrogate), "
                    "which can't be stored. Replace it."
                )
            connection.execute(
                "INSERT INTO passages(document, place, id, title, text, metadata, named, at, "
                "before, digest, length, original) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(
                        *row,
                        one.document,
                        one.index,
                        before,
                        digest,
                        length := tables.length_of(one),
                    ),
                    None if original is None else tables.as_json(original),
                ),
            )
            number = connection.last_insert_rowid()
            tables.count(connection, 1, length)
            connection.execute(
                "INSERT INTO words(rowid, title, text) VALUES(?, ?, ?)",
                (number, one.title, one.text),
            )
            if digest in vectors:
                tables.insert_vector(connection, number, vectors[digest])

    def _forget(self, sources: Collection[str]) -> Changes:
        """Remove the documents of files that are gone."""
        with self._writing() as connection:
            gone: list[str] = []
            for source in sources:
                rows = tables.select(
                    connection, "SELECT number, id FROM documents WHERE source = ?", (source,)
                )
                gone += [one for _, one in rows]
                tables.drop_documents(connection, [number for number, _ in rows])
                connection.execute("DELETE FROM files WHERE source = ?", (source,))
            removed = tuple(dict.fromkeys(gone))
            tables.note_stale(connection, removed)
        return Changes(removed=removed)


_FILES = "SELECT source, root, size, modified, skipped, path FROM files"
_COUNTS = "SELECT source, count(*) FROM documents WHERE source IS NOT NULL GROUP BY source"
_WHOLE = ""
"""In the place of a document's id: all of a file."""

_FRESH_NS = 2_000_000_000
"""A file that was written so shortly ago may be written again without another time."""

_held = threading.local()


def _close(free: LifoQueue[apsw.Connection], process: int) -> None:
    """Close connections, unless they are those of another process, which it forked from."""
    with suppress(Empty):
        while process == os.getpid():
            free.get_nowait().close()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _absolute(name: str) -> str:
    return name if "://" in name else os.path.abspath(os.path.expanduser(name))


def _stored(path: str) -> str | bytes:
    """A path as SQLite takes it: one that is no text, as its bytes."""
    return os.fsencode(path) if tables.HALF.search(path) else path


def _below(path: str, folder: str) -> bool:
    """Whether a path is a folder's, or below it."""
    return path == folder or path.startswith((f"{folder}/", f"{folder}{os.sep}"))


def _is_gone(path: str, names: Iterable[str]) -> bool:
    """Whether a file below one of these paths, which was found by another one, is there no more."""
    below = "://" not in path and any(_below(path, one.rstrip("/")) for one in names)
    return below and not os.path.lexists(path)


def _stat(file: DocumentFile) -> tuple[int, int]:
    """Size and time of a file; of one in a store always another time, so that it is read."""
    if file.options is not None:
        return 0, time.time_ns()
    try:
        status = os.stat(file.path)
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _removed(connection: apsw.Connection) -> dict[str, set[str]]:
    """Of each file the documents that were removed from the index, though the file has them."""
    found: dict[str, set[str]] = {}
    for source, id in tables.select(connection, "SELECT source, id FROM removed"):
        found.setdefault(source, set()).add(id)
    return found


def _unreadable(one: Skipped) -> Exception:
    return DocumentError(f"{one.label}: {one.reason}")


def ingest(
    paths: str | Path | Iterable[str | Path],
    folder: str | Path,
    model: Model | None = None,
    *,
    words: int | None = None,
    root: Path | None = None,
    progress: Progress | None = None,
) -> Index:
    """Make an index in a folder hold what some files hold, and open it.

    Called again, it reads only files that have changed and embeds only passages whose text or
    title is new; what is gone from the files goes from the index.

    Args:
        paths: see `load_documents`; what was added by other means stays.
        folder: of the index; made where it is missing.
        model: embeds passages; None for words only.
        words: see `Index`.
        root: see `load_documents`.
        progress: called with the number of passages embedded and of all; see `progress_bar`.

    Raises:
        DocumentError: see `load_documents`.
        RetrievalError: the folder can't be read or written, or holds another model's vectors.
        InputError: metadata can't be saved.
        ModelLoadError, MissingExtraError: see `SentenceEncoder`.
    """
    index = Index(folder, None, words=words, root=root)
    changes = index.follow(paths, strict=True)
    if not len(index):
        raise no_text(path_names(paths), changes.skipped)
    if model is not None:
        index._attach(encoder_of(model), progress)
    return index


def open_index(folder: str | Path, model: Model | None = None) -> Index:
    """Open an index that is there, with the model it was given; None to find by words only.

    Raises:
        RetrievalError: there is no such index, or it holds another model's vectors.
        ModelLoadError, MissingExtraError: see `SentenceEncoder`.
    """
    if not (Path(folder) / FILE).is_file():
        raise RetrievalError(f"{folder} holds no index. Make one: rag-windows index add.")
    return Index(folder, model)
