"""All methods on the same held-out questions: prints the tables of benchmarks/results/methods.md.

    python benchmarks/quality.py [--tasks single two-hop ...] [--passages 1 8 64]
        [--methods sequential pcw ...] [--questions 200] [--jobs 2] [--model NAME]

Every question has passages of its own and is answered by `WindowedLM.generate`, greedily and with
nothing cached. Finished cells are kept in a file, so a run that was killed goes on where it
stopped, and one with more methods or tasks adds what is missing; delete the file after a change of
the weights or of the engine.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from rag_windows import Passage, WindowedLM
from rag_windows.evaluation.files import add_lines, cut_torn, read_lines
from rag_windows.evaluation.summary import Estimate, bootstrap, estimate
from rag_windows.evaluation.summary import percent as percent_of
from rag_windows_retrievers import BM25Retriever
from training.tasks import NEEDS_TWO, TASKS, Case, draw_case

ASKED = ["single", "two-hop", "not stated", "follow-up", "classification"]
LEARNED = ("two-hop", "classification")
"""The tasks of tiny-learner; the others are tiny-reader's."""

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

CITED_TASK = "single"
"""The task whose questions name the title of the one passage that states the answer."""
TRAINED = 8
"""The most passages that the readers were trained with."""
KEY = ["model", "task", "passages", "label"]
"""What a cell is about. Its other fields are, for each cell:

- right: a letter a question: ``1`` where the answer is right, else ``0``.
- cited: ``1`` where the passage of most attention states a right answer, ``0`` where another one
  has it, ``-`` where the answer is wrong or no attention was measured.
- blind: mean chance of a reader that knows the relation, but not whom it is asked about.
"""
FIELDS = ["right", "cited", "blind"]


@functools.cache
def reader(model: str) -> WindowedLM:
    """The model, loaded once a process, on one thread."""
    torch.set_num_threads(1)
    return WindowedLM.from_pretrained(model)


def ask(questions: int, key: tuple[str, str, int, str]) -> dict[str, Any]:
    """Answer all questions of a cell; equal keys but for the method give equal questions."""
    model, task, passages, label = key
    rng = np.random.default_rng([1, list(TASKS).index(task), passages])
    cases = [draw_case(rng, task, passages) for _ in range(questions)]
    right, cited = "", ""
    for case in cases:
        made = reader(model).generate(
            list(case.messages),
            scored(case),
            method=METHODS[label].format(further=passages - 1),
            max_new_tokens=40,
            do_sample=False,
            citations=task == CITED_TASK,
        )
        correct = made.text.strip() == case.answer
        right += "01"[correct]
        mark = "-"
        if correct and made.citations and any(one.mass for one in made.citations):
            most = max(made.citations, key=lambda one: one.mass).passage
            title = case.passages[most][0]
            mark = "01"[title is not None and title in case.messages[-1]["content"]]
        cited += mark
    blind = float(np.mean([case.blind for case in cases]))
    return dict(zip([*KEY, *FIELDS], [*key, right, cited, blind], strict=True))


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


def read_results(path: Path) -> pd.DataFrame:
    """Finished cells, the latest of each; what a kill left of the last line is cut off."""
    cut_torn(path)
    rows = [row for _, row in read_lines(path, dict[str, Any])]
    return pd.DataFrame(rows, columns=[*KEY, *FIELDS]).drop_duplicates(KEY, keep="last")


def wanted(options: argparse.Namespace) -> list[tuple[str, str, int, str]]:
    """Keys of all cells that were asked for, the longest first."""
    keys = []
    for passages in sorted(options.passages, reverse=True):
        for task in options.tasks:
            model = options.model or ("tiny-learner" if task in LEARNED else "tiny-reader")
            if passages > 1 or task not in NEEDS_TWO:
                keys += [(model, task, passages, label) for label in options.methods]
    return keys


def run(options: argparse.Namespace) -> None:
    """Answer what is missing, and keep each cell as it comes."""
    cells = read_results(options.results)
    same = cells["right"].str.len() == options.questions
    done = set(cells[same][KEY].itertuples(index=False, name=None))
    missing = [key for key in wanted(options) if key not in done]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        work = map if options.jobs == 1 else pool.map
        for cell in work(functools.partial(ask, options.questions), missing):
            add_lines(options.results, [cell])
            what = " ".join(str(cell[name]) for name in KEY)
            share = cell["right"].count("1") / len(cell["right"])
            print(f"{what}: {share:.1%}", file=sys.stderr, flush=True)


