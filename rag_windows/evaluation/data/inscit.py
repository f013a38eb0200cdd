"""INSCIT (Wu et al., TACL 2023, arXiv:2207.00746), from its own file.

The file is an object, conversation id -> ``{"turns": [...]}``. A turn has a ``context``, the
messages so far with the user's question last, and one or two ``labels``, each with a response, its
type and the passages that it rests on (none where nothing was found). Other fields are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_windows.errors import InputError
from rag_windows.evaluation.data.chatrag_form import (
    INSTRUCTION,
    MAX_NEW_TOKENS,
    Message,
    Style,
    check_style,
    titled,
    worded,
)
from rag_windows.evaluation.data.fields import Place, checked, entries, field, shown, strings
from rag_windows.evaluation.data.inscit_predictions import evidence_of
from rag_windows.evaluation.data.passages import TITLES, read_corpus
from rag_windows.evaluation.data.reading import Source, read
from rag_windows.evaluation.example import Example, Reference
from rag_windows.evaluation.record import Record
from rag_windows.evaluation.scores.inscit import INSCIT_METRICS, inscit_scores
from rag_windows.evaluation.task import Score
from rag_windows.passage import Passage

_ROLES = ("user", "assistant")


@dataclass(frozen=True)
class InscitTask:
    """INSCIT, ready to be asked.

    Attributes:
        examples: one a turn, ``conversation/turn`` as their keys, turns counted from 1. A turn's
            ``kinds`` are the types of its labels: where two annotators chose differently, it counts
            in both. ``details`` hold ``conv_id``, ``turn``, ``context`` and, for a retriever, the
            ``conversation`` without any instruction.
        pool: what is searched: the passages of a file, or else those that the data file itself
            names as evidence of any turn.
        evidence: how many passages count as the evidence of an answer.
        style: "plain", or "chatrag" for the wording of ChatRAG-Bench.
        settings: see `Task`.
        passages: every passage of evidence in the data file, by id.
    """

    examples: tuple[Example, ...]
    pool: tuple[Passage, ...]
    evidence: int
    style: Style
    settings: Mapping[str, Any]
    passages: Mapping[str, Passage]

    name = "inscit"
    max_new_tokens = MAX_NEW_TOKENS
    metrics = INSCIT_METRICS

    @property
    def prefix(self) -> str | None:
        """ChatRAG-Bench's instruction in its style, nothing in the plain one."""
        return INSTRUCTION if self.style == "chatrag" else None

    @classmethod
    def read(
        cls,
        path: str | Path,
        *,
        corpus: str | Path | None = None,
        style: Style = "plain",
        evidence: int = 1,
    ) -> InscitTask:
        """Read INSCIT's data file.

        Args:
            path: ``dev.json`` or another in its format.
            corpus: passages to search, see `passages.read_corpus`; None for the evidence passages
                of the data file itself.
            style: "plain": messages as they are, no instruction. "chatrag": the benchmark's
                instruction, its wording, the last seven messages, and titles in the passages' text;
                so INSCIT stands in ChatRAG-Bench and in the APE paper.
            evidence: how many passages count as the evidence of an answer, the most attended ones.

        Raises:
            DataError: a file can't be read; names file, conversation, turn and field.
            InputError: an unknown style, or a negative number of passages.
        """
        check_style(style)
        if evidence < 0:
            raise InputError(f"evidence={evidence} is no number of passages; use 0 or more.")
        source = read(path)
        examples, passages = read_turns(source, style)
        found = None if corpus is None else read_corpus(corpus)
        pool = tuple(passages.values()) if found is None else found.passages
        if style == "chatrag":
            pool = tuple(titled(one) for one in pool)
            passages = {name: titled(one) for name, one in passages.items()}
        settings = {
            "data": source.stamp,
            "corpus": None if found is None else found.stamp,
            "style": style,
            "evidence": evidence,
        }
        return cls(examples, pool, evidence, style, settings, passages)

    @property
    def unfound(self) -> int:
        """How many passages of evidence are not in the pool, so that no retriever can find them."""
        return len(self.passages.keys() - {one.id for one in self.pool})

    def gold(self, example: Example) -> tuple[Passage, ...]:
        """The passages that any label of a turn rests on, in the order of the labels."""
        named = dict.fromkeys(name for one in example.references for name in one.evidence)
        return tuple(self.passages[name] for name in named)

    def scores(self, examples: Sequence[Example], records: Sequence[Record]) -> list[Score]:
        """See `Task.scores`; the official figures over these examples."""
        answers = ["" if one.error is not None else one.answer for one in records]
        return inscit_scores(
            examples, answers, [evidence_of(one, self.evidence) for one in records]
        )


def read_turns(
    source: Source, style: Style = "plain"
) -> tuple[tuple[Example, ...], dict[str, Passage]]:
    """The turns of a data file, and its evidence passages by id.

    Raises:
        DataError: naming conversation, turn and field.
    """
    examples: list[Example] = []
    passages: dict[str, Passage] = {}
    data = checked(source.json(), dict, source.place, "the file's content")
    for name, conversation in data.items():
        place = source.place.at(f"conversation {shown(name)}")
        for number, (where, turn) in enumerate(
            entries(conversation, "turns", "turn", place), start=1
        ):
            examples.append(_example(name, number, turn, style, passages, where))
    if not examples:
        raise source.place.error("there is no turn in it; is this INSCIT's data file?")
    return tuple(examples), passages


def _example(
    name: str, number: int, turn: Any, style: Style, passages: dict[str, Passage], place: Place
) -> Example:
    context = strings(turn, "context", place)
    if len(context) % 2 == 0:
        raise place.error(
            f'"context" has {len(context)} messages; user and agent take turns in it, and the '
            "user's question is the last."
        )
    labels = [
        _reference(label, passages, at) for at, label in entries(turn, "labels", "label", place)
    ]
    if not labels:
        raise place.error('"labels" is empty; each turn needs at least one answer.')
    conversation: list[Message] = [
        {"role": _ROLES[index % 2], "content": text} for index, text in enumerate(context)
    ]
    return Example(
        key=f"{name}/{number}",
        messages=worded(conversation, "inscit") if style == "chatrag" else tuple(conversation),
        references=tuple(labels),
        group=name,
        kinds=tuple(dict.fromkeys(one.kind for one in labels if one.kind is not None)),
        details={
            "conv_id": name,
            "turn": number,
            "context": context,
            "conversation": conversation,
        },
    )


def _reference(label: Any, passages: dict[str, Passage], place: Place) -> Reference:
    found = []
    for where, one in entries(label, "evidence", "evidence", place):
        name = field(one, "passage_id", str, where)
        title = TITLES.join(strings(one, "passage_titles", where))
        passage = Passage(field(one, "passage_text", str, where), name, title or None)
        # Section titles may be written in several ways; the first one stays.
        if passages.setdefault(name, passage).text != passage.text:
            raise where.error(
                f"the id {shown(name)} stands for two different texts; "
                "give each passage an id of its own."
            )
        found.append(name)
    return Reference(
        text=field(label, "response", str, place),
        kind=field(label, "responseType", str, place),
        evidence=tuple(dict.fromkeys(found)),
    )
