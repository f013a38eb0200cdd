"""What an instruction does to answers: right ones where they can be, and admitted gaps elsewhere.

    python -m benchmarks.instructions MODEL --data FILE... [--instruction TEXT]... [--first 150]
        [--count 60] [--passages 5] [--words 120] [--log FILE]

Each question is asked twice: over its right passages among others, and over the others alone. An
answer is right if it contains a right answer, and an admission if it says that the passages have
none. Every answer is a line of the log, and answers that stand there are not asked for again.
Without --count, the log is summed up.

Data are JSON files (.json, .jsonl, .gz): Natural Questions as in "Lost in the Middle" (question,
answers, ctxs), HotpotQA and MuSiQue. benchmarks/results/instructions.md says where they are from;
they are not part of this repository.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rag_windows import Passage, PassageCache, WindowedLM
from rag_windows.evaluation.chatrag import contains

MAX_NEW_TOKENS = 32
"""Of an answer."""

ADMITS = re.compile(
    r"\bnot (?:\w+ )?(?:stated|mentioned|specified|given|provided|found|available|included|known"
    r"|stat\w*|contain\w*|mention|state|specify|provide|say|include|have|know|find|answer)\b"
    r"|n't (?:\w+ )?(?:stated|mentioned|specified|given|provided|found|available|included|known"
    r"|contain|mention|state|specify|provide|say|include|have|know|find|answer)\b"
    r"|\bno (?:\w+ )?(?:information|mention|answer)\b|\b(?:unknown|unclear|cannot be)\b",
    re.IGNORECASE,
)
"""Says that the passages do not have the answer."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question with the passages that answer it, and others."""

    text: str
    answers: Sequence[str]
    right: Sequence[Passage]
    others: Sequence[Passage]

    def passages(self, count: int, place: int, *, missing: bool) -> list[Passage]:
        """The right passages among others, in an order that depends on `place`, or the others."""
        others = list(self.others[: max(count - len(self.right), 1)])
        shown = [*self.right, *others]
        random.Random(place).shuffle(shown)
        return [one for one in shown if not missing or one not in self.right]


def _question(row: dict[str, Any], words: int) -> Question:
    if "ctxs" in row:
        pairs = [(Passage(c["text"], title=c["title"]), c["isgold"]) for c in row["ctxs"]]
        answers = row["answers"]
    elif "paragraphs" in row:
        pairs = [
            (Passage(p["paragraph_text"], title=p["title"]), p["is_supporting"])
            for p in row["paragraphs"]
        ]
        answers = [row["answer"], *row["answer_aliases"]]
    else:
        named = {title for title, _ in row["supporting_facts"]}
        pairs = [(Passage("".join(text), title=t), t in named) for t, text in row["context"]]
        answers = [row["answer"]]
    pairs = [(cut(passage, words, answers), is_right) for passage, is_right in pairs]
    right, others = (
        [one for one, is_right in pairs if is_right is wanted] for wanted in (True, False)
    )
    return Question(row["question"], answers, right, others)


