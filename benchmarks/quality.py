"""All methods on the same held-out questions: one table a task that tells which method to take.

    python -m benchmarks.quality [--tasks single two-hop ...] [--passages 2 8 64]
        [--methods sequential pcw ...] [--questions 1000] [--jobs 2] [--minutes 40]
        [--model NAME_OR_FOLDER ...]

Every question has passages of its own; all methods answer it greedily, see benchmarks/answering.py.
Answers are kept in a file by blocks of questions, so a run that was killed goes on where it
stopped, and one with more questions, methods or tasks adds what is missing; delete the file after a
change of the weights or of the engine. A block of all cells comes before the next block of any, so
a run that is cut short has a table over fewer questions.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.answering import Answerer, Asked
from benchmarks.quality_tables import BASE, Cell, Figures
from rag_windows import Passage, WindowedLM, with_neighbours
from rag_windows.methods import Method, resolve
from rag_windows.methods.registry import describe
from rag_windows.prompt.builder import Header
from rag_windows_eval.files import add_lines, cut_torn, read_lines, write_whole
from rag_windows_retrievers import BM25Retriever
from training.tasks import CONNECTED, NEEDS_TWO, TASKS, Case, draw_case

MODELS = {
    **dict.fromkeys(["two-hop", "classification"], "tiny-learner"),
    **dict.fromkeys([*CONNECTED, "many alike"], "tiny-connector"),
}
"""The model that has learned a task; the others are `READER`'s."""
READER = "tiny-reader"

ASKED = ["single", "two-hop", "not stated", "follow-up", "classification", *CONNECTED, "many alike"]
"""Tasks of the models that are in the repository, asked unless others are named."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the tables.

    Attributes:
        method: as `resolve` takes it; ``{further}`` is the number of passages beyond the first.
        header: of the windows, as `WindowedLM` takes it; or "document", which gives each chunk of
            a document the title of the first one, and the number of its part.
        tasks: those that it is asked for; none means all.
        calibrated: whether `WindowedLM.compare` chooses the method's numbers on questions of the
            same task that are not asked here.
    """

    method: str
    header: str = "title"
    tasks: tuple[str, ...] = ()
    calibrated: bool = False


MANY = ("many alike",)
ROWS = {
    BASE: Row("sequential"),
    "pcw": Row("pcw"),
    "ape": Row("ape"),
    "structured-prompting": Row("structured-prompting"),
    "mateicl": Row("mateicl"),
    "ensemble, uniform": Row("ensemble:weights=uniform"),
    "ensemble, retrieval": Row("ensemble:weights=retrieval"),
    "ensemble, entropy": Row("ensemble:weights=entropy"),
    "ensemble, surest (NBCE)": Row("ensemble:weights=entropy,pooling=minimum"),
    # The sum of what the windows say, less what was said without any once for each further one.
    "ensemble, naive Bayes": Row("ensemble:beta={further},nucleus=1"),
    "deep-thinking, continue": Row("deep-thinking:positions=continue"),
    "deep-thinking, reuse": Row("deep-thinking:positions=reuse"),
    "deep-thinking + ape": Row("deep-thinking+ape"),
    "codebook, 8 by concat": Row("codebook:retrieve=8,fusion=concat"),
    "codebook, 8 by mean": Row("codebook:retrieve=8,fusion=mean"),
    "linked 15%, first": Row("linked:tokens=0.15,choose=first"),
    "linked 15%, deviation": Row("linked:tokens=0.15,choose=deviation"),
    "linked 15%, query": Row("linked:tokens=0.15,choose=query"),
    "linked 15%, last": Row("linked:tokens=0.15,choose=last"),
    "neighbours": Row("neighbours"),
    "neighbours + ape": Row("neighbours+ape"),
    "sink": Row("sink:tokens=4"),
    "sink + linked 15% + ape": Row("sink+linked:tokens=0.15,choose=deviation+ape"),
    "pcw, no header": Row("pcw", header="none"),
    "pcw, numbered titles": Row("pcw", header="number+title"),
    "pcw, title and place": Row("pcw", header="context", tasks=("split documents",)),
    **{
        f"ape, T={t} S={s}": Row(f"ape:temperature={t},scale={s}", tasks=MANY)
        for t in (0.5, 0.7, 0.9, 1.1)
        for s in (0.5, 0.8, 1.0, 1.2)
    },
    "mateicl, weight 1.5": Row("mateicl:schedule=1.5", tasks=MANY),
    "mateicl, weight 3": Row("mateicl:schedule=3.0", tasks=MANY),
    "ape, calibrated": Row("ape", tasks=MANY, calibrated=True),
}
"""By their labels. A row more is a line more; old cells stay as they are."""

