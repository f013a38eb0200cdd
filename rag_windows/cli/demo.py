"""The command `demo`: three questions over the sample corpus, read in one prompt and in windows."""

from __future__ import annotations

import itertools
import json as json_format
import re
from typing import TYPE_CHECKING, Any

from rich.table import Column
from rich.text import Text

from rag_windows.cli import options
from rag_windows.cli.corpus import SearchOptions, open_corpus
from rag_windows.cli.models import DEFAULT_METHOD, ModelOptions, loaded_model
from rag_windows.cli.render import console, plain_table, progress, show, write_json
from rag_windows.prompt.visible_text import one_line
from rag_windows.samples import samples_path

if TYPE_CHECKING:
    from rag_windows import WindowedLM
    from rag_windows_retrievers import BM25Retriever

METHODS = ("sequential", DEFAULT_METHOD)
_ANSWER_TOKENS, _RUNS = 32, 3


def demo(
    device: options.Device = "auto", json: options.Json = False, verbose: options.Verbose = False
) -> None:
    """Answer three questions over the sample corpus, sequentially and with windows."""
    retriever, _ = open_corpus(SearchOptions(), None)
    tasks = json_format.loads((samples_path() / "demo.json").read_text(encoding="utf-8"))
    with loaded_model(ModelOptions(device=device, no_cache=True, verbose=verbose)) as lm:
        # The first call of a process pays for lazy set-up that no method is to be charged with.
        for method in METHODS:
            lm.generate("Why?", retriever.passages[:2], method=method, max_new_tokens=2)
        with progress("Answering"):
            rows = [_answer(lm, retriever, task, method) for task in tasks for method in METHODS]
    if json:
        write_json(rows)
        return
    table = plain_table(
        Column("question", overflow="fold"),
        Column("passages", justify="right"),
        "method",
        Column("answer", overflow="fold"),
        Column("first token", justify="right"),
        "",
    )
    for before, row in zip([None, *rows], rows, strict=False):
        told = ("right", "green") if row["right"] else (f"wrong ({row['expected']})", "red")
        table.add_row(
            Text("" if before and row["question"] == before["question"] else row["question"]),
            str(row["passages"]),
            row["method"],
            Text(one_line(row["answer"])),
            f"{row['first_token_s']:.3f} s",
            Text(*told),
        )
    console().print(table)
    show(f"Seconds to the first token: the best of {_RUNS} runs.", "dim")


def _answer(
    lm: WindowedLM, retriever: BM25Retriever, task: dict[str, Any], method: str
) -> dict[str, Any]:
    """What a method makes of a question; the fastest of several runs."""
    question, top_k = task["question"], task["top_k"]
    passages = retriever.retrieve(question, top_k)
    found = {one.id for one in passages}
    # Where fewer share a word with the question, any others stand behind them.
    others = (one for one in retriever.passages if one.id not in found)
    passages += itertools.islice(others, top_k - len(passages))
    runs = [
        lm.generate(
            question, passages, method=method, max_new_tokens=_ANSWER_TOKENS, do_sample=False
        )
        for _ in range(_RUNS)
    ]
    best = min(runs, key=lambda one: one.timings.ttft_s)
    return {
        "question": question,
        "passages": len(passages),
        "method": method,
        "answer": best.text.strip(),
        "expected": task["answer"],
        "first_token_s": best.timings.ttft_s,
        "right": _words(best.text) == _words(task["answer"]),
    }


def _words(text: str) -> list[str]:
    words = re.findall(r"\w+", text.casefold())
    return [word for word in words if word not in ("a", "an", "the")]
