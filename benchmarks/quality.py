"""All methods on the same held-out questions: writes the tables and pictures of docs/methods.md.

    python benchmarks/quality.py [--quick] [--tasks single-hop ...] [--passages 1 8 64]
        [--methods sequential pcw ...] [--questions 200] [--jobs 2] [--model NAME] [--draw]

Every question has passages of its own and is answered by `WindowedLM.generate`, greedily and with
nothing cached. Finished cells are kept in benchmarks/results/quality.jsonl, so a run that was
killed goes on where it stopped, and one with more methods or tasks adds what is missing; begin anew
with ``--fresh`` after a change of the weights or of the engine.

``--model`` asks another model than the one that learned a task and, like ``--quick``, prints the
tables and leaves docs alone. ``--draw`` asks nothing and writes what is there.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from rag_windows import Passage, WindowedLM
from rag_windows.evaluation.machine import machine
from rag_windows_retrievers import BM25Retriever
from training.tasks import FEWEST, Case, draw_case

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "methods.md"
RESULTS = ROOT / "benchmarks" / "results" / "quality.jsonl"
READER, LEARNER = "tiny-reader", "tiny-learner"
TASKS = {
    "single-hop": ("single", READER),
    "two-hop": ("two-hop", LEARNER),
    "not-stated": ("not stated", READER),
    "follow-up": ("follow-up", READER),
    "classification": ("classification", LEARNER),
    "kin": ("kin", READER),
    "pronouns": ("pronouns", READER),
}
"""Tasks by the page's names: what the training calls them, and the model that learned them."""

BASE = "sequential"
METHODS = {
    BASE: "sequential",
    "pcw": "pcw",
    "ape": "ape",
    "structured-prompting": "structured-prompting",
    "mateicl": "mateicl",
    "ensemble, uniform": "ensemble:weights=uniform",
    "ensemble, retrieval": "ensemble:weights=retrieval",
    "ensemble, entropy": "ensemble:weights=entropy",
    "ensemble, surest (NBCE)": "ensemble:weights=entropy,pooling=minimum",
    # The sum of what the windows say, less what was said without any once for each further one.
    "ensemble, naive Bayes": "ensemble:beta={further},nucleus=1",
    "deep-thinking, continue": "deep-thinking:positions=continue",
    "deep-thinking, reuse": "deep-thinking:positions=reuse",
    "deep-thinking + ape": "deep-thinking+ape",
    "codebook, 8 by concat": "codebook:retrieve=8,fusion=concat",
    "codebook, 8 by mean": "codebook:retrieve=8,fusion=mean",
    "linked 15%, first": "linked:tokens=0.15,choose=first",
    "linked 15%, deviation": "linked:tokens=0.15,choose=deviation",
}
"""The rows of the tables; ``{further}`` is the number of passages beyond the first."""

CITED_TASK = "single-hop"
"""The task whose questions name the title of the one passage that states the answer."""
TRAINED = 8
"""The most passages that the readers were trained with."""
MOST_TOKENS = 40
RESAMPLES = 2000
NOT_RUN = "*Not run.*\n"


