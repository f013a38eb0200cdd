"""Needles of the shipped sample corpus, whose names the shipped reader knows."""

from __future__ import annotations

import json
import random
from pathlib import Path

from rag_windows.errors import InputError
from rag_windows.evaluation.long.needle import Needle, Needles, digest, others
from rag_windows.passage import Passage
from rag_windows.samples import samples_path


def sample_needles(count: int, most: int, seed: int) -> Needles:
    """Questions about entries of the corpus; the haystack is made of other entries.

    Entries that name what the question is about are never among them.

    Args:
        count: of questions.
        most: passages of a haystack at most.
        seed: of the draw.

    Raises:
        InputError: the samples have fewer questions.
    """
    folder = samples_path()
    corpus = {path.name: _entry(path) for path in sorted((folder / "corpus").glob("*.md"))}
    lines = (folder / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [row for row in map(json.loads, lines) if row["task"] == "single"]
    if count > len(asked):
        raise InputError(f"The samples have {len(asked)} questions, not {count}; ask fewer.")
    pool = tuple(corpus.values())
    needles = []
    for index in random.Random(seed).sample(range(len(asked)), count):
        row = asked[index]
        title = row["title"]

        def silent(passage: Passage, title: str = title) -> bool:
            return title not in f"{passage.title} {passage.text}"

        needles.append(
            Needle(
                row["document"].removesuffix(".md"),
                row["question"],
                (row["answer"],),
                corpus[row["document"]],
                others(pool, most, f"{seed}/{row['document']}", silent),
            )
        )
    return Needles("samples", tuple(needles), {"samples": digest(pool)})


def _entry(path: Path) -> Passage:
    heading, _, text = path.read_text(encoding="utf-8").partition("\n")
    return Passage(text.strip(), id=path.name, title=heading.removeprefix("#").strip())
