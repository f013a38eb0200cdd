"""The command `demo`: three questions over the sample corpus, read in one prompt and in windows."""

from __future__ import annotations

import dataclasses
import itertools
import json as json_format
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from rag_windows.cli import options, render
from rag_windows.cli.corpus import SearchOptions, open_corpus
from rag_windows.cli.models import DEFAULT_METHOD, ModelOptions, load_model
from rag_windows.cli.progress import Progress
from rag_windows.passage import Passage
from rag_windows.prompt.visible_text import one_line
from rag_windows.samples import samples_path

if TYPE_CHECKING:
    from rag_windows import WindowedLM
    from rag_windows_retrievers import BM25Retriever

METHODS = ("sequential", DEFAULT_METHOD)
_ANSWER_TOKENS = 32
_RUNS = 3
_ARTICLES = frozenset(("a", "an", "the"))


@dataclass(frozen=True, slots=True)
class Task:
    """A question, its right answer, and over how many passages to ask it."""

    question: str
    answer: str
    top_k: int


@dataclass(frozen=True, slots=True)
class Row:
    """What one method made of one task; `first_token_s` is in seconds, the best of three runs."""

    question: str
    passages: int
    method: str
    answer: str
    expected: str
    first_token_s: float
    right: bool


def demo(
    device: options.Device = "auto", json: options.Json = False, verbose: options.Verbose = False
) -> None:
    """Answer three questions over the sample corpus, sequentially and with windows."""
    progress = Progress()
    retriever = open_corpus(SearchOptions(), progress).retriever
    text = (samples_path() / "demo.json").read_text(encoding="utf-8")
    tasks = [Task(**row) for row in json_format.loads(text)]
    lm = load_model(ModelOptions(device=device, no_cache=True, verbose=verbose), progress)
    with progress.waiting("Answering"):
        rows = run(lm, retriever, tasks)
    if json:
        render.write_json([dataclasses.asdict(row) for row in rows])
    else:
        _show(rows)


def run(lm: WindowedLM, retriever: BM25Retriever, tasks: Sequence[Task]) -> list[Row]:
    """Answer every task with every method."""
    # The first call of a process pays for lazy set-up that no method is to be charged with.
    for method in METHODS:
        lm.generate(tasks[0].question, retriever.passages[:2], method=method, max_new_tokens=2)
    rows = []
    for task, method in itertools.product(tasks, METHODS):
        passages = passages_for(retriever, task)
        runs = [
            lm.generate(
                task.question,
                passages,
                method=method,
                max_new_tokens=_ANSWER_TOKENS,
                do_sample=False,
            )
            for _ in range(_RUNS)
        ]
        best = min(runs, key=lambda one: one.timings.ttft_s)
        rows.append(
            Row(
                question=task.question,
                passages=len(passages),
                method=method,
                answer=best.text.strip(),
                expected=task.answer,
                first_token_s=best.timings.ttft_s,
                right=is_right(best.text, task.answer),
            )
        )
    return rows


def passages_for(retriever: BM25Retriever, task: Task) -> list[Passage]:
    """The best passages, and where fewer share a word with the question, any others behind."""
    hits = retriever.retrieve(task.question, task.top_k)
    found = {hit.id for hit in hits}
    others = (one for one in retriever.passages if one.id not in found)
    return [*hits, *itertools.islice(others, task.top_k - len(hits))]


def is_right(answer: str, expected: str) -> bool:
    """Whether an answer has the expected words and no others, but for case and articles."""

    def words(text: str) -> list[str]:
        return [word for word in re.findall(r"\w+", text.casefold()) if word not in _ARTICLES]

    return words(answer) == words(expected)


def _show(rows: Sequence[Row]) -> None:
    table = render.plain_table()
    table.add_column("question", overflow="fold")
    table.add_column("passages", justify="right")
    table.add_column("method")
    table.add_column("answer", overflow="fold")
    table.add_column("first token", justify="right")
    table.add_column("")
    asked = None
    for row in rows:
        table.add_row(
            Text("" if row.question == asked else row.question),
            str(row.passages),
            row.method,
            Text(one_line(row.answer)),
            f"{row.first_token_s:.3f} s",
            Text("right", "green") if row.right else Text(f"wrong ({row.expected})", "red"),
        )
        asked = row.question
    render.console().print(table)
    render.dim(f"Seconds to the first token: the best of {_RUNS} runs.")