@dataclass(frozen=True, slots=True)
class Cell:
    """One method's answers to the questions of a task over a number of passages.

    Attributes:
        model: its name.
        task: one of `TASKS`.
        passages: of each question.
        label: of the method.
        seed: of the questions.
        right: a letter a question: ``1`` where the answer is right, else ``0``.
        cited: ``1`` where the passage of most attention states a right answer, ``0`` where another
            one has it, ``-`` where the answer is wrong or no attention was measured.
        blind: mean chance of a reader that knows the relation, but not whom it is asked about.
        encode_s: median seconds of a question from the call to the end of the encoding.
        answer_s: median seconds from there to the end of the answer.
    """

    model: str
    task: str
    passages: int
    label: str
    seed: int
    right: str
    cited: str
    blind: float
    encode_s: float
    answer_s: float

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What it is about."""
        return self.model, self.task, self.passages, self.label


Cells = dict[tuple[str, str, int, str], Cell]


@functools.cache
def reader(model: str) -> WindowedLM:
    """The model, loaded once a process, on one thread."""
    torch.set_num_threads(1)
    return WindowedLM.from_pretrained(model)


def ask(model: str, task: str, passages: int, label: str, questions: int, seed: int) -> Cell:
    """Answer all questions of a cell; equal arguments but the method give equal questions."""
    rng = np.random.default_rng([seed, list(TASKS).index(task), passages])
    cases = [draw_case(rng, TASKS[task][0], passages) for _ in range(questions)]
    lm, right, cited, seconds = reader(model), "", "", []
    for case in cases:
        generation = lm.generate(
            list(case.messages),
            scored(case),
            method=METHODS[label].format(further=passages - 1),
            max_new_tokens=MOST_TOKENS,
            do_sample=False,
            citations=task == CITED_TASK,
        )
        correct = generation.text.strip() == case.answer
        right += "01"[correct]
        mark = "-"
        if correct and generation.citations and any(one.mass for one in generation.citations):
            most = max(generation.citations, key=lambda one: one.mass).passage
            title = case.passages[most][0]
            mark = "01"[title is not None and title in case.messages[-1]["content"]]
        cited += mark
        times = generation.timings
        seconds.append((times.encode_s, times.total_s - times.encode_s))
    blind = statistics.fmean(case.blind for case in cases)
    encode_s, answer_s = (statistics.median(one) for one in zip(*seconds, strict=True))
    return Cell(
        model, task, passages, label, seed, right, cited, blind, float(encode_s), float(answer_s)
    )


def scored(case: Case) -> list[Passage]:
    """The passages with BM25 scores of what the user said; 0 where no word is shared."""
    passages = [
        Passage(text, title=title, id=str(number))
        for number, (title, text) in enumerate(case.passages)
    ]
    said = " ".join(one["content"] for one in case.messages if one["role"] == "user")
    found = BM25Retriever(passages).retrieve(said, k=len(passages))
    scores = {one.id: one.score for one in found}
    return [replace(one, score=scores.get(one.id) or 0.0) for one in passages]


def read_results(path: Path) -> Cells:
    """Finished cells; what a kill left of the last line is ignored."""
    cells: Cells = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.endswith("}"):
            cell = Cell(**json.loads(line))
            cells[cell.key] = cell
    return cells


def wanted(options: argparse.Namespace) -> Iterable[tuple[str, str, int, str]]:
    """Keys of all cells that were asked for, the longest first."""
    for passages in sorted(options.passages, reverse=True):
        for task in options.tasks:
            if passages < FEWEST.get(TASKS[task][0], 1):
                continue
            for label in options.methods:
                yield options.model or TASKS[task][1], task, passages, label


def run(options: argparse.Namespace) -> Cells:
    """Answer what is missing, and keep each cell as it comes."""
    cells = read_results(options.results)
    missing = [
        key
        for key in wanted(options)
        if key not in cells
        or (len(cells[key].right), cells[key].seed) != (options.questions, options.seed)
    ]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with options.results.open("a", encoding="utf-8") as file:
        if file.tell() and not options.results.read_bytes().endswith(b"\n"):
            file.write("\n")
        for number, cell in enumerate(answered(missing, options), start=1):
            cells[cell.key] = cell
            file.write(json.dumps(asdict(cell)) + "\n")
            file.flush()
            share = cell.right.count("1") / len(cell.right)
            what = f"{cell.model} {cell.task} {cell.passages} {cell.label}"
            print(f"{number} of {len(missing)}: {what}: {share:.1%}", file=sys.stderr, flush=True)
    return cells


def answered(
    keys: Sequence[tuple[str, str, int, str]], options: argparse.Namespace
) -> Iterator[Cell]:
    """The cells as they come, from so many processes; from this one if it is to be one."""
    if options.jobs == 1:
        for key in keys:
            yield ask(*key, options.questions, options.seed)
        return
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        left = [pool.submit(ask, *key, options.questions, options.seed) for key in keys]
        try:
            for future in as_completed(left):
                yield future.result()
        finally:
            # Otherwise a pool that is left by an error works off everything that waits.
            pool.shutdown(cancel_futures=True)


Estimate = tuple[float, float, float]
"""Value, and lower and upper end of its 95% interval."""


def estimate(marks: str, base: str | None = None) -> Estimate:
    """Share of right answers; with a base, right answers for each right one of the base.

    Percentile intervals of a bootstrap over questions, the same ones drawn for both.
    """
    own = np.array([mark == "1" for mark in marks], dtype=np.float64)
    other = np.ones_like(own) if base is None else np.array([mark == "1" for mark in base])
    drawn = np.random.default_rng(0).integers(len(own), size=(RESAMPLES, len(own)))
    with np.errstate(divide="ignore", invalid="ignore"):
        resampled = own[drawn].sum(axis=1) / other[drawn].sum(axis=1)
        value = own.sum() / other.sum()
    low, high = np.nanpercentile(resampled, (2.5, 97.5))
    return float(value), float(low), float(high)


def percent(found: Estimate, mark: str = "") -> str:
    """A share with its interval, in percent."""
    value, low, high = (100 * one for one in found)
    return f"{value:.1f}{mark} ({low:.1f}–{high:.1f})"


def arrow(cell: Cell, base: Cell | None) -> str:
    """Whether the whole interval of the difference to the base is on one side of zero."""
    if base is None or cell.right == base.right:
        return ""
    pairs = zip(cell.right, base.right, strict=True)
    gains = np.array([int(own) - int(other) for own, other in pairs])
    drawn = np.random.default_rng(0).integers(len(gains), size=(RESAMPLES, len(gains)))
    low, high = np.percentile(gains[drawn].mean(axis=1), (2.5, 97.5))
    return " ↑" if low > 0 else " ↓" if high < 0 else ""


def table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table, or a line that says there is nothing."""
    if not rows:
        return NOT_RUN
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def sections(cells: Cells) -> list[tuple[str, str]]:
    """(model, task) of all cells, in the order of the tasks."""
    found = {(cell.model, cell.task) for cell in cells.values()}
    return sorted(found, key=lambda pair: (list(TASKS).index(pair[1]), pair[0]))


