"""A needle among passages: how many there are and where it stands, swept."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rag_windows import Passage
from rag_windows.calibration import contains
from rag_windows.errors import InputError
from rag_windows.samples import samples_path
from rag_windows_eval.task import AnswerRecord, MetricScore, Reference, Task, TaskExample, digest_of

PREFIX = "Answer the question from the passages. Give the number alone, without other words."
"""The instruction for invented needles."""

_STARTS = (
    "Bel Cor Dra Fen Gal Hes Jor Kel Lum Mar Nor Pol Quin Ros Sel Tam Ul Var Wen Yor Zim"
).split()
_ENDS = (
    "ador bin cott dane ewick fara gorn hold ina jeth kris lund mira nix oway pry rell sen tova"
).split()


@dataclass(frozen=True, slots=True)
class Needle:
    """A question with the passage that answers it, and others, of which the first are read."""

    key: str
    question: str
    answer: str
    passage: Passage
    haystack: tuple[Passage, ...]

    def examples(self, sizes: Sequence[int], depths: Sequence[float]) -> Iterator[TaskExample]:
        """Examples by number of passages, and by the needle's place among them.

        Depths go from 0 (first) to 1 (last). Where two mean the same place, as 50% and 75% do
        among two passages, the nearer one names it; a single passage is at all depths.
        """
        for size in sorted(sizes):
            last = size - 1
            # Halves go up, unlike round(), so that steps stay even.
            for index in sorted({int(depth * last + 0.5) for depth in depths}):
                nearest = min(sorted(depths), key=lambda depth: abs(depth * last - index))
                yield TaskExample(
                    key=f"{self.key}/{size}/{index}",
                    messages=({"role": "user", "content": self.question},),
                    references=(Reference(self.answer),),
                    group=self.key,
                    kinds=(f"{size} passages", f"position {nearest:.0%}")
                    if last
                    else ("1 passage",),
                    passages=(*self.haystack[:index], self.passage, *self.haystack[index:last]),
                    details={"needle": digest_of(self.passage.text)},
                )


def _others(
    pool: Sequence[Passage], most: int, seed: str, avoid: Collection[str]
) -> tuple[Passage, ...]:
    """At most ``most`` passages, drawn by a seed; the first n are the same for any number."""
    made: dict[str, Passage] = {}
    for passage in random.Random(seed).sample(pool, len(pool)):
        if passage.text not in avoid:
            # The engine reads equal texts once.
            made.setdefault(passage.text, passage)
    return tuple(made.values())[:most]


def _stamp(pool: Sequence[Passage]) -> dict[str, Any]:
    made = hashlib.sha256()
    for one in pool:
        made.update(json.dumps([one.title, one.text]).encode())
    return {"passages": len(pool), "sha256": made.hexdigest()}


def sample_needles(count: int, most: int, seed: int) -> tuple[list[Needle], dict[str, Any]]:
    """Questions on entries of the sample corpus, among passages that don't name their subject."""
    folder, corpus = samples_path(), {}
    for path in sorted((folder / "corpus").glob("*.md")):
        heading, _, text = path.read_text(encoding="utf-8").partition("\n")
        corpus[path.name] = Passage(text.strip(), path.name, heading.removeprefix("#").strip())
    lines = (folder / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [row for row in map(json.loads, lines) if row["task"] == "single"]
    if count > len(asked):
        raise InputError(
            f"The sample corpus has {len(asked)} questions, not {count}. Ask fewer with "
            "--questions, or give texts with --haystack."
        )
    pool, needles = list(corpus.values()), []
    for row in random.Random(seed).sample(asked, count):
        document, title = row["document"], row["title"]
        named = {one.text for one in pool if title in f"{one.title} {one.text}"}
        hay = _others(pool, most, f"{seed}/{document}", named)
        key = document.removesuffix(".md")
        needles.append(Needle(key, row["question"], row["answer"], corpus[document], hay))
    return needles, {"samples": _stamp(pool)["sha256"]}


def invented_needles(
    pool: Sequence[Passage], source: str, count: int, most: int, seed: int
) -> tuple[list[Needle], dict[str, Any]]:
    """Needles: passages of the pool, each with a sentence of a new name and number."""
    if not pool:
        raise InputError(f"{source} holds no passages. Name a folder with texts.")
    rng, needles = random.Random(seed), []
    known = {word for one in pool for word in re.findall(r"\w+", one.text)}
    for number in range(1, count + 1):
        for _ in range(1000):
            names = [rng.choice(_STARTS) + rng.choice(_ENDS) for _ in range(2)]
            drawn = {*names, code := str(rng.randrange(10_000, 100_000))}
            if len(drawn - known) == 3:
                break
        else:
            raise InputError(
                "There are not enough different names and numbers for so many "
                "questions. Ask fewer with --questions."
            )
        known |= drawn
        around, name = pool[rng.randrange(len(pool))], " ".join(names)
        ends = [match.end() for match in re.finditer(r"[.!?]\s+", around.text)]
        at = min(ends, key=lambda end: abs(end - len(around.text) / 2), default=None)
        before = f"{around.text.rstrip()} " if at is None else around.text[:at]
        behind = "" if at is None else f" {around.text[at:]}"
        sentence = f"The secret number of {name} is {code}."
        needle = replace(around, text=f"{before}{sentence}{behind}", id=f"needle {number}")
        hay = _others(pool, most, f"{seed}/{number}", {around.text})
        question = f"What is the secret number of {name}?"
        needles.append(Needle(str(number), question, code, needle, hay))
    return needles, {"texts": source, **_stamp(pool)}


class LongTask(Task):
    """The same questions in every cell, over nested haystacks.

    A question's haystack of 16 passages begins with its haystack of 8, in the same order, and only
    the needle changes its place: cells are compared in pairs, and windows of one are those of
    another. All cells of a question come one after the other. Methods that give every window the
    same positions can't distinguish places, by design; the sequential one can.
    """

    @classmethod
    def open(
        cls,
        *,
        haystack: str | None = None,
        sizes: Sequence[int],
        depths: Sequence[float],
        questions: int | None = None,
        seed: int = 0,
        passage_words: int = 100,
    ) -> Self:
        """A sweep over the shipped samples, or over a folder of texts; see the command's options.

        ``sizes`` are its --passages, ``depths`` its --positions.
        """
        most, count = max(sizes) - 1, questions or 10
        if haystack is None:
            source, prefix = "samples", None
            needles, stamp = sample_needles(count, most, seed)
        else:
            from rag_windows_retrievers import load_documents, split_documents

            documents = load_documents([haystack], root=Path(haystack)).documents
            pool = list(split_documents(documents, words=passage_words))
            source, prefix = Path(haystack).resolve().name, PREFIX
            needles, stamp = invented_needles(pool, source, count, most, seed)
        short = next((one for one in needles if len(one.haystack) < most), None)
        if short is not None:
            raise InputError(
                f"{most + 1} passages need {most} beside the needle, but question {short.key!r} "
                f"of {source} has {len(short.haystack)}. Ask for fewer with --passages, or give "
                "more texts."
            )
        settings = {
            "data": stamp,
            "sizes": list(sizes),
            "depths": list(depths),
            "questions": len(needles),
            "seed": seed,
            "passage_words": passage_words,
        }
        examples = [cell for one in needles for cell in one.examples(sizes, depths)]
        return cls(
            name=f"long/{source}",
            examples=examples,
            settings=settings,
            prefix=prefix,
            max_new_tokens=32,
        )

    def scores(
        self, examples: Sequence[TaskExample], records: Sequence[AnswerRecord]
    ) -> list[MetricScore]:
        """Whether needles were found.

        "contained" is whether the answer holds the right one's words in a row, "needle_most_read",
        where attention was measured, whether the needle got more of it than any other passage.
        """
        held, most_read = [], list[float | None]()
        for example, record in zip(examples, records, strict=True):
            held.append(100.0 * contains(record.answer, example.references[0].text))
            measured = [(one.mass, one.text) for one in record.passages if one.mass is not None]
            _, text = max(measured, key=lambda pair: pair[0], default=(None, None))
            most_read.append(100.0 * (text == example.details["needle"]) if measured else None)
        return [
            MetricScore.mean("contained", held),
            MetricScore.mean("needle_most_read", most_read),
        ]
