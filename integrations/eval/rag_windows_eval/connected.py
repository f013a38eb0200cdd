"""Questions over passages that need one another, or resemble one another: what windows may lose.

Two hundred questions a task about invented people, firms, towns, animals and books, shipped in
samples/connected.jsonl.xz; `training.questions` draws them. A line is an object of "task",
"question", "answer", "passages" as pairs of title (or null) and text, and "documents", the number
of the document that each passage is a part of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Self

from pydantic import BaseModel, ConfigDict

from rag_windows.calibration import chatrag_words, contains
from rag_windows.errors import InputError
from rag_windows.passage import Passage, with_neighbours
from rag_windows.samples import samples_path
from rag_windows_eval.files import read, shown
from rag_windows_eval.task import AnswerRecord, MetricScore, Reference, Task, TaskExample

FILE = "connected.jsonl.xz"

PREFIX = "Answer the question from the passages, in as few words as possible."
_LATER = " Where two passages contradict each other, the later one is right."

CONNECTED: Mapping[str, str] = {
    # A document in parts, of which only the first names its subject.
    "split-documents": PREFIX,
    # A passage introduces an alias of somebody; the next one about them uses only the alias.
    "aliases": PREFIX,
    # A passage tells of "the founder", whom the one before it names; so does the question.
    "joined": PREFIX,
    # A later passage states other values.
    "corrections": PREFIX + _LATER,
    # Sixteen passages whose names share words, and which state the same relations.
    "many-alike": PREFIX,
}
"""The tasks, and the instruction before their passages."""


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid")

    task: str
    question: str
    answer: str
    passages: list[tuple[str | None, str]]
    documents: list[int]


def _passages(key: str, row: _Row) -> list[Passage]:
    places, made = Counter[int](), list[Passage]()
    documents = row.documents or range(len(row.passages))
    for (title, text), document in zip(row.passages, documents, strict=True):
        name, place = f"{key}/{len(made) + 1}", places[document]
        made.append(Passage(text, name, title, document=f"{key}, {document}", index=place))
        places[document] += 1
    return with_neighbours(made)


class ConnectedTask(Task):
    """One of `CONNECTED`, ready to be asked. Every question has passages of its own."""

    @classmethod
    def open(cls, *, task: str) -> Self:
        """Read the shipped questions of a task."""
        if task not in CONNECTED:
            raise InputError(
                f"{shown(task)} is not one of the tasks {', '.join(CONNECTED)}. Choose one of them."
            )
        source, examples = read(samples_path() / FILE), list[TaskExample]()
        for _, row in source.records(_Row):
            if row.task == task:
                key = f"{task}/{len(examples) + 1}"
                examples.append(
                    TaskExample(
                        key=key,
                        messages=({"role": "user", "content": row.question},),
                        references=(Reference(row.answer),),
                        group=key,
                        passages=tuple(_passages(key, row)),
                    )
                )
        settings = {"task": task, "data": source.stamp}
        name, prefix = f"connected/{task}", CONNECTED[task]
        return cls(
            name=name, examples=examples, settings=settings, prefix=prefix, max_new_tokens=32
        )

    def scores(
        self, examples: Sequence[TaskExample], records: Sequence[AnswerRecord]
    ) -> list[MetricScore]:
        """Whether answers are right.

        "contained" is whether the answer holds the right one's words in a row: chat models answer
        in sentences. "exact" is whether it has no other words. Case, punctuation and articles never
        count.
        """
        pairs = [
            (record.answer, example.references[0].text)
            for example, record in zip(examples, records, strict=True)
        ]
        held = [100.0 * contains(*pair) for pair in pairs]
        same = [100.0 * (chatrag_words(said) == chatrag_words(right)) for said, right in pairs]
        return [MetricScore.mean("contained", held), MetricScore.mean("exact", same)]
