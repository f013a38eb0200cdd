"""The tables of an index: what is written, read and removed by the statements of SQLite."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rag_windows import Passage
from rag_windows.errors import InputError, RetrievalError
from rag_windows.passage import NEIGHBOURS
from rag_windows_retrievers.in_memory import Vectors
from rag_windows_retrievers.retriever import ranked_text
from rag_windows_retrievers.words import tokenize

if TYPE_CHECKING:
    import apsw

FORMAT = 1


REMEMBERED = 10_000
"""Removals that other processes can still learn of; who missed more must take all for stale."""


BUSY_MS, PAUSE_MS = 60_000, 2_000


SCHEMA = """
CREATE TABLE settings(name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE files(
    source TEXT PRIMARY KEY, root TEXT NOT NULL, path TEXT NOT NULL, size INTEGER NOT NULL,
    modified INTEGER NOT NULL, skipped TEXT NOT NULL);
CREATE TABLE removed(source TEXT NOT NULL, id TEXT NOT NULL, PRIMARY KEY(source, id)) WITHOUT ROWID;
CREATE TABLE documents(
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, source TEXT, title TEXT,
    sha256 TEXT NOT NULL, added REAL NOT NULL);
CREATE INDEX documents_by_id ON documents(id);
CREATE INDEX documents_by_source ON documents(source);
CREATE TABLE passages(
    number INTEGER PRIMARY KEY AUTOINCREMENT, document INTEGER NOT NULL REFERENCES documents,
    place INTEGER NOT NULL, id TEXT, title TEXT, text TEXT NOT NULL, metadata TEXT NOT NULL,
    named TEXT, at INTEGER, before TEXT, digest BLOB NOT NULL, length INTEGER NOT NULL,
    original TEXT);
CREATE INDEX passages_by_document ON passages(document, place);
CREATE INDEX passages_by_id ON passages(id);
CREATE INDEX passages_by_digest ON passages(digest);
CREATE TABLE stale(version INTEGER NOT NULL, id TEXT NOT NULL);
CREATE INDEX stale_by_version ON stale(version);
CREATE VIRTUAL TABLE words USING fts5(
    title, text, content='passages', content_rowid='number', tokenize='rag_windows');
INSERT INTO words(words, rank) VALUES('secure-delete', 1);
"""


HALF = re.compile("[\ud800-\udfff]")


def connect(path: Path) -> apsw.Connection:
    """A new connection, which knows our words and compares vectors."""
    import apsw
    import apsw.fts5
    import sqlite_vec

    connection = apsw.Connection(os.fspath(path))
    connection.set_busy_timeout(BUSY_MS)
    connection.enable_load_extension(True)
    connection.load_extension(sqlite_vec.loadable_path())
    connection.enable_load_extension(False)
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON"):
        connection.execute(f"PRAGMA {pragma}").fetchall()

    def tokenizer(*_: Any) -> Callable[[bytes, int, str | None], list[str]]:
        def words(text: bytes, reason: int, _: str | None) -> list[str]:
            spelled = text.decode("utf-8")
            # A question's words come one by one, as `tokenize` spells them.
            asked = reason & apsw.FTS5_TOKENIZE_QUERY
            return [spelled] if asked else tokenize(spelled)

        return words

    connection.register_fts5_tokenizer("rag_windows", tokenizer)
    connection.execute("CREATE VIRTUAL TABLE temp.known USING fts5vocab(main, words, row)")
    return connection


def empty_log(connection: apsw.Connection) -> bool:
    """The log holds what was removed until it is emptied, for which readers have to pause."""
    connection.set_busy_timeout(PAUSE_MS)
    busy, *_ = select(connection, "PRAGMA wal_checkpoint(TRUNCATE)")[0]
    connection.set_busy_timeout(BUSY_MS)
    return not busy


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Say what SQLite says in our words, and what to do."""
    import apsw

    try:
        yield
    except apsw.FullError as error:
        raise RetrievalError(
            f"The index {path} can't be written: the disk is full. Free some space; nothing that "
            "was there is lost."
        ) from error
    except (apsw.NotADBError, apsw.CorruptError) as error:
        raise RetrievalError(
            f"The index {path} is damaged ({error}). Delete it and build it again."
        ) from error
    except apsw.BusyError as error:
        raise RetrievalError(
            f"The index {path} is being written by another process for more than "
            f"{BUSY_MS // 1000} seconds. Try again when that is done."
        ) from error
    except apsw.Error as error:
        raise RetrievalError(
            f"The index {path} can't be used ({type(error).__name__}: {error}). Check the folder, "
            "its permissions and the free space."
        ) from error


def select(connection: apsw.Connection, asked: str, bindings: Any = ()) -> list[Any]:
    """All rows that a statement gives."""
    return connection.execute(asked, bindings).fetchall()


def first(connection: apsw.Connection, asked: str, bindings: Any = ()) -> Any:
    """The first row, or None."""
    return connection.execute(asked, bindings).fetchone()


def each(connection: apsw.Connection, asked: str, values: Iterable[Any]) -> list[Any]:
    """All rows that a statement gives for one value after another."""
    return connection.executemany(asked, [(one,) for one in values]).fetchall()


def setting(connection: apsw.Connection, name: str) -> str | None:
    """What the index notes under a name; None for nothing."""
    row = first(connection, "SELECT value FROM settings WHERE name = ?", (name,))
    return None if row is None else str(row[0])


def has_vectors(connection: apsw.Connection) -> bool:
    """Whether passages are found by meaning, too."""
    return setting(connection, "dimension") is not None


def make_vectors(connection: apsw.Connection, dimension: int) -> None:
    """Make the table of vectors of so many numbers."""
    connection.execute(
        f"CREATE VIRTUAL TABLE vectors USING vec0(embedding float[{dimension}] "
        "distance_metric=cosine)"
    )
    put(connection, "dimension", str(dimension))


def touch(connection: apsw.Connection, documents: Iterable[int]) -> None:
    """Note that documents that were added as text don't hold any more what they were added with."""
    each(
        connection,
        "UPDATE documents SET sha256 = '' WHERE source IS NULL AND number = ?",
        documents,
    )


def put(connection: apsw.Connection, name: str, value: str) -> None:
    """Note something under a name."""
    connection.execute("INSERT OR REPLACE INTO settings VALUES(?, ?)", (name, value))


def passages_with(connection: apsw.Connection, word: str) -> int:
    """In how many passages a word stands."""
    row = first(connection, "SELECT doc FROM temp.known WHERE term = ?", (word,))
    return 0 if row is None else int(row[0])


def passages_named(connection: apsw.Connection, ids: Iterable[str]) -> list[tuple[int, int, str]]:
    """Of passages, by their own ids: its number, and its document's number and id."""
    return each(
        connection,
        "SELECT p.number, d.number, d.id FROM passages p JOIN documents d "
        "ON p.document = d.number WHERE p.id = ? ORDER BY p.number",
        ids,
    )


def passages_at(connection: apsw.Connection, numbers: Sequence[int]) -> list[Passage]:
    """Passages by their numbers, with the texts in front of them."""
    made = []
    for number in numbers:
        document, place, id, title, text, metadata, named, at, before = first(
            connection,
            "SELECT document, place, id, title, text, metadata, named, at, before FROM passages "
            "WHERE number = ?",
            (number,),
        )
        texts: list[str] = [] if before is None else json.loads(before)
        if before is None and at is not None:
            rows = select(
                connection,
                "SELECT place, text FROM passages WHERE document = ? AND place < ? AND place >= ? "
                "AND at IS NOT NULL ORDER BY place DESC",
                (document, place, place - NEIGHBOURS),
            )
            expected = place - 1
            for there, own in rows:
                if there != expected:
                    break
                texts.insert(0, own)
                expected -= 1
        made.append(
            Passage(
                text,
                id=id,
                title=title,
                metadata=json.loads(metadata),
                document=named,
                index=at,
                before=tuple(texts),
            )
        )
    return made


def insert_document(
    connection: apsw.Connection,
    id: str,
    source: str | None,
    title: str | None,
    sha256: str,
    added: float,
) -> int:
    """Add a document without passages; its number."""
    connection.execute(
        "INSERT INTO documents(id, source, title, sha256, added) VALUES(?, ?, ?, ?, ?)",
        (id, source, title, sha256, added),
    )
    return connection.last_insert_rowid()


def insert_vector(connection: apsw.Connection, number: int, vector: Vectors) -> None:
    """Add the vector of a passage."""
    if not vector.any():  # it has no cosine
        return
    connection.execute(
        "INSERT INTO vectors(rowid, embedding) VALUES(?, ?)",
        (number, np.ascontiguousarray(vector, dtype=np.float32).tobytes()),
    )


def drop_documents(connection: apsw.Connection, numbers: Sequence[int]) -> None:
    """Remove documents, by number, with their passages."""
    rows = each(connection, "SELECT number FROM passages WHERE document = ?", numbers)
    drop_passages(connection, [one for (one,) in rows])
    each(connection, "DELETE FROM documents WHERE number = ?", numbers)


def drop_passages(connection: apsw.Connection, numbers: Sequence[int]) -> None:
    """Remove passages, by number, with their words and vectors."""
    lengths = each(connection, "SELECT length FROM passages WHERE number = ?", numbers)
    count(connection, -len(lengths), -sum(length for (length,) in lengths))
    each(
        connection,
        "INSERT INTO words(words, rowid, title, text) "
        "SELECT 'delete', number, title, text FROM passages WHERE number = ?",
        numbers,
    )
    if has_vectors(connection):
        # sqlite-vec only marks a row as gone; its numbers say something of the text.
        zeroed = "UPDATE vectors SET embedding = zeroblob(length(embedding)) WHERE rowid = ?"
        each(connection, zeroed, numbers)
        each(connection, "DELETE FROM vectors WHERE rowid = ?", numbers)
    each(connection, "DELETE FROM passages WHERE number = ?", numbers)


def length_of(passage: Passage) -> int:
    """How many words a passage has."""
    return len(tokenize(ranked_text(passage)))


def count(connection: apsw.Connection, passages: int, words: int) -> None:
    """Add to the numbers of passages and of their words."""
    for name, more in (("passages", passages), ("length", words)):
        put(connection, name, str(int(setting(connection, name) or 0) + more))


def drop_empty(connection: apsw.Connection, documents: Iterable[int]) -> list[tuple[str, str]]:
    """Remove those of some documents that have no passage left; sources and ids of files' ones."""
    empty = each(
        connection,
        "SELECT number, source, id FROM documents WHERE number = ? "
        "AND NOT EXISTS (SELECT 1 FROM passages WHERE document = documents.number)",
        documents,
    )
    each(connection, "DELETE FROM documents WHERE number = ?", [number for number, *_ in empty])
    return [(source, id) for _, source, id in empty if source is not None]


def keep_out(connection: apsw.Connection, documents: Iterable[tuple[str, str]]) -> None:
    """Remember documents, by file and id, that stay out when a followed file is read again.

    What was sent under a file's name is no followed file: one that comes later is another.
    """
    connection.executemany(
        "INSERT OR IGNORE INTO removed SELECT ?1, ?2 "
        "WHERE EXISTS (SELECT 1 FROM files WHERE source = ?1)",
        documents,
    )


def note_stale(connection: apsw.Connection, ids: Sequence[str]) -> None:
    """Let other processes learn which documents' windows they may not read any more."""
    version = int(setting(connection, "version") or 0) + 1
    connection.executemany("INSERT INTO stale VALUES(?, ?)", [(version, one) for one in ids])
    row = first(
        connection,
        "SELECT version FROM stale ORDER BY version DESC, rowid DESC LIMIT 1 OFFSET ?",
        (REMEMBERED,),
    )
    if row is not None:
        connection.execute("DELETE FROM stale WHERE version <= ?", row)
        put(connection, "forgotten", str(row[0]))


def as_json(value: Any) -> str:
    """Metadata as they are stored."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"A passage's metadata can't be saved as JSON ({error}). Keep strings, numbers, lists "
            "and objects in it."
        ) from error


def digest_of(passage: Passage) -> bytes:
    """Equal for passages of equal title and text."""
    return hashlib.sha256(as_json([passage.title, passage.text]).encode()).digest()[:16]
