"""Databases that hold passages with their words and vectors, each asked the same way.

They are what `benchmarks.index_engines` compares, which says how they differ.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIMENSIONS, OF_DOCUMENT = 384, 10
"""Numbers of a vector; passages of a document."""
K, CANDIDATES = 10, 80
"""Passages that are asked for, and that a binary search re-ranks for them."""

Vectors = NDArray[np.float32]
Found = list[int]
Way = Callable[[str, Vectors], Found]


@dataclass(frozen=True)
class Block:
    """Whole documents: passages `first` to `first + len(texts) - 1`; vectors `[n, 384]`."""

    first: int
    texts: list[str]
    vectors: Vectors

    def rows(self) -> Iterator[tuple[int, int, str, bytes]]:
        """Number, document, text and vector of each passage."""
        for i, (text, vector) in enumerate(zip(self.texts, self.vectors, strict=True), self.first):
            yield i, i // OF_DOCUMENT, text, vector.tobytes()


class Lance:
    """One table of LanceDB with an index of words, one of documents, and IVF_PQ."""

    def __init__(self, path: Path) -> None:
        self._db = import_module("lancedb").connect(path)
        self._pa = import_module("pyarrow")
        # Nothing else reads this table.
        warnings.filterwarnings("ignore", message=r"optimize\(cleanup_older_than=0\)")
        names = self._db.list_tables().tables
        self._table: Any = self._db.open_table("passages") if "passages" in names else None

    def add(self, block: Block) -> None:
        """Commit these passages."""
        pa = self._pa
        numbers = np.arange(block.first, block.first + len(block.texts))
        columns = {
            "id": numbers,
            "document": numbers // OF_DOCUMENT,
            "text": block.texts,
            "vector": pa.FixedSizeListArray.from_arrays(block.vectors.ravel(), DIMENSIONS),
        }
        data = pa.table(columns)
        if self._table is None:
            self._table = self._db.create_table("passages", data)
        else:
            self._table.add(data)

    def finish(self) -> None:
        """Make the indexes."""
        index = import_module("lancedb.index")
        self._table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)
        self._table.create_index("document", config=index.BTree())
        self._index_words()
        self._table.create_index("vector", config=index.IvfPq(distance_type="cosine"))

    def _index_words(self) -> None:
        plain = dict.fromkeys(["lower_case", "stem", "remove_stop_words", "ascii_folding"], False)
        words = import_module("lancedb.index").FTS(base_tokenizer="whitespace", **plain)
        self._table.create_index("text", config=words, replace=True)

    def remove(self, documents: Sequence[int], erase: bool = False) -> None:
        """Remove whole documents; with `erase` old versions go, too."""
        self._table.delete(f"document IN ({','.join(map(str, documents))})")
        if erase:
            self.tidy()

    def tidy(self) -> None:
        """Bring new rows into the indexes and drop old versions."""
        self._table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)

    def rebuild(self) -> None:
        """What removes the rest of a text: the index of words anew."""
        self._index_words()
        self.tidy()

    def words(self, text: str, _: Vectors) -> Found:
        """BM25."""
        query = import_module("lancedb.query").MatchQuery(text, "text")
        return self._ids(self._table.search(query, query_type="fts"), score="_score")

    def exact(self, _: str, vector: Vectors) -> Found:
        """Every vector is compared."""
        search = self._table.search(vector, query_type="vector").distance_type("cosine")
        return self._ids(search.bypass_vector_index())

    def quantized(self, _: str, vector: Vectors) -> Found:
        """IVF_PQ with the default 20 probes; ten times as many vectors as asked are re-ranked."""
        search = self._table.search(vector, query_type="vector").distance_type("cosine")
        return self._ids(search.refine_factor(10))

    def _ids(self, search: Any, score: str = "_distance") -> Found:
        found = search.limit(K).select(["id", "text", score]).to_arrow()
        ids: Found = found["id"].to_pylist()
        return ids

    def ways(self) -> dict[str, Way]:
        """The searches by name."""
        return {"bm25": self.words, "exact": self.exact, "IVF_PQ, re-ranked": self.quantized}

    def counts(self) -> list[Counter[int]]:
        """Passages of each document."""
        return [Counter(self._table.to_arrow()["document"].to_pylist())]

    def older(self, document: int) -> bool:
        """Whether an older version still has this document."""
        found = False
        for version in self._table.list_versions():
            self._table.checkout(version["version"])
            found |= self._table.count_rows(f"document = {document}") > 0
        self._table.checkout_latest()
        return found


class SQLite:
    """One file: FTS5, and vectors in sqlite-vec's table or as blobs in an ordinary one."""

    def __init__(self, path: Path, blobs: bool = False, merged: bool = False) -> None:
        apsw, vec = import_module("apsw"), import_module("sqlite_vec")
        path.mkdir(exist_ok=True)
        self._db = apsw.Connection(str(path / "index.db"))
        self._db.enable_load_extension(True)
        self._db.load_extension(vec.loadable_path())
        self._db.set_busy_timeout(10_000)
        self._run("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL")
        self._run("PRAGMA cache_size = -65536")
        self._run("PRAGMA secure_delete = ON")
        self._blobs, self._merged = blobs, merged
        vectors = "USING vec0(id INTEGER PRIMARY KEY, vector float[384], bits bit[384])"
        with self._db:
            self._run(
                "CREATE TABLE IF NOT EXISTS passages(id INTEGER PRIMARY KEY, document INTEGER)",
                "CREATE INDEX IF NOT EXISTS of_document ON passages(document)",
                "CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5(text, tokenize='ascii')",
            )
            if blobs:
                self._run("CREATE TABLE IF NOT EXISTS vectors(id INTEGER PRIMARY KEY, vector BLOB)")
                self._run("CREATE TABLE IF NOT EXISTS codes(id INTEGER PRIMARY KEY, bits BLOB)")
            else:
                self._run(f"CREATE VIRTUAL TABLE IF NOT EXISTS vectors {vectors}")
            if not merged:
                self._run("INSERT INTO words(words, rank) VALUES('secure-delete', 1)")

    def _run(self, *statements: str) -> None:
        for statement in statements:
            self._db.execute(statement).fetchall()

    def add(self, block: Block) -> None:
        """Commit these passages."""
        rows = list(block.rows())
        with self._db:
            many, ids = self._db.executemany, [(row[0], row[3]) for row in rows]
            many("INSERT INTO passages VALUES(?, ?)", [row[:2] for row in rows])
            many("INSERT INTO words(rowid, text) VALUES(?, ?)", [(row[0], row[2]) for row in rows])
            if self._blobs:
                many("INSERT INTO vectors VALUES(?, ?)", ids)
                many("INSERT INTO codes VALUES(?, vec_quantize_binary(?))", ids)
            else:
                many("INSERT INTO vectors VALUES(?1, ?2, vec_quantize_binary(?2))", ids)

    def finish(self) -> None:
        """Merge the index of words."""
        self._run("INSERT INTO words(words) VALUES('optimize')")
        self._run("PRAGMA wal_checkpoint(TRUNCATE)")

    def remove(self, documents: Sequence[int], erase: bool = False) -> None:
        """Remove whole documents; with `erase` the log is emptied, too."""
        tables = ["words", "vectors", *(["codes"] if self._blobs else []), "passages"]
        of_document = "SELECT id FROM passages WHERE document = ?"
        with self._db:
            for document in documents:
                ids = self._db.execute(of_document, (document,)).fetchall()
                for table in tables:
                    key = "rowid" if table == "words" else "id"
                    self._db.executemany(f"DELETE FROM {table} WHERE {key} = ?", ids)  # noqa: S608 - names of ours
        if erase:
            self.tidy()

    def tidy(self) -> None:
        """Bring the log into the file and empty it."""
        if self._merged:
            self._run("INSERT INTO words(words) VALUES('optimize')")
        self._run("PRAGMA wal_checkpoint(TRUNCATE)")

    def rebuild(self) -> None:
        """Merge the index of words and give free pages back."""
        self._run("INSERT INTO words(words) VALUES('optimize')", "VACUUM")
        self.tidy()

    def words(self, text: str, _: Vectors) -> Found:
        """BM25."""
        query = " OR ".join(f'"{word}"' for word in text.split())
        sql = "SELECT rowid, text FROM words WHERE words MATCH ? ORDER BY rank LIMIT ?"
        return self._ids(sql, query, K)

    def exact(self, _: str, vector: Vectors) -> Found:
        """Every vector is compared."""
        sql = "SELECT id FROM vectors WHERE vector MATCH ? AND k = ?"
        if self._blobs:
            sql = "SELECT id FROM vectors ORDER BY vec_distance_l2(vector, ?) LIMIT ?"
        return self._with_texts(sql, vector.tobytes(), K)

    def binary(self, _: str, vector: Vectors) -> Found:
        """Signs are compared, and of the nearest 80 the vectors."""
        near = "bits MATCH vec_quantize_binary(?1) AND k = ?3"
        if self._blobs:
            order = "vec_distance_hamming(vec_bit(bits), vec_quantize_binary(?1))"
            near = f"id IN (SELECT id FROM codes ORDER BY {order} LIMIT ?3)"  # noqa: S608 - ours
        sql = f"SELECT id FROM vectors WHERE {near} ORDER BY vec_distance_l2(vector, ?1) LIMIT ?2"  # noqa: S608 - ours
        return self._with_texts(sql, vector.tobytes(), K, CANDIDATES)

    def _ids(self, sql: str, *values: object) -> Found:
        return [row[0] for row in self._db.execute(sql, values)]

    def _with_texts(self, sql: str, *values: object) -> Found:
        ids = self._ids(sql, *values)
        marks = ",".join("?" * len(ids))
        self._ids(f"SELECT text FROM words WHERE rowid IN ({marks})", *ids)  # noqa: S608 - marks
        return ids

    def ways(self) -> dict[str, Way]:
        """The searches by name."""
        return {"bm25": self.words, "exact": self.exact, "binary, re-ranked": self.binary}

    def counts(self) -> list[Counter[int]]:
        """Passages of each document, in every table."""
        tables = [("words", "rowid"), ("vectors", "id"), ("passages", "id")]
        numbers = [self._ids(f"SELECT {key} FROM {table}") for table, key in tables]  # noqa: S608 - ours
        self._run("INSERT INTO words(words) VALUES('integrity-check')")
        return [Counter(number // OF_DOCUMENT for number in found) for found in numbers]

    def older(self, document: int) -> bool:
        """There are no older versions."""
        return False


class Arrays:
    """BM25S and NumPy, for reference: built and searched, never changed."""

    def __init__(self, path: Path) -> None:
        self._bm25s, self._path = import_module("bm25s"), path
        self._texts: list[str] = []
        self._vectors: list[Vectors] = []
        self._index: Any = None
        if path.exists():
            self._index = self._bm25s.BM25.load(path / "words", mmap=True)
            self._held = np.load(path / "vectors.npy", mmap_mode="r")

    def add(self, block: Block) -> None:
        """Hold these passages."""
        self._texts += block.texts
        self._vectors.append(block.vectors)

    def finish(self) -> None:
        """Make the index."""
        index = self._bm25s.BM25(k1=1.2, b=0.75)
        index.index([text.split() for text in self._texts], show_progress=False)
        index.save(self._path / "words")
        np.save(self._path / "vectors.npy", np.concatenate(self._vectors))

    def words(self, text: str, _: Vectors) -> Found:
        """BM25."""
        found: Found = self._index.retrieve([text.split()], k=K, show_progress=False)[0][0].tolist()
        return found

    def exact(self, _: str, vector: Vectors) -> Found:
        """Every vector is compared."""
        scores = self._held @ vector
        best = np.argpartition(-scores, K)[:K]
        found: Found = best[np.argsort(-scores[best])].tolist()
        return found

    def ways(self) -> dict[str, Way]:
        """The searches by name."""
        return {"bm25": self.words, "exact": self.exact}


Engine = Lance | SQLite | Arrays
ENGINES: dict[str, Callable[[Path], Engine]] = {
    "lancedb": Lance,
    "sqlite-vec0": SQLite,
    "sqlite-blobs": lambda path: SQLite(path, blobs=True),
    "sqlite-merged": lambda path: SQLite(path, merged=True),
    "arrays": Arrays,
}