def sizes_of(cells: Cells, section: tuple[str, str]) -> list[int]:
    """Numbers of passages of a section."""
    return sorted({cell.passages for cell in cells.values() if (cell.model, cell.task) == section})


def accuracy(cells: Cells) -> str:
    """Percent right of every method at every number of passages, a table for each task."""
    parts = []
    for section in sections(cells):
        sizes, rows = sizes_of(cells, section), []
        for label in METHODS:
            found = [cells.get((*section, size, label)) for size in sizes]
            bases = [cells.get((*section, size, BASE)) for size in sizes]
            if any(found):
                shown = [
                    percent(estimate(one.right), arrow(one, base)) if one else ""
                    for one, base in zip(found, bases, strict=True)
                ]
                rows.append([label, *shown])
        own = [cell for cell in cells.values() if (cell.model, cell.task) == section]
        blind = {cell.passages: f"{100 * cell.blind:.0f}" for cell in own}
        rows.append(["*blind baseline*", *(blind[size] for size in sizes)])
        questions = max(len(cell.right) for cell in own)
        parts.append(f"### {section[1]}, `{section[0]}`\n\n{questions:,} questions a cell.\n\n")
        parts.append(table(["method", *sizes], rows) + "\n")
    return "".join(parts) or NOT_RUN


def retention(cells: Cells) -> str:
    """Right answers for each right one of the sequential reader, where that one still fits."""
    columns = [one for one in sections(cells) if (*one, TRAINED, BASE) in cells]
    rows = []
    for label in METHODS:
        found = [cells.get((*column, TRAINED, label)) for column in columns]
        if label != BASE and any(found):
            bases = [cells[(*column, TRAINED, BASE)].right for column in columns]
            pairs = zip(found, bases, strict=True)
            rows.append([label, *(percent(estimate(c.right, b)) if c else "" for c, b in pairs)])
    head = [f"{task}, `{model}`" for model, task in columns]
    return table([f"{TRAINED} passages", *head], rows)


def citations(cells: Cells) -> str:
    """Right answers whose most attended passage states them."""
    parts = []
    for section in sections(cells):
        if section[1] != CITED_TASK:
            continue
        sizes, rows = [size for size in sizes_of(cells, section) if size > 1], []
        for label in METHODS:
            found = [cells.get((*section, size, label)) for size in sizes]
            marks = ["" if one is None else one.cited.replace("-", "") for one in found]
            if any(marks):
                rows.append([label, *(percent(estimate(one)) if one else "" for one in marks)])
        parts.append(table([f"`{section[0]}`", *sizes], rows))
    return "\n".join(parts) or NOT_RUN


def cost(cells: Cells) -> str:
    """Milliseconds to encode and to answer, medians."""
    section = (TASKS[CITED_TASK][1], CITED_TASK)
    sizes, rows = sizes_of(cells, section), []
    for label in METHODS:
        found = [cells.get((*section, size, label)) for size in sizes]
        if any(found):
            shown = [f"{1e3 * c.encode_s:.0f} + {1e3 * c.answer_s:.0f}" if c else "" for c in found]
            rows.append([label, *shown])
    return table(["encode + answer, ms", *sizes], rows)


