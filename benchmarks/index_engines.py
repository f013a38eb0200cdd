"""Embedded databases as the index of passages: LanceDB against SQLite, measured.

    python -m benchmarks.index_engines measure lancedb 10000 --folder /tmp/index
    python -m benchmarks.index_engines table

`measure` takes an engine and a number of passages, a multiple of 10,000, and writes
benchmarks/results/index_engines/<engine>-<passages>.json; `table` prints all of these as Markdown.
On two cores an engine takes about a minute with 10,000 passages, two with 100,000 and 15 with
1,000,000 (and 8 GB of disk). Linux only, in an environment of its own:
`pip install apsw sqlite-vec lancedb pylance bm25s numpy`.

- `lancedb`: one table with an index of words, one of documents, and IVF_PQ.
- `sqlite-vec0`: one file with FTS5 and sqlite-vec's table; what is removed is overwritten at once.
- `sqlite-blobs`: the same with vectors in ordinary tables.
- `sqlite-merged`: `sqlite-vec0`, whose index of words drops removed words when it is merged.
- `arrays`: BM25S and NumPy, for reference; they are built and searched only.

Passages have 100 words, drawn by Zipf's law from 50,000 invented ones, and a random unit vector of
384 numbers; ten make a document. A question has five of the words that are not among the hundred
most frequent, and a vector whose cosine with one passage's is 0.6. Random vectors are the worst
case of every approximate search: read its recall as a lower bound.
"""

from __future__ import annotations

import argparse
import json
import mmap
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.index_databases import (
    DIMENSIONS,
    ENGINES,
    OF_DOCUMENT,
    Arrays,
    Block,
    Found,
    K,
    Vectors,
)

RESULTS = Path(__file__).parent / "results" / "index_engines"
WORDS, BLOCK, QUESTIONS, CHANGES = 100, 10_000, 50, 20
PLANTED = 10
"""Documents with a word of their own, all of which are removed: one alone, the others with half."""
REMOVAL_LIMIT_S = 120.0
KILLED_AT = (50, 199, 333, 600, 850)
"""Documents after which the process that adds 1,000 of them is killed."""