CITED_TASK = "single"
"""The task whose questions name the title of the one passage that states the answer."""
BLOCK = 50
"""Questions that are kept together; they are drawn from a seed of their own."""
PROBED = 2
"""Questions of a cell whose extra prefill is measured."""
CALIBRATION = 48
"""Questions on which a row's numbers are chosen."""

KEY = ["model", "task", "passages", "label", "asked"]
"""What a cell is about. Its other fields are, for each block of its questions:

- block: its number.
- right: a letter a question: ``1`` where the greedy answer is right, else ``0``.
- written: ``1`` where the answer was also written token by token and is right or wrong as measured,
  ``0`` where not as measured, ``-`` where it was not written.
- cited: ``1`` where the passage of most attention states a right answer, ``0`` where another one
  has it, ``-`` where the answer is wrong or no attention was measured.
- blind: mean chance of a reader that knows the relation, but not whom it is asked about.
- again: mean share of the passages' tokens that are encoded again at question time, although every
  window has been encoded before; of the first block.
- cached: whether windows are found again that were encoded for another question; of the same.
"""

Place = tuple[str, str, int]
"""Model, task and number of passages."""


@dataclass(frozen=True, slots=True)
class Job:
    """Questions to ask in one go: those of a block, by some of the methods.

    `chosen` are descriptions of the methods that calibration chose, by label.
    """

    place: Place
    block: int
    questions: int
    written: int
    labels: tuple[str, ...]
    chosen: Mapping[str, Mapping[str, Any]]


@functools.cache
def loaded(model: str) -> WindowedLM:
    """The model, loaded once a process, on one thread."""
    torch.set_num_threads(1)
    return WindowedLM.from_pretrained(model)


@functools.cache
def answerer(model: str, header: Header) -> Answerer:
    """What asks a model with a header; all headers share the weights."""
    lm = loaded(model)
    return Answerer(WindowedLM.from_pretrained(lm.model, tokenizer=lm.tokenizer, header=header))


def cases(place: Place, block: int, questions: int, seed: int = 1) -> list[Case]:
    """The questions of a block; equal for all methods and models."""
    _, task, passages = place
    rng = np.random.default_rng([seed, list(TASKS).index(task), passages, block])
    return [draw_case(rng, task, passages) for _ in range(questions)]


def method_of(label: str, passages: int, chosen: Mapping[str, Any] | None = None) -> Method:
    """The method of a row over so many passages."""
    return resolve(chosen or ROWS[label].method.format(further=passages - 1))


def scored(case: Case) -> list[Passage]:
    """The passages with BM25 scores of what the user said; 0 where no word is shared."""
    passages = [
        Passage(text, title=title, id=str(number))
        for number, (title, text) in enumerate(case.passages)
    ]
    said = " ".join(one["content"] for one in case.messages if one["role"] == "user")
    found = BM25Retriever(passages).retrieve(said, k=len(passages))
    scores = {one.id: one.score for one in found}
    passages = [replace(one, score=scores.get(one.id) or 0.0) for one in passages]
    return with_documents(case, passages)


def with_documents(case: Case, passages: Sequence[Passage]) -> list[Passage]:
    """The passages with their places in the documents that they are chunks of, if they are."""
    titles: dict[int, str] = {}
    places = Counter[int]()
    made = []
    for number, passage in zip(case.documents, passages, strict=False):
        title = titles.setdefault(number, passage.title or f"Document {number + 1}")
        made.append(replace(passage, document=title, index=places[number]))
        places[number] += 1
    return with_neighbours(made) if made else list(passages)


