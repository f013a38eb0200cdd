"""Writes the sample corpus: `python -m training.corpus --out rag_windows/samples`.

Entries of the reader's own world with held-out names (`corpus/*.md`), 100 held-out questions on
them (`questions.jsonl`: task, question, answer, document, title), conversations of two questions
(`conversations.jsonl`) and the demo's three (`demo.json`: question, answer, top_k). The same seed
always writes the same files.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from training.contexts import passage_text
from training.phrasing import (
    FORMS,
    NOT_STATED,
    ask,
    draw_pair,
    draw_question,
    later_name,
)
from training.recipes import Recipe
from training.world import KINDS, Entity, NamesOf, draw_entities, draw_name

COUNTS: Mapping[str, int] = {
    "person": 110,
    "organisation": 55,
    "place": 40,
    "work": 50,
    "event": 45,
}
MOST_FACTS = 5
SINGLE, UNSTATED, CONVERSATIONS = 80, 20, 25
DEMO = (("person", "birthplace", 8), ("organisation", "product", 16), ("person", "instrument", 32))
"""The demo's tasks: kind, relation, number of passages."""
RECIPE = Recipe(1, pronouns=0.3, surnames=0.1)


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
    """One question on the corpus; `document` and `title` are None where no entry is about it."""

    task: str
    question: str
    answer: str
    document: str | None
    title: str | None


def draw_entries(rng: np.random.Generator) -> list[Entry]:
    """The entries, sorted by file name; founders, authors, employers ... are mostly among them."""
    drawn = [
        entity
        for kind in KINDS
        for entity in draw_entities(
            rng, kind, COUNTS[kind.name], list(kind.relations), split="held-out", kin=0.3
        )
    ]
    names = {kind.name: [e.name for e in drawn if e.kind is kind] for kind in KINDS}
    entries = []
    for entity in drawn:
        relations = list(entity.kind.relations)
        count = min(len(relations) - 1, MOST_FACTS)
        kept = [relations[i] for i in rng.permutation(len(relations))[:count]]
        facts = {relation: entity.facts[relation] for relation in kept}
        for relation in kept:
            values = entity.kind.relations[relation]
            if isinstance(values, NamesOf) and rng.random() < 0.7:
                others = names[values.kind]
                facts[relation] = others[int(rng.integers(len(others)))]
        entity = replace(entity, facts=facts)
        forms = {r: draw_pair(rng, entity.kind, r, "held-out")[0] for r in kept}
        entries.append(Entry(entity, forms, passage_text(rng, entity, forms, RECIPE)))
    return sorted(entries, key=lambda entry: entry.file)


def draw_questions(rng: np.random.Generator, entries: Sequence[Entry]) -> list[Question]:
    """Questions whose answer stands in an entry, then some whose answer stands nowhere."""
    chosen = rng.permutation(len(entries))
    questions = [_stated(rng, entries[i], None)[1] for i in chosen[:SINGLE]]
    for n, i in enumerate(chosen[SINGLE : SINGLE + UNSTATED]):
        entity = entries[i].entity
        if n % 2:
            taken = {entry.entity.name for entry in entries}
            while True:
                stranger = draw_name(rng, entity.kind, "held-out")
                if " ".join(stranger) not in taken:
                    break
            entity = Entity(entity.kind, *stranger, {})
        absent = [r for r in entity.kind.relations if r not in entity.facts]
        relation = absent[int(rng.integers(len(absent)))]
        form = draw_pair(rng, entity.kind, relation, "held-out")[1]
        known = None if n % 2 else entries[i]
        questions.append(
            Question(
                "not stated",
                ask(entity, relation, form),
                NOT_STATED,
                known.file if known else None,
                known.entity.name if known else None,
            )
        )
    return questions


def draw_conversations(rng: np.random.Generator, entries: Sequence[Entry]) -> list[list[Question]]:
    """Pairs of questions on one entry, the second with a pronoun or "the company"."""
    conversations: list[list[Question]] = []
    for i in rng.permutation(len(entries)):
        if len(conversations) == CONVERSATIONS:
            break
        first_relation, first = _stated(rng, entries[i], None)
        relation, second = _stated(rng, entries[i], first_relation)
        if relation != first_relation and entries[i].entity.name not in second.question:
            conversations.append([first, second])
    return conversations


def _stated(rng: np.random.Generator, entry: Entry, after: str | None) -> tuple[str, Question]:
    """A relation and a question on it; `after` another relation, a follow-up to that."""
    entity = entry.entity
    relations = [r for r in entry.forms if r != after]
    relation = relations[int(rng.integers(len(relations)))]
    form = draw_question(rng, entity.kind, relation, entry.forms[relation], "held-out")
    name = None
    if after is not None:
        name = later_name(rng, entity, FORMS[entity.kind.name, relation].questions[form])
    question = ask(entity, relation, form, name)
    task = "follow-up" if name else "single"
    return relation, Question(task, question, entity.facts[relation], entry.file, entity.name)


def write_corpus(out: Path, seed: int) -> None:
    """Writes corpus, questions and demo to `out`; an older corpus there is replaced."""
    rng = np.random.default_rng(seed)
    entries = draw_entries(rng)
    folder = out / "corpus"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    for entry in entries:
        text = f"# {entry.entity.name}\n\n{entry.text}\n"
        (folder / entry.file).write_text(text, encoding="utf-8")
    questions = [asdict(question) for question in draw_questions(rng, entries)]
    _write_lines(out / "questions.jsonl", questions)
    conversations = [
        {
            "turns": [{"question": q.question, "answer": q.answer} for q in turns],
            "document": turns[0].document,
            "title": turns[0].title,
        }
        for turns in draw_conversations(rng, entries)
    ]
    _write_lines(out / "conversations.jsonl", conversations)
    demo = [task(entries, *choice) for choice in DEMO]
    (out / "demo.json").write_text(json.dumps(demo, indent=1) + "\n", encoding="utf-8")


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


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