class Corpus:
    """Passages made from a seed, block by block, so that nothing is held twice."""

    def __init__(self, passages: int) -> None:
        self.passages, self.documents = passages, passages // OF_DOCUMENT
        rng = np.random.default_rng(0)
        letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
        words = {"".join(rng.choice(letters, rng.integers(3, 10))): None for _ in range(60_000)}
        self._words = np.array(list(words)[:50_000], dtype=object)
        self._shares = np.cumsum(1 / np.arange(1, len(self._words) + 1))
        self._shares /= self._shares[-1]
        # Words whose last ten letters no other word has: an index may store a word from its middle.
        self.planted = {
            2 * int(document): "".join(rng.choice(letters, 16))
            for document in np.linspace(0, self.documents // 2 - 1, PLANTED).astype(int)
        }

    def block(self, first: int, passages: int = BLOCK) -> Block:
        """The passages from a number on; those behind the last are made to be added."""
        rng = np.random.default_rng((1, first))
        drawn = np.searchsorted(self._shares, rng.random((passages, WORDS)))
        texts = [" ".join(row) for row in self._words[drawn]]
        for document, word in self.planted.items():
            if 0 <= document * OF_DOCUMENT - first < passages:
                texts[document * OF_DOCUMENT - first] += " " + word
        vectors = rng.standard_normal((passages, DIMENSIONS), dtype=np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return Block(first, texts, vectors)

    def document(self, number: int) -> Block:
        """One document to add."""
        return self.block(number * OF_DOCUMENT, OF_DOCUMENT)

    def questions(self) -> Iterator[tuple[str, Vectors, int]]:
        """Words, vector, and the passage that the vector is near."""
        rng = np.random.default_rng(2)
        near = self.block(0)
        for target in rng.choice(BLOCK, QUESTIONS, replace=False):
            drawn = np.searchsorted(self._shares, rng.uniform(self._shares[99], 1, 100))
            words = list(dict.fromkeys(self._words[drawn]))[:5]
            noise = rng.standard_normal(DIMENSIONS, dtype=np.float32)
            vector = 0.6 * near.vectors[target] + 0.8 * noise / np.linalg.norm(noise)
            yield " ".join(words), vector.astype(np.float32), int(target)


def fused(rankings: Iterable[Found]) -> Found:
    """Reciprocal rank fusion, as rag_windows_retrievers has it: 1 / (60 + rank)."""
    scores: Counter[int] = Counter()
    for ranking in rankings:
        for rank, number in enumerate(ranking, 1):
            scores[number] += 1 / (60 + rank)  # type: ignore[assignment]  # a Counter adds any numbers
    return [number for number, _ in scores.most_common(K)]


def seconds(function: Callable[..., object], *arguments: object) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def typical(times: Sequence[float]) -> dict[str, float]:
    """Median and largest, in milliseconds."""
    return {
        "median_ms": round(1000 * statistics.median(times), 2),
        "largest_ms": round(1000 * max(times), 2),
    }


def peak_mib() -> float:
    """Peak resident memory of this process (ru_maxrss has the parent's, too)."""
    status = Path("/proc/self/status").read_text()
    return round(int(status.split("VmHWM:")[1].split()[0]) / 1024, 1)


def size_mib(path: Path) -> float:
    """What the files of a folder hold."""
    return round(sum(one.stat().st_size for one in path.rglob("*") if one.is_file()) / 2**20, 1)


def elsewhere(function: Callable[..., object], *arguments: object) -> object:
    """Call a function in another process: one that closes a file loses SQLite's locks on it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def traces(path: Path, words: Sequence[str], vectors: Sequence[bytes]) -> str:
    """How many of the words and vectors stand in the files, in LanceDB's compressed texts, too."""
    needles: list[bytes] = [*(word.encode() for word in words), *vectors]
    found: set[bytes] = set()
    for file in path.rglob("*"):
        if not file.is_file() or not file.stat().st_size:
            continue
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as data:
            found |= {needle for needle in needles if data.find(needle) >= 0}
        if file.suffix == ".lance":
            found |= {word.encode() for word in words_of_lance(file, words)}
    counts = [len(found.intersection(some)) for some in (needles[: len(words)], vectors)]
    return "{} words, {} vectors".format(*counts)


def words_of_lance(file: Path, words: Sequence[str]) -> Iterator[str]:
    """The words that stand in texts of a file, in those of removed rows, too."""
    types, contains = import_module("pyarrow.types"), import_module("pyarrow.compute")
    for batch in import_module("lance.file").LanceFileReader(str(file)).read_all().to_batches():
        for column in batch.columns:
            if types.is_string(column.type):
                for word in words:
                    if contains.any(contains.match_substring(column, word)).as_py():
                        yield word


def search(name: str, path: Path) -> dict[str, Any]:
    """Ask all questions in every way; run in a process of its own for the sake of its memory."""
    with np.load(path.with_suffix(".npz")) as held:
        texts, vectors, targets = held["texts"].tolist(), held["vectors"], held["targets"].tolist()
    questions = list(zip(texts, vectors, targets, strict=True))
    before, start = peak_mib(), time.perf_counter()
    engine = ENGINES[name](path)
    text, vector, _ = questions[0]
    for way in engine.ways().values():
        way(text, vector)
    result: dict[str, Any] = {"open_and_first_ms": round(1000 * (time.perf_counter() - start))}
    found: dict[str, list[Found]] = {}
    times: dict[str, list[float]] = {}
    for label, way in engine.ways().items():
        found[label], times[label] = [], []
        for text, vector, _ in questions:
            start = time.perf_counter()
            found[label].append(way(text, vector))
            times[label].append(time.perf_counter() - start)
        result[label] = typical(times[label])
    for label in [label for label in times if label != "bm25"]:
        pairs = list(zip(found["bm25"], found[label], strict=True))
        fusing = seconds(list, map(fused, pairs)) / len(questions)
        both = zip(times["bm25"], times[label], strict=True)
        result[f"hybrid, {label}"] = typical([one + other + fusing for one, other in both])
        near = [target in ids for (*_, target), ids in zip(questions, found[label], strict=True)]
        result[label] |= {"near_found": sum(near), "recall": overlap(found[label], found["exact"])}
    result |= {
        "peak_mib": peak_mib(),
        "peak_before_mib": before,
        "bm25_ids": [" ".join(map(str, ids)) for ids in found["bm25"]],
    }
    return result


def overlap(found: Sequence[Found], wanted: Sequence[Found]) -> float:
    """The share of what is wanted that is found."""
    pairs = list(zip(found, wanted, strict=True))
    shares = [len(set(one) & set(other)) / len(other) for one, other in pairs if other]
    return round(statistics.mean(shares), 3)


def child(*arguments: object) -> subprocess.Popen[str]:
    """This program in another process."""
    command = [sys.executable, "-m", "benchmarks.index_engines", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603 - this program


def searched(name: str, path: Path) -> dict[str, Any]:
    """What `search` says in another process."""
    result: dict[str, Any] = json.loads(child("search", name, "--folder", path).communicate()[0])
    return result


def add_many(name: str, passages: int, path: Path) -> None:
    """Go on adding 1,000 documents; prints the number of each that is committed."""
    corpus, engine = Corpus(passages), ENGINES[name](path)
    if isinstance(engine, Arrays):
        raise SystemExit("These are never changed.")
    held = engine.counts()[0]
    first = corpus.documents
    for document in range(max(first, max(held) + 1), first + 1000):
        engine.add(corpus.document(document))
        print(document - first, flush=True)
        if document % 50 == 49:
            engine.tidy()


def killed(name: str, corpus: Corpus, path: Path) -> list[dict[str, Any]]:
    """Kill the process that adds, five times, and look at what is left; the last one ends."""
    results = []
    for moment, at in enumerate((*KILLED_AT, 1000)):
        process = child("add", name, corpus.passages, "--folder", path)
        committed = -1
        for line in process.stdout or ():
            committed = int(line)
            if committed >= at:
                time.sleep(0.003 * moment)
                process.send_signal(signal.SIGKILL)
                break
        # What was committed while the signal went.
        rest = [int(line) for line in process.communicate()[0].split("\n")[:-1] if line]
        committed = max([committed, *rest])
        start = time.perf_counter()
        engine = ENGINES[name](path)
        counts = [] if isinstance(engine, Arrays) else engine.counts()
        added = sum(document >= corpus.documents for document in counts[0])
        results.append(
            {
                "committed": committed + 1,
                "held": added,
                "whole": all(n == OF_DOCUMENT for count in counts for n in count.values()),
                "same_in_all": all(count == counts[0] for count in counts),
                "complete": added >= committed + 1 and len(counts[0]) == corpus.documents + added,
                "open_and_check_ms": round(1000 * (time.perf_counter() - start)),
            }
        )
        text, vector, _ = next(corpus.questions())
        results[-1]["searches"] = all(way(text, vector) for way in engine.ways().values())
    return results


def measure(name: str, passages: int, folder: Path) -> dict[str, Any]:
    """Everything about one engine."""
    corpus, path = Corpus(passages), folder / f"{name}-{passages}"
    shutil.rmtree(path, ignore_errors=True)
    engine = ENGINES[name](path)
    result: dict[str, Any] = {"engine": name, "passages": passages}

    def note(**values: Any) -> None:
        result.update(values)
        print(
            json.dumps({k: v for k, v in values.items() if not k.startswith("search")}), flush=True
        )
        (RESULTS / f"{name}-{passages}.json").write_text(json.dumps(result, indent=1) + "\n")

    texts, near, targets = zip(*corpus.questions(), strict=True)
    np.savez(path.with_suffix(".npz"), texts=texts, vectors=near, targets=targets)
    loading = 0.0
    for first in range(0, passages, BLOCK):
        block = corpus.block(first)
        loading += seconds(engine.add, block)
    note(load_s=round(loading, 1), index_s=round(seconds(engine.finish), 1))
    note(build_peak_mib=peak_mib(), size_mib=size_mib(path))
    note(search=searched(name, path))
    if isinstance(engine, Arrays):
        return result
    if passages == BLOCK:
        copy = folder / f"{name}-killed"
        shutil.rmtree(copy, ignore_errors=True)
        elsewhere(shutil.copytree, path, copy)
        note(killed=killed(name, corpus, copy))
    words = [word[-10:] for word in corpus.planted.values()]
    numbers = [document * OF_DOCUMENT for document in corpus.planted]
    vectors = [corpus.block(n - n % BLOCK).vectors[n % BLOCK].tobytes()[:64] for n in numbers]

    def left(places: slice = slice(None)) -> str:
        return str(elsewhere(traces, path, words[places], vectors[places]))

    new = [corpus.document(corpus.documents + i) for i in range(CHANGES)]
    adding = [seconds(engine.add, block) for block in new]
    note(add=typical(adding), search_after_adding=searched(name, path) | {"bm25_ids": None})
    note(tidy_s=round(seconds(engine.tidy), 2))
    odd = np.random.default_rng(3).choice(corpus.documents // 2, 2 * CHANGES, replace=False) * 2 + 1
    times = [seconds(engine.remove, [int(one)]) for one in odd[:CHANGES]]
    note(remove=typical(times), traces_before=left(), size_before_removal_mib=size_mib(path))
    times = [seconds(engine.remove, [int(one)], True) for one in odd[CHANGES:]]
    note(erase=typical(times))
    engine.remove([numbers[0] // OF_DOCUMENT], erase=True)
    note(traces_of_one_erased=left(slice(1)), older_has_one=engine.older(0))

    even, start, done = range(2, corpus.documents, 2), time.perf_counter(), 0
    while done < len(even) and time.perf_counter() - start < REMOVAL_LIMIT_S:
        engine.remove(even[done : done + 500])
        done += 500
    note(remove_half_s=round(time.perf_counter() - start, 1), removed=min(1.0, done / len(even)))
    older = engine.older(numbers[1] // OF_DOCUMENT)
    note(half_removed=[size_mib(path), left(slice(1, None)), older])
    note(half_tidy_s=round(seconds(engine.tidy), 2))
    older = engine.older(numbers[1] // OF_DOCUMENT)
    note(half_tidied=[size_mib(path), left(slice(1, None)), older])
    note(half_rebuild_s=round(seconds(engine.rebuild), 1))
    note(half_rebuilt=[size_mib(path), left(slice(1, None))])
    note(search_half=searched(name, path) | {"bm25_ids": None})
    return result


def rows(result: Any) -> Iterator[tuple[str, str]]:
    """What the table says of one engine: a label and a cell each."""

    def times(values: dict[str, float]) -> str:
        figures = values["median_ms"], values["largest_ms"]
        return " / ".join(f"{one:,.0f}" if one >= 100 else f"{one:.3g}" for one in figures)

    yield "build: load, then index, s", f"{result['load_s']} + {result['index_s']}"
    yield "size on disk, MiB", f"{result['size_mib']}"
    found = result["search"]
    for label in [key for key, value in found.items() if isinstance(value, dict)]:
        kind = label.replace("IVF_PQ", "approximate").replace("binary", "approximate")
        yield f"{kind}, ms", times(found[label])
        if "approximate" in kind and "hybrid" not in kind:
            share = f"{found[label]['recall']:.0%}; {found[label]['near_found']}"
            yield f"its recall among 10; near passages found of {QUESTIONS}", share
    yield "opened and first asked, ms", f"{found['open_and_first_ms']}"
    yield (
        "peak memory of the searching process (before it opens), MiB",
        f"{found['peak_mib']:.0f} ({found['peak_before_mib']:.0f})",
    )
    if "erase" not in result:
        return
    yield "one document added, ms", times(result["add"])
    yield "BM25 after 20 are added, ms", times(result["search_after_adding"]["bm25"])
    yield "tidied then, s", f"{result['tidy_s']}"
    yield "one document removed, ms", times(result["remove"])
    yield "one removed and tidied, ms", times(result["erase"])
    yield "its traces on disk then", result["traces_of_one_erased"]
    if "half_rebuilt" not in result:
        return
    yield "half removed, s", f"{result['remove_half_s']} ({result['removed']:.0%})"
    took = {"half_tidied": "half_tidy_s", "half_rebuilt": "half_rebuild_s"}
    for key in ("half_removed", *took):
        size, left, *older = result[key]
        after = f" after {result[took[key]]} s" if key in took else ""
        older_too = ", older versions" if any(older) else ""
        yield f"{key.replace('_', ' ')}: size, MiB; traces", f"{size}{after}; {left}{older_too}"
    if "killed" in result:
        *kills, _ = result["killed"]
        good = [all(v for k, v in kill.items() if k not in ("committed", "held")) for kill in kills]
        yield "killed: opened, whole, complete, went on", f"{sum(good)} of {len(good)}"


def table() -> str:
    """All results as Markdown."""
    results = [json.loads(file.read_text()) for file in RESULTS.glob("*.json")]
    lines = []
    for passages in sorted({result["passages"] for result in results}):
        some = {one["engine"]: dict(rows(one)) for one in results if one["passages"] == passages}
        engines = [name for name in ENGINES if name in some]
        labels = dict.fromkeys(label for name in engines for label in some[name])
        lines += [f"\n### {passages:,} passages\n", f"| | {' | '.join(engines)} |"]
        lines.append("|---" * (len(engines) + 1) + "|")
        for label in labels:
            cells = [some[name].get(label, "–") for name in engines]
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["measure", "table", "search", "add"])
    parser.add_argument("engine", nargs="?", choices=list(ENGINES))
    parser.add_argument("passages", nargs="?", type=int)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    if asked.task == "table":
        print(table())
    elif asked.task == "search":
        print(json.dumps(search(asked.engine, asked.folder)))
    elif asked.task == "add":
        add_many(asked.engine, asked.passages, asked.folder)
    else:
        measure(asked.engine, asked.passages, asked.folder)


if __name__ == "__main__":
    main()