def ask(job: Job) -> list[dict[str, Any]]:
    """Answer a block's questions by each method; the lines to keep."""
    model, task, passages = job.place
    drawn = cases(job.place, job.block, job.questions)
    lines = []
    for header in dict.fromkeys(ROWS[label].header for label in job.labels):
        labels = [label for label in job.labels if ROWS[label].header == header]
        methods = [method_of(label, passages, job.chosen.get(label)) for label in labels]
        asking = answerer(model, header)
        marks = {label: {"right": "", "written": "", "cited": ""} for label in labels}
        again: dict[str, list[tuple[float, bool]]] = {label: [] for label in labels}
        for number, case in enumerate(drawn):
            asked: Asked = (case.messages, scored(case))
            right = asking.right(asked, case.answer, methods)
            written: Sequence[tuple[str, int | None] | None] = [None] * len(labels)
            if number < job.written:
                written = asking.written(asked, methods, task == CITED_TASK)
            for label, method, correct, text in zip(labels, methods, right, written, strict=True):
                own = marks[label]
                own["right"] += "01"[correct]
                own["written"] += "-" if text is None else "01"[(text[0] == case.answer) == correct]
                own["cited"] += cited(case, text) if task == CITED_TASK else "-"
                if job.block == 0 and number < PROBED:
                    again[label].append(asking.again(asked, method))
        lines += [
            {
                **dict(zip(KEY, (*job.place, label, spelled(label, job.chosen)), strict=True)),
                "block": job.block,
                **marks[label],
                "blind": float(np.mean([case.blind for case in drawn])),
                "again": float(np.mean([one for one, _ in found])) if found else None,
                "cached": all(one for _, one in found) if found else None,
            }
            for label, found in again.items()
        ]
    return lines


def cited(case: Case, written: tuple[str, int | None] | None) -> str:
    """Whether the passage of most attention is the one that the question names; see `KEY`."""
    if written is None or written[0] != case.answer or written[1] is None:
        return "-"
    title = case.passages[written[1]][0]
    return "01"[title is not None and title in case.messages[-1]["content"]]


def choose(place: Place, label: str) -> dict[str, Any]:
    """A line with what calibration chooses for a row, on questions that are not asked."""
    model, _, passages = place
    row = ROWS[label]
    asking = answerer(model, row.header)
    examples = [
        {"query": list(case.messages), "passages": scored(case), "answer": case.answer}
        for case in cases(place, 0, CALIBRATION, seed=2)
    ]
    method = method_of(label, passages)
    profile = asking.lm.compare(examples, [method], grid=method)
    named = dict(zip(KEY[:4], (*place, label), strict=True))
    best = next(one.method for one in profile.ranked() if one.method.windowed)
    return {**named, "chosen": describe(best), "verdict": profile.verdict}


def spelled(label: str, chosen: Mapping[str, Mapping[str, Any]]) -> str:
    """What a row asks: cells of another method or header are done again."""
    row = ROWS[label]
    method = f"calibrated {json.dumps(chosen[label])}" if label in chosen else row.method
    return method if row.header == "title" else f"{method}, header {row.header}"


class Kept:
    """What the file of results holds; what a kill left of the last line is cut off.

    Attributes:
        blocks: lines by key and block, of several the one with most questions.
        chosen: what calibration chose, by place and label.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.blocks: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
        self.chosen: dict[Place, dict[str, Mapping[str, Any]]] = {}
        cut_torn(path)
        for _, line in read_lines(path, dict[str, Any]):
            self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        if "chosen" in line:
            place = line["model"], line["task"], line["passages"]
            self.chosen.setdefault(place, {})[line["label"]] = line["chosen"]
        elif "block" in line:
            own = self.blocks.setdefault(tuple(line[name] for name in KEY), {})
            if len(line["right"]) >= len(own.get(line["block"], {"right": ""})["right"]):
                own[line["block"]] = line

    def add(self, lines: Sequence[dict[str, Any]]) -> None:
        """Keep lines; they are safe afterwards."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        add_lines(self.path, lines)
        for line in lines:
            self._take(line)

    def lacks(self, place: Place, label: str, block: int, questions: int) -> bool:
        """Whether so many questions of a block are not answered yet."""
        key = (*place, label, spelled(label, self.chosen.get(place, {})))
        return len(self.blocks.get(key, {}).get(block, {"right": ""})["right"]) < questions

    def cells(self, places: Iterable[tuple[Place, str]], questions: int) -> Iterator[Cell]:
        """The cells, each with the questions that all blocks before have answered, too."""
        for place, label in places:
            key = (*place, label, spelled(label, self.chosen.get(place, {})))
            found = self.blocks.get(key, {})
            lines: list[dict[str, Any]] = []
            while len(lines) in found:
                lines.append(found[len(lines)])
                if len(lines[-1]["right"]) < BLOCK:
                    break
            if lines:
                right, cited, written = (
                    "".join(line[name] for line in lines)[:questions]
                    for name in ("right", "cited", "written")
                )
                weights = [len(line["right"]) for line in lines]
                blind = float(np.average([line["blind"] for line in lines], weights=weights))
                first = lines[0]
                yield Cell(*key, right, cited, written, blind, first["again"], first["cached"])