def shares(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Right answers for each of the base; (..., 2) to (...)."""
    return np.asarray(percent_of(sums[..., 0], sums[..., 1]))


def estimated(
    right: str, base: str | None = None, formula: Callable[..., NDArray[np.float64]] = shares
) -> Estimate:
    """Percent of right answers, of those that the base has right; the interval is paired."""
    rows = [(mark == "1", base is None or base[i] == "1") for i, mark in enumerate(right)]
    values, drawn = bootstrap(np.array(rows, dtype=np.float64)[:, None], formula)
    return estimate(values[0], drawn[0])


def percent(right: str, base: str | None = None, mark: str = "") -> str:
    """An estimate, a mark, and its interval."""
    found = estimated(right, base)
    return f"{found.value:.1f}{mark} ({found.low:.1f}–{found.high:.1f})"


def arrow(right: str, base: str | None) -> str:
    """Whether the whole interval of the difference to the base is on one side of zero."""
    if base is None or right == base:
        return ""
    gain = estimated(right, base, lambda sums: sums[..., 0] - sums[..., 1])
    return " ↑" if gain.low > 0 else " ↓" if gain.high < 0 else ""


def grid(
    cells: pd.DataFrame, head: str, columns: str, text: Callable[[pd.Series[Any]], str]
) -> str:
    """A Markdown table with a row a method, in their order, and a text for each cell."""
    order = list(cells[columns].unique())
    shown = cells.assign(text=[text(row) for _, row in cells.iterrows()])
    shown = shown.pivot(index="label", columns=columns, values="text")
    shown = shown.reindex(index=[one for one in METHODS if one in shown.index], columns=order)
    return str(shown.fillna("").rename_axis(head).to_markdown()) + "\n"


def sections(cells: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Task, model and their cells by size, in the order of the tasks; `base` holds sequential's."""
    place = KEY[:3]
    base = cells[cells["label"] == BASE].set_index(place)["right"].rename("base")
    cells = cells.join(base, on=place).sort_values("passages")
    for task in TASKS:
        for model, own in cells[cells["task"] == task].groupby("model"):
            yield task, str(model), own.astype({"base": object}).where(own.notna(), None)


def accuracy(cells: pd.DataFrame) -> str:
    """Percent right of every method at every number of passages, a table for each task."""
    parts = []
    for task, model, own in sections(cells):
        table = grid(
            own,
            "method",
            "passages",
            lambda one: percent(one["right"], mark=arrow(one["right"], one["base"])),
        )
        blind = own.drop_duplicates("passages")["blind"]
        parts.append(
            f"### {task}, `{model}`\n\n{own['right'].str.len().max():,} questions a cell.\n"
        )
        last = " | ".join(f"{100 * one:.0f}" for one in blind)
        parts.append(f"{table}| *blind baseline* | {last} |\n")
    return "\n".join(parts)


def tables(cells: pd.DataFrame) -> str:
    """All tables: accuracy, what of sequential's right answers is kept, citations."""
    whole = pd.concat(own for _, _, own in sections(cells))
    whole = whole.assign(section=whole["task"] + ", `" + whole["model"] + "`")
    kept = whole[(whole["passages"] == TRAINED) & (whole["label"] != BASE) & whole["base"].notna()]
    cited = whole[(whole["task"] == CITED_TASK) & (whole["cited"].str.strip("-") != "")]
    retention = grid(kept, "retention", "section", lambda one: percent(one["right"], one["base"]))
    parts = [accuracy(cells), f"### Of sequential's, {TRAINED} passages\n\n{retention}"]
    for model, own in cited.groupby("model"):
        shown = grid(
            own, str(model), "passages", lambda one: percent(one["cited"].replace("-", ""))
        )
        parts.append(f"### Right answers whose most attended passage states them\n\n{shown}")
    return "\n".join(parts)


def main(given: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=ASKED)
    sizes = [1, 2, 4, 8, 16, 32, 64]
    parser.add_argument("--passages", nargs="+", type=int, default=sizes)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--model", help="ask this one instead of the one that learned a task")
    parser.add_argument("--questions", type=int, default=200, help="of each cell")
    parser.add_argument("--jobs", type=int, default=2, help="processes, with one thread each")
    parser.add_argument("--results", type=Path, help="file of the finished cells")
    options = parser.parse_args(given)
    name = f"quality-{options.questions}.jsonl"
    options.results = options.results or Path(__file__).parent / "results" / name
    run(options)
    asked = pd.DataFrame(wanted(options), columns=KEY)
    print(tables(read_results(options.results).merge(asked, on=KEY)))


if __name__ == "__main__":
    main()