def blocks(cells: Cells, options: argparse.Namespace) -> dict[str, str]:
    """Every block of the page, by name."""
    answers = sum(len(cell.right) for cell in cells.values())
    return {
        "run": f"`python benchmarks/quality.py`, {options.jobs} process(es) of one thread each on "
        f"{machine()}: {len(cells):,} cells, {answers:,} answers.\n",
        "accuracy": accuracy(cells),
        "retention": retention(cells),
        "citations": citations(cells),
        "cost": cost(cells),
    }


def fill_page(page: str, texts: dict[str, str]) -> str:
    """Put every text between its markers, ``<!-- figures: NAME -->`` and the end's.

    Raises:
        ValueError: the page's places are not those of the texts.
    """
    block = re.compile(r"(<!-- figures: ([a-z]+) -->\n).*?(<!-- end of figures -->)", re.S)
    places = [found[2] for found in block.finditer(page)]
    if sorted(places) != sorted(texts):
        raise ValueError(f"the page has places for {sorted(places)}, not for {sorted(texts)}")
    return block.sub(lambda found: f"{found[1]}{texts[found[2]]}{found[3]}", page)


def draw(cells: Cells, section: tuple[str, str], path: Path) -> None:
    """Accuracy against passages: a panel a family of methods, sequential reading in each."""
    from matplotlib.figure import Figure

    families: dict[str, list[str]] = {}
    for label in list(METHODS)[1:]:
        family = re.split(r"[,+\d]", label)[0].strip()
        families.setdefault("one merge" if family == label else family, []).append(label)
    figure = Figure(figsize=(13, 9), layout="constrained")
    figure.suptitle(f"{section[1]}, {section[0]}: right answers in percent, 95% intervals")
    grid = figure.subplots(-(-len(families) // 2), 2, sharex=True, sharey=True).flatten()
    sizes = sizes_of(cells, section)
    for axes, (family, labels) in zip(grid, families.items(), strict=False):
        for number, label in enumerate([BASE, *labels]):
            found = [cells[(*section, n, label)] for n in sizes if (*section, n, label) in cells]
            if not found:
                continue
            figures = [estimate(cell.right) for cell in found]
            errors = [[100 * abs(one[0] - one[end]) for one in figures] for end in (1, 2)]
            axes.errorbar(
                [cell.passages for cell in found],
                [100 * value for value, _, _ in figures],
                yerr=errors,
                color="#222222" if label == BASE else f"C{number - 1}",
                linestyle="--" if label == BASE else "-",
                marker="" if label == BASE else "os^Dv"[number - 1],
                capsize=2,
                label=label,
            )
        axes.set_title(family, fontsize=11)
        axes.set_xlabel("passages", fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_ylim(-2, 103)
        axes.grid(axis="y", color="#e6e6e6")
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    for axes in grid[len(families) :]:
        axes.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/quality.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS)[:5])
    parser.add_argument("--passages", nargs="+", type=int)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--model", help="ask this one, and print the tables only")
    parser.add_argument("--questions", type=int, help="of each cell")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="processes, with one thread each")
    parser.add_argument("--quick", action="store_true", help="a few questions, printed only")
    parser.add_argument("--fresh", action="store_true", help="forget the finished cells")
    parser.add_argument("--draw", action="store_true", help="ask nothing, write what is there")
    parser.add_argument("--results", type=Path, help="file of the finished cells")
    parser.add_argument("--out", type=Path, help="folder of the page, instead of docs")
    options = parser.parse_args(given)
    printed = options.quick or options.model is not None
    options.passages = options.passages or ([2, 8] if options.quick else [1, 2, 4, 8, 16, 32, 64])
    options.questions = options.questions or (8 if options.quick else 200)
    name = "quality-quick.jsonl" if printed else "quality.jsonl"
    options.results = options.results or (ROOT / "runs" / name if printed else RESULTS)
    options.out = options.out or (None if printed else PAGE.parent)
    return options


def main(given: Sequence[str] | None = None) -> None:
    """The command."""
    options = arguments(given)
    if options.fresh:
        options.results.unlink(missing_ok=True)
    cells = read_results(options.results) if options.draw else run(options)
    texts = blocks(cells, options)
    if options.out is None:
        keys = set(wanted(options))
        print(accuracy({key: cell for key, cell in cells.items() if key in keys}))
        return
    page = fill_page(PAGE.read_text(encoding="utf-8"), texts)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / PAGE.name).write_text(page, encoding="utf-8")
    for model, task in sections(cells):
        draw(cells, (model, task), options.out / "methods" / f"{task}-{Path(model).name}.png")
    print(options.out / PAGE.name)


if __name__ == "__main__":
    main()
