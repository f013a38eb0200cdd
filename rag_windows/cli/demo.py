"""Three questions over the sample corpus, read one after the other and in windows."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from rag_windows.cli import render
from rag_windows.cli.corpus import SearchOptions, open_corpus
from rag_windows.cli.engine import DEFAULT_METHOD, ModelOptions, load_model
from rag_windows.cli.progress import Progress
from rag_windows.passage import Passage
from rag_windows.prompt.visible_text import one_line
from rag_windows.sample_files import samples_path

if TYPE_CHECKING:
    from rag_windows.model import WindowedLM
    from rag_windows_retrievers import BM25Retriever

METHODS = ("sequential", DEFAULT_METHOD)
_WORDS = 120
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


def demo(device: str, *, as_json: bool, verbose: bool) -> None:
    """Answer the demo's questions and show a table, or one JSON list.

    Raises:
        RagWindowsError: the samples or the shipped model are missing, or the device.
    """
    progress = Progress()
    retriever = open_corpus(SearchOptions(words=_WORDS), progress).retriever
    tasks = load_tasks()
    lm = load_model(ModelOptions(device=device, verbose=verbose), progress)
    with progress.waiting("Answering"):
        rows = run(lm, retriever, tasks)
    if as_json:
        render.write_json([dataclasses.asdict(row) for row in rows])
    else:
        _show(rows)


def load_tasks() -> list[Task]:
    """The demo's questions, from the shipped samples."""
    text = (samples_path() / "demo.json").read_text(encoding="utf-8")
    return [Task(**row) for row in json.loads(text)]


def run(lm: WindowedLM, retriever: BM25Retriever, tasks: Sequence[Task]) -> list[Row]:
    """Answer every task with every method."""
    # The first call of a process pays for lazy set-up that no method is to be charged with.
    for method in METHODS:
        lm.generate(tasks[0].question, retriever.passages[:2], method=method, max_new_tokens=2)
    rows = []
    for task in tasks:
        passages = passages_for(retriever, task)
        for method in METHODS:
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
            generation = min(runs, key=lambda one: one.timings.ttft_s)
            rows.append(
                Row(
                    question=task.question,
                    passages=len(passages),
                    method=method,
                    answer=generation.text.strip(),
                    expected=task.answer,
                    first_token_s=generation.timings.ttft_s,
                    right=is_right(generation.text, task.answer),
                )
            )
    return rows


def passages_for(retriever: BM25Retriever, task: Task) -> list[Passage]:
    """The best passages, and where fewer share a word with the question, any others behind."""
    hits = retriever.retrieve(task.question, task.top_k)
    found = {hit.id for hit in hits}
    others = (one for one in retriever.passages if one.id not in found)
    return [*hits, *(one for one, _ in zip(others, range(task.top_k - len(hits)), strict=False))]


def is_right(answer: str, expected: str) -> bool:
    """Whether an answer has the expected words and no others."""
    return _plain(answer) == _plain(expected)


def _plain(answer: str) -> list[str]:
    """An answer without case, punctuation and articles."""
    return [word for word in re.findall(r"\w+", answer.casefold()) if word not in _ARTICLES]


def _show(rows: Sequence[Row]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
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
    out = render.console()
    out.print(table)
    out.print(f"Seconds to the first token: the best of {_RUNS} runs.", style="dim")
