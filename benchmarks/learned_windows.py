"""What windows answer that were encoded with an adapter of `rag-windows adapt`, beside others.

    python -m benchmarks.learned_windows ask FILE --model ADAPTER --method pcw --out OUT.json
    python -m benchmarks.learned_windows differ OUT.json OTHER.json

`ask` reads five passages of each of Natural Questions, behind the questions that are for training,
or ten of HotpotQA.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rag_windows import Passage, WindowedLM
from rag_windows.calibration import bag_f1, chatrag_words, contains

TRAINED = 150
"""The first questions of Natural Questions are for training, the others for figures."""

PASSAGES = 5
INSTRUCTION = "Answer the question from the passages, in a few words."


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its passages and right answers."""

    text: str
    answers: list[str]
    passages: list[Passage]
    right: list[int]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON or JSONL file, packed or not."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    if text.startswith("["):
        return list(json.loads(text))
    return [json.loads(line) for line in text.splitlines()]


def questions(records: Sequence[dict[str, Any]]) -> Iterator[Question]:
    """Questions of Natural Questions, five of 20 passages each, or of HotpotQA, all of ten."""
    for number, one in enumerate(records):
        draw = random.Random(number)
        if "ctxs" in one:
            right, *others = one["ctxs"]
            read = [right, *draw.sample(others, PASSAGES - 1)]
            draw.shuffle(read)
            passages = [Passage(each["text"], title=each["title"]) for each in read]
            yield Question(one["question"], one["answers"], passages, [read.index(right)])
        else:
            passages = [Passage("".join(text), title=title) for title, text in one["context"]]
            titles = {title for title, _ in one["supporting_facts"]}
            right = [place for place, each in enumerate(passages) if each.title in titles]
            yield Question(one["question"], [one["answer"]], passages, right)


def ask(options: argparse.Namespace) -> None:
    """Answer the questions; prints a line each, and the sums."""
    lm = WindowedLM.from_pretrained(options.model, window_adapter=options.adapter)
    records = lines_of(options.files[0])
    records = records[TRAINED:] if "ctxs" in records[0] else records
    pairs = []
    for one in questions(records[: options.limit]):
        passages = [one.passages[i] for i in one.right] if options.right else one.passages
        made = lm.generate(
            one.text,
            passages,
            prefix=INSTRUCTION,
            method=options.method,
            max_new_tokens=32,
        )
        words = chatrag_words(made.text)
        right = any(contains(made.text, each) for each in one.answers)
        overlap = max(bag_f1(words, chatrag_words(each)) for each in one.answers)
        shares = [0.0 if each.mass is None else each.mass for each in made.citations or ()]
        cites = bool(shares) and shares.index(max(shares)) in one.right
        pairs.append((float(right), overlap, float(cites)))
        print(json.dumps({"question": one.text, "answer": made.text, "right": right}), flush=True)
    options.out.write_text(json.dumps(pairs), encoding="utf-8")
    differ([options.out])


def differ(files: Sequence[Path]) -> None:
    """Print the figures of one file of `ask`, or of the first less the second.

    Right answers, token F1, and questions whose most cited passage is right. Percent, with 95%
    intervals of 10,000 paired draws of questions.
    """
    read = [100 * np.array(json.loads(path.read_text(encoding="utf-8"))) for path in files]
    count = min(map(len, read))
    shapes = min(one.shape[1] for one in read)
    read = [one[:count, :shapes] for one in read]
    values = read[0] if len(read) == 1 else read[0] - read[1]
    draws = np.random.default_rng(0).integers(0, len(values), (10_000, len(values)))
    low, high = np.percentile(values[draws].mean(axis=1), [2.5, 97.5], axis=0)
    for place, name in enumerate(("right", "f1", "cites right")[: values.shape[1]]):
        mean = values[:, place].mean()
        print(f"{name} {mean:.1f} ({low[place]:.1f} to {high[place]:.1f}), {len(values)} questions")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["ask", "differ"])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--model")
    parser.add_argument("--adapter")
    parser.add_argument("--method", default="pcw")
    parser.add_argument("--right", action="store_true", help="read the right passages alone")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=int, default=80)
    options = parser.parse_args()
    if options.what == "differ":
        differ(options.files)
    else:
        ask(options)


if __name__ == "__main__":
    main()