def wanted(options: argparse.Namespace) -> list[tuple[Place, list[str]]]:
    """Places with the rows that are asked there, the longest first."""
    found = []
    for passages in sorted(options.passages, reverse=True):
        for task in options.tasks:
            if passages == 1 and task in NEEDS_TWO:
                continue
            labels = [one for one in options.methods if task in (ROWS[one].tasks or (task,))]
            for model in options.model or [MODELS.get(task, READER)]:
                found.append(((model, task, passages), labels))
    return found


def jobs(options: argparse.Namespace, kept: Kept) -> Iterator[Job]:
    """What is missing, a block of every cell before the next block of any."""
    for block, first in enumerate(range(0, options.questions, BLOCK)):
        count = min(BLOCK, options.questions - first)
        for place, labels in wanted(options):
            chosen = kept.chosen.get(place, {})
            left = tuple(
                one
                for one in labels
                # A run that was cut short may not have calibrated.
                if kept.lacks(place, one, block, count)
                and (one in chosen or not ROWS[one].calibrated)
            )
            if left:
                yield Job(place, block, count, options.written, left, chosen)


def run(options: argparse.Namespace) -> Kept:
    """Answer what is missing, and keep each block as it comes."""
    kept, begun = Kept(options.results), time.monotonic()
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:

        def results(work: Any, items: Sequence[Any]) -> Iterator[Any]:
            late = begun + (float("inf") if options.minutes is None else 60 * options.minutes)
            if options.jobs == 1:
                yield from (work(one) for one in items if time.monotonic() < late)
                return
            waiting = {pool.submit(work, one) for one in items if time.monotonic() < late}
            while waiting:
                ended, waiting = wait(waiting, 1.0, FIRST_COMPLETED)
                yield from (one.result() for one in ended)
                if time.monotonic() > late:
                    waiting = {one for one in waiting if not one.cancel()}

        missing = [
            (place, label)
            for place, labels in wanted(options)
            for label in labels
            if ROWS[label].calibrated and label not in kept.chosen.get(place, {})
        ]
        for line in results(_choose, missing):
            kept.add([line])
            print(f"{line['label']}, {line['passages']}: {line['verdict']}", file=sys.stderr)
        todo = list(jobs(options, kept))
        for done, lines in enumerate(results(ask, todo), start=1):
            kept.add(lines)
            what = " ".join(str(lines[0][name]) for name in [*KEY[:3], "block"])
            answers, seconds = sum(len(one["right"]) for one in lines), time.monotonic() - begun
            print(
                f"{done} of {len(todo)}, {seconds:.0f} s: {what}, {answers:,} answers",
                file=sys.stderr,
                flush=True,
            )
    return kept


def _choose(asked: tuple[Place, str]) -> dict[str, Any]:
    return choose(*asked)


def main(given: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=ASKED)
    sizes = [1, 2, 4, 8, 16, 32, 64]
    parser.add_argument("--passages", nargs="+", type=int, default=sizes)
    parser.add_argument("--methods", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument(
        "--model", nargs="+", help="names or folders to ask instead of the one that learned a task"
    )
    parser.add_argument("--questions", type=int, default=200, help="of each cell")
    parser.add_argument(
        "--written", type=int, default=2, help="of each 50 questions, written token by token, too"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes, with one thread each")
    parser.add_argument(
        "--minutes", type=float, help="begin no block after so many minutes; 0 shows what is kept"
    )
    parser.add_argument("--results", type=Path, help="file of the answers")
    parser.add_argument(
        "--base", choices=list(ROWS), default=BASE, help="what the other methods are compared with"
    )
    parser.add_argument("--json", type=Path, help="file for the figures, as JSON")
    options = parser.parse_args(given)
    options.results = options.results or Path(__file__).parent / "results" / "quality.jsonl"
    kept = run(options)
    places = [(place, label) for place, labels in wanted(options) for label in labels]
    figures = Figures(
        list(kept.cells(places, options.questions)),
        list(TASKS),
        list(ROWS),
        CITED_TASK,
        options.base,
    )
    if options.json is not None:
        write_whole(options.json, json.dumps(figures.as_json(), indent=1) + "\n")
    print(figures.markdown())


if __name__ == "__main__":
    main()
