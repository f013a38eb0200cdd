"""Writes the sample corpus: `python -m training.corpus --out rag_windows/samples`.

Entries of the reader's own world with held-out names (`corpus/*.md`), held-out questions on them
(`questions.jsonl`: question, answer, document, title) and the demo's three (`demo.json`: question,
answer, top_k). The same seed always writes the same files.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.phrasing import ask, draw_pair, draw_question
from training.samples import Recipe, passage_text
from training.world import KINDS, Entity, draw_entities

COUNTS: Mapping[str, int] = {"person": 28, "organisation": 14, "place": 12, "work": 12}
FACTS = 5
DEMO = (("person", "birthplace", 8), ("organisation", "product", 16), ("person", "instrument", 32))
"""The demo's tasks: kind, relation, number of passages."""
RECIPE = Recipe(1)


@dataclass(frozen=True, slots=True)
class Entry:
    """One document of the corpus, with the statement form of each of its facts."""

    entity: Entity
    forms: Mapping[str, int]
    text: str

    @property
    def file(self) -> str:
        """The file's name."""
        return self.entity.name.lower().replace(" ", "-") + ".md"


@dataclass(frozen=True, slots=True)
class Question:
    """One question on the corpus."""

    question: str
    answer: str
    document: str
    title: str


def draw_corpus(seed: int) -> tuple[list[Entry], list[Question]]:
    """The entries, sorted by file name, and two questions on each in random order."""
    rng = np.random.default_rng(seed)
    entries: list[Entry] = []
    for kind in KINDS:
        for _ in range(COUNTS[kind.name]):
            names = list(kind.relations)
            relations = [names[i] for i in rng.permutation(len(names))[:FACTS]]
            taken = {entry.entity.name for entry in entries}
            while True:
                entity = draw_entities(rng, kind, 1, relations, split="held-out")[0]
                if entity.name not in taken:
                    break
            forms = {r: draw_pair(rng, kind, r, "held-out")[0] for r in relations}
            entries.append(Entry(entity, forms, passage_text(rng, entity, forms, RECIPE)))
    entries.sort(key=lambda entry: entry.file)
    questions = []
    for entry in entries:
        relations = list(entry.forms)
        for relation in (relations[i] for i in rng.permutation(len(relations))[:2]):
            kind = entry.entity.kind
            form = draw_question(rng, kind, relation, entry.forms[relation], "held-out")
            questions.append(
                Question(
                    ask(entry.entity, relation, form),
                    entry.entity.facts[relation],
                    entry.file,
                    entry.entity.name,
                )
            )
    return entries, [questions[i] for i in rng.permutation(len(questions))]


def write_corpus(out: Path, seed: int) -> None:
    """Writes corpus, questions and demo to `out`; an older corpus there is replaced."""
    entries, questions = draw_corpus(seed)
    folder = out / "corpus"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    for entry in entries:
        text = f"# {entry.entity.name}\n\n{entry.text}\n"
        (folder / entry.file).write_text(text, encoding="utf-8")
    rows = [
        {"question": q.question, "answer": q.answer, "document": q.document, "title": q.title}
        for q in questions
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (out / "questions.jsonl").write_text(lines, encoding="utf-8")
    demo = [task(entries, *choice) for choice in DEMO]
    (out / "demo.json").write_text(json.dumps(demo, indent=1) + "\n", encoding="utf-8")


def task(entries: Sequence[Entry], kind: str, relation: str, top_k: int) -> Mapping[str, str | int]:
    """One task of the demo: the plainest question on the last entry that states the relation."""
    entry = [e for e in entries if e.entity.kind.name == kind and relation in e.forms][-1]
    question = ask(entry.entity, relation, 0)
    return {"question": question, "answer": entry.entity.facts[relation], "top_k": top_k}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.corpus", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    write_corpus(options.out, options.seed)


if __name__ == "__main__":
    main()