def cut(passage: Passage, words: int, answers: Sequence[str]) -> Passage:
    """A passage of at most so many words, with an answer in their middle if it holds one."""
    found = [place for one in answers if (place := passage.text.lower().find(one.lower())) >= 0]
    before = len(passage.text[: min(found, default=0)].split())
    every = passage.text.split()
    first = max(0, min(before - words // 2, len(every) - words))
    return replace(passage, text=" ".join(every[first : first + words]))


def read_questions(path: Path, words: int) -> list[Question]:
    """The questions of a file, with passages of at most so many words."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        text = file.read()
    rows = json.loads(text) if text.startswith("[") else map(json.loads, text.splitlines())
    return [_question(row, words) for row in rows]


def asked(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Question]]:
    """What to ask, one question of each file after the other, so that any stop leaves pairs."""
    files = [(path, read_questions(path, options.words)) for path in options.data]
    for place in range(options.first, options.first + options.count):
        for path, questions in files:
            for instruction in options.instruction:
                for method in options.method:
                    for missing in (True, False):
                        if place < len(questions):
                            yield (
                                {
                                    "model": Path(options.model).name,
                                    "data": path.name,
                                    "question": place,
                                    "passages": f"{options.passages} of {options.words} words",
                                    "instruction": instruction,
                                    "method": method,
                                    "missing": missing,
                                },
                                questions[place],
                            )


def ask(options: argparse.Namespace) -> None:
    """Ask what the log does not have."""
    log = options.log
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    known = {json.dumps({**row, "answer": None}, sort_keys=True) for row in done}
    todo = [
        (cell, question)
        for cell, question in asked(options)
        if json.dumps({**cell, "answer": None}, sort_keys=True) not in known
    ]
    if not todo:
        return
    # Windows of one question are read again without the right passage.
    cache = PassageCache("512MiB")
    lm = WindowedLM.from_pretrained(options.model, dtype=options.dtype, cache=cache)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        for cell, question in todo:
            found = lm.generate(
                question.text,
                question.passages(options.passages, cell["question"], missing=cell["missing"]),
                prefix=cell["instruction"] or None,
                method=cell["method"],
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=False,
            )
            file.write(json.dumps({**cell, "answer": found.text}) + "\n")
            file.flush()


def percent(outcomes: Sequence[bool]) -> str:
    """How many of them, with Wilson's 95% interval."""
    if not outcomes:
        return "-"
    z, count, share = 1.96, len(outcomes), sum(outcomes) / len(outcomes)
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    low, high = (
        100 * min(max((middle + side) / (1 + z * z / count), 0), 1) for side in (-half, half)
    )
    return f"{100 * share:.0f} ({low:.0f} to {high:.0f})"


COLUMNS = ("model", "data", "passages", "instruction", "method")
SHARES = ("right", "says missing, but is there", "says missing, and is", "right, but is missing")


def report(options: argparse.Namespace) -> str:
    """The log as a Markdown table: percent of questions with 95% intervals."""
    questions = {path.name: read_questions(path, options.words) for path in options.data}
    groups: dict[tuple[Any, ...], dict[bool, list[tuple[bool, bool]]]] = {}
    for row in map(json.loads, options.log.read_text(encoding="utf-8").splitlines()):
        if row["data"] not in questions:
            continue
        said, answers = row["answer"], questions[row["data"]][row["question"]].answers
        outcome = any(contains(said, one) for one in answers), bool(ADMITS.search(said))
        group = groups.setdefault(tuple(row[name] for name in COLUMNS), {False: [], True: []})
        group[row["missing"]].append(outcome)
    lines = [f"| {' | '.join((*COLUMNS, 'questions', *SHARES))} |", "|---" * 10 + "|"]
    for key, group in groups.items():
        (right, admits), (guessed, admitted) = (
            ([one for one, _ in group[missing]], [one for _, one in group[missing]])
            for missing in (False, True)
        )
        figures = [percent(one) for one in (right, admits, admitted, guessed)]
        cells = [*map(str, key), f"{len(right)}, {len(admitted)}", *figures]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What an instruction does to answers.")
    parser.add_argument("model", help="folder or name of a model")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="files of questions")
    parser.add_argument("--instruction", action="append", help='repeatable; "" sends none')
    parser.add_argument("--method", nargs="+", default=["sequential", "pcw"])
    parser.add_argument("--first", type=int, default=0, help="number of the first question")
    parser.add_argument("--count", type=int, default=0, help="questions of each file")
    parser.add_argument("--passages", type=int, default=5)
    parser.add_argument("--words", type=int, default=120, help="of a passage, at most")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--log", type=Path, default=Path("runs/instructions.jsonl"))
    options = parser.parse_args(arguments)
    options.instruction = options.instruction or [""]
    ask(options)
    print(report(options))


if __name__ == "__main__":
    main()
