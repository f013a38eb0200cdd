"""Asks the sample corpus's questions as a user would: `python -m training.corpus_answers`.

BM25 finds `--top-k` passages for each question, as `rag-windows ask` does, and for the second
question of each conversation as `rag-windows chat` does, after the reader's own first answer; the
reader answers over them, greedy, by every method. Prints in how many cases the right document was
among the passages and how many answers are right.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rag_windows import WindowedLM
from rag_windows.prompt.conversation import Dialogue
from rag_windows_retrievers import BM25Retriever, load_documents, split_documents
from training.evaluate import method_of
from training.intervals import wilson

SAMPLES = Path(__file__).parent.parent / "rag_windows" / "samples"


@dataclass(frozen=True, slots=True)
class Score:
    """Right answers of one method to the `total` questions of a task.

    `found` of them had their document among the passages; None where no document is meant.
    """

    task: str
    method: str
    right: int
    total: int
    found: int | None


def rows(samples: Path, name: str) -> list[dict[str, Any]]:
    """The rows of questions.jsonl or conversations.jsonl."""
    lines = (samples / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


class Asker:
    """The reader over a sample corpus, with a retriever that finds `top_k` passages."""

    def __init__(self, lm: WindowedLM, samples: Path, top_k: int) -> None:
        documents = load_documents([samples / "corpus"]).documents
        self.lm, self.top_k = lm, top_k
        self.retriever = BM25Retriever(split_documents(documents))

    def ask(
        self, asked: Sequence[tuple[Dialogue, str, str | None]], method: str
    ) -> list[tuple[str, bool]]:
        """Answers to (conversation so far, question, title of the document that is meant).

        With each comes whether a passage of that title was found. All are answered together.
        """
        hits = [
            self.retriever.retrieve(dialogue.search_text(question), self.top_k)
            for dialogue, question, _ in asked
        ]
        made = self.lm.generate_batch(
            [
                {
                    "query": dialogue.with_question(question),
                    "passages": found,
                    "method": method_of(method),
                    "max_new_tokens": 12,
                    "do_sample": False,
                    "citations": False,
                }
                for (dialogue, question, _), found in zip(asked, hits, strict=True)
            ]
        )
        return [
            (generation.text.strip(), any(hit.title == title for hit in found))
            for generation, found, (_, _, title) in zip(made, hits, asked, strict=True)
        ]


def ask_all(asker: Asker, questions: Sequence[dict[str, Any]], method: str) -> list[Score]:
    """A score for each task of single questions."""
    scores = []
    for task in dict.fromkeys(row["task"] for row in questions):
        own = [row for row in questions if row["task"] == task]
        answers = asker.ask([(Dialogue(), row["question"], row["title"]) for row in own], method)
        right = sum(answer == row["answer"] for (answer, _), row in zip(answers, own, strict=True))
        found = None if task == "not stated" else sum(hit for _, hit in answers)
        scores.append(Score(task, method, right, len(own), found))
    return scores


def converse(asker: Asker, conversations: Sequence[dict[str, Any]], method: str) -> Score:
    """The score of the last questions of conversations, behind the reader's own answers."""
    dialogues = [Dialogue() for _ in conversations]
    right = found = 0
    for number in range(max(len(row["turns"]) for row in conversations)):
        turns = [
            (dialogue, row["turns"][number], row)
            for dialogue, row in zip(dialogues, conversations, strict=True)
            if number < len(row["turns"])
        ]
        answers = asker.ask(
            [(dialogue, turn["question"], row["title"]) for dialogue, turn, row in turns], method
        )
        for (dialogue, turn, row), (answer, hit) in zip(turns, answers, strict=True):
            dialogue.add(turn["question"], answer)
            if turn is row["turns"][-1]:
                right += answer == turn["answer"]
                found += hit
    return Score("follow-up", method, right, len(conversations), found)


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
    asker = Asker(WindowedLM.from_pretrained(options.model), options.samples, options.top_k)
    questions = rows(options.samples, "questions.jsonl")[: options.limit]
    conversations = rows(options.samples, "conversations.jsonl")[: options.limit]
    print(f"BM25, top {options.top_k}")
    print("| task | method | right | document not found |\n|---|---|---|---|")
    for method in options.methods:
        for score in [*ask_all(asker, questions, method), converse(asker, conversations, method)]:
            low, high = wilson(score.right, score.total)
            share = f"{score.right} of {score.total} ({100 * low:.0f}-{100 * high:.0f}%)"
            missed = "" if score.found is None else score.total - score.found
            print(f"| {score.task} | {method} | {share} | {missed} |")
    print(f"{time.monotonic() - begun:.0f} s in all.")


if __name__ == "__main__":
    main()
