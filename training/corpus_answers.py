"""Asks the sample corpus's questions as a user would: `python -m training.corpus_answers`.

BM25 finds `--top-k` passages for each question; the reader answers over them, greedy, by every
method. Prints how many passages lists hold the right document and how many answers are right.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rag_windows import Passage, WindowedLM
from rag_windows_retrievers import BM25Retriever, load_documents, split_documents
from training.evaluate import method_of
from training.intervals import wilson

SAMPLES = Path(__file__).parent.parent / "rag_windows" / "samples"


@dataclass(frozen=True, slots=True)
class Score:
    """Right answers of one method among `total` questions."""

    method: str
    right: int
    total: int


def ask_all(
    lm: WindowedLM, samples: Path, methods: Sequence[str], top_k: int, limit: int | None = None
) -> tuple[int, list[Score]]:
    """(questions whose document was retrieved, one score a method) over the first `limit`."""
    documents = load_documents([samples / "corpus"]).documents
    retriever = BM25Retriever(split_documents(documents))
    lines = (samples / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines][:limit]
    found, passages = 0, []
    for row in rows:
        hits: list[Passage] = retriever.retrieve(row["question"], top_k)
        passages.append(hits)
        found += any(hit.title == row["title"] for hit in hits)
    scores = []
    for label in methods:
        right = 0
        for row, hits in zip(rows, passages, strict=True):
            generation = lm.generate(
                row["question"],
                hits,
                method=method_of(label),
                max_new_tokens=8,
                do_sample=False,
                citations=False,
            )
            right += generation.text.strip() == row["answer"]
        scores.append(Score(label, right, len(rows)))
    return found, scores


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.corpus_answers", description=__doc__)
    parser.add_argument("--model", default="tiny-reader")
    parser.add_argument("--samples", type=Path, default=SAMPLES)
    parser.add_argument("--methods", nargs="+", default=["sequential", "pcw", "ape:0.9:0.9"])
    parser.add_argument("--top-k", type=int, default=16)
    parser.add_argument("--limit", type=int, default=None, help="only the first questions")
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    begun = time.monotonic()
    lm = WindowedLM.from_pretrained(options.model)
    found, scores = ask_all(lm, options.samples, options.methods, options.top_k, options.limit)
    total = scores[0].total
    print(f"BM25 found the document of {found} of {total} questions (top {options.top_k}).")
    print("| method | right answers |\n|---|---|")
    for score in scores:
        low, high = wilson(score.right, total)
        print(f"| {score.method} | {score.right} of {total} ({100 * low:.0f}-{100 * high:.0f}%) |")
    print(f"{time.monotonic() - begun:.0f} s in all.")


if __name__ == "__main__":
    main()
