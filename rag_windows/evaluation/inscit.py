"""INSCIT (Wu et al., TACL 2023, arXiv:2207.00746): its data, passages to search, predictions.

The data file is an object, conversation id -> ``{"turns": [...]}``. A turn has a ``context``, the
messages so far with the user's question last, and one or two ``labels``, each with a response, its
type and the passages that it rests on (none where nothing was found). Other fields are not read.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, field_validator

from rag_windows.errors import InputError
from rag_windows.evaluation.chatrag import (
    INSTRUCTION,
    MAX_NEW_TOKENS,
    Message,
    Style,
    check_style,
    titled,
    worded,
)
from rag_windows.evaluation.files import (
    Place,
    Source,
    decoded,
    parse,
    read,
    read_bytes,
    shown,
    validated,
    write_whole,
)
from rag_windows.evaluation.metrics import INSCIT_METRICS, inscit_scores
from rag_windows.evaluation.record import Record
from rag_windows.evaluation.task import Example, Reference, Score
from rag_windows.passage import Passage

TITLES = " - "
"""Between a page's title and those of its sections."""

_OFFICIAL = ("evidence_f1", "bleu", "response_f1", "chatrag_f1")
"""In the order in which INSCIT's own script tells them."""

_ROLES = ("user", "assistant")
_HEADER = ("id", "text", "title")
_QUOTED = re.compile(r'"((?:[^"]|"")*)"')


class _Evidence(BaseModel):
    passage_id: str
    passage_titles: list[str]
    passage_text: str


class _Label(BaseModel):
    response: str
    responseType: str  # noqa: N815 - the file's name
    evidence: list[_Evidence]


class _Turn(BaseModel):
    context: list[str]
    labels: Annotated[list[_Label], Field(min_length=1)]

    @field_validator("context")
    @classmethod
    def _odd(cls, value: list[str]) -> list[str]:
        if len(value) % 2 == 0:
            raise ValueError(
                f"it has {len(value)} messages; user and agent take turns in it, and the user's "
                "question is the last"
            )
        return value


class _Conversation(BaseModel):
    turns: list[_Turn]


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
        settings: what the answers depend on.
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
            corpus: passages to search, see `read_corpus`; None for the evidence passages of the
                data file itself.
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
        examples, passages = _read_turns(source, style)
        pool, stamp = (tuple(passages.values()), None) if corpus is None else read_corpus(corpus)
        if style == "chatrag":
            pool = tuple(map(titled, pool))
            passages = {name: titled(one) for name, one in passages.items()}
        settings = {"data": source.stamp, "corpus": stamp, "style": style, "evidence": evidence}
        return cls(tuple(examples), pool, evidence, style, settings, passages)

    @property
    def unfound(self) -> int:
        """How many passages of evidence are not in the pool, so that no retriever can find them."""
        return len(self.passages.keys() - {one.id for one in self.pool})

    def gold(self, example: Example) -> tuple[Passage, ...]:
        """The passages that any label of a turn rests on, in the order of the labels."""
        named = dict.fromkeys(name for one in example.references for name in one.evidence)
        return tuple(self.passages[name] for name in named)

    def scores(self, examples: Sequence[Example], records: Sequence[Record]) -> list[Score]:
        """Score one arm's records; the official figures over these examples."""
        answers = ["" if one.error is not None else one.answer for one in records]
        return inscit_scores(
            examples, answers, [evidence_of(one, self.evidence) for one in records]
        )


def _read_turns(source: Source, style: Style) -> tuple[list[Example], dict[str, Passage]]:
    """The turns of a data file, and its evidence passages by id."""
    examples: list[Example] = []
    passages: dict[str, Passage] = {}
    for name, conversation in source.json(dict[str, _Conversation]).items():
        for number, turn in enumerate(conversation.turns, start=1):
            place = source.place.at(f"conversation {shown(name)}, turn {number}")
            examples.append(_example(name, number, turn, style, passages, place))
    if not examples:
        raise source.place.error("there is no turn in it; is this INSCIT's data file?")
    return examples, passages


def _example(
    name: str, number: int, turn: _Turn, style: Style, passages: dict[str, Passage], place: Place
) -> Example:
    conversation: list[Message] = [
        {"role": _ROLES[index % 2], "content": text} for index, text in enumerate(turn.context)
    ]
    for one in (one for label in turn.labels for one in label.evidence):
        title = TITLES.join(one.passage_titles) or None
        passage = Passage(one.passage_text, one.passage_id, title)
        # Section titles may be written in several ways; the first one stays.
        if passages.setdefault(one.passage_id, passage).text != passage.text:
            raise place.error(
                f"the id {shown(one.passage_id)} stands for two different texts; "
                "give each passage an id of its own."
            )
    return Example(
        key=f"{name}/{number}",
        messages=worded(conversation, "inscit") if style == "chatrag" else tuple(conversation),
        references=tuple(
            Reference(
                label.response,
                label.responseType,
                tuple(dict.fromkeys(one.passage_id for one in label.evidence)),
            )
            for label in turn.labels
        ),
        group=name,
        kinds=tuple(dict.fromkeys(label.responseType for label in turn.labels)),
        details={
            "conv_id": name,
            "turn": number,
            "context": turn.context,
            "conversation": conversation,
        },
    )


class _Named(BaseModel):
    """A passage of a corpus in JSON."""

    id: Annotated[str, BeforeValidator(lambda one: str(one) if type(one) is int else one)]
    text: str
    title: str | None = None


def read_corpus(path: str | Path) -> tuple[tuple[Passage, ...], dict[str, str]]:
    """Read a file of passages to search.

    Either every line is a JSON object ``{"id": ..., "text": ..., "title": ...}``, the title being
    optional; or every line has an id, a text and optionally a title with a tab between them, fields
    quoted as in CSV or not, where lines ``id, text, title`` are headers (INSCIT's own script writes
    several). " [SEP] " between titles becomes " - ", so that a passage reads alike from here and
    from INSCIT's data file. The file may be compressed by gzip.

    Returns:
        Passages in the order of the file, and its name and digest for a manifest.

    Raises:
        DataError: the file is missing, unreadable, empty, cut off (if compressed), not UTF-8; a
            line is of neither form; or an id stands twice. File and line are named.
    """
    source = _unpacked(path)
    found: dict[str, Passage] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(source.text.split("\n"), start=1):
        place = source.place.at(f"line {number}")
        line = line.rstrip("\r")
        if not line.strip():
            continue
        if line.lstrip()[:1] == "{":
            one = validated(_Named, parse(line, place), place)
            passage = Passage(one.text, one.id, one.title)
        else:
            columns = line.split("\t")
            if not 2 <= len(columns) <= 3:
                raise place.error(
                    f"{len(columns)} column(s); a line is a JSON object, or id, text and title "
                    "with a tab between them."
                )
            name, text, title = (_unquoted(one) for one in (*columns, "")[:3])
            if (name, text, title) in (_HEADER, (*_HEADER[:2], "")):
                continue
            passage = Passage(text, name, TITLES.join(re.split(r"\s*\[SEP\]\s*", title)) or None)
        name = str(passage.id)
        if not name or name in found:
            problem = f"{shown(name)} stands in line {lines[name]} already" if name else "is empty"
            raise place.error(f"the id {problem}; give each passage an id of its own.")
        found[name], lines[name] = passage, number
    if not found:
        raise source.place.error("there is no passage in it; fetch or write it again.")
    return tuple(found.values()), source.stamp


def _unpacked(path: str | Path) -> Source:
    data, place = read_bytes(path), Place(str(path))
    digest = hashlib.sha256(data).hexdigest()
    if data.startswith(b"\x1f\x8b"):
        try:
            data = gzip.decompress(data)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise place.error(f"the compressed file is damaged or cut off ({error}).") from error
    return Source(place, digest, decoded(data, place))


def _unquoted(text: str) -> str:
    quoted = _QUOTED.fullmatch(text)
    return quoted[1].replace('""', '"') if quoted else text


class _Predicted(BaseModel):
    passage_id: str


class _Output(BaseModel):
    response: str
    evidence: list[_Predicted]


class _Prediction(BaseModel):
    conv_id: str
    turn_id: Annotated[int, BeforeValidator(lambda one: int(one) if isinstance(one, str) else one)]
    context: list[str]
    output: _Output


def evidence_of(record: Record, count: int = 1) -> tuple[str, ...]:
    """Ids of the passages that an answer is taken to rest on.

    Args:
        record: of the answer; none of its passages count where it holds an error.
        count: how many, at most.

    Returns:
        Those that got most attention, and behind them, where attention was not measured, the best
        retrieved. Passages without an id can't be named.
    """
    if record.error is not None:
        return ()
    # The sort is stable: equal ones stay in the order of the ranking.
    ranked = sorted(record.passages, key=lambda one: 1.0 if one.mass is None else -one.mass)
    return tuple(dict.fromkeys(one.id for one in ranked if one.id is not None))[:count]


def write_predictions(
    path: str | Path, examples: Sequence[Example], records: Mapping[str, Record], evidence: int = 1
) -> None:
    """Write one arm's answers in INSCIT's format, which its official script scores.

    The script finds a prediction by ``conv_id``, ``turn_id`` and ``context``, and stops where a
    turn has none; an error is written as an empty answer.

    Args:
        path: of the file.
        examples: of an `InscitTask`.
        records: by the examples' keys; examples without one are left out.
        evidence: how many passages count as the evidence of an answer, see `evidence_of`.

    Raises:
        DataError: the file can't be written.
    """
    rows = [
        {
            "conv_id": example.details["conv_id"],
            "turn_id": example.details["turn"],
            "context": list(example.details["context"]),
            "output": {
                "response": "" if record.error is not None else record.answer,
                "evidence": [{"passage_id": name} for name in evidence_of(record, evidence)],
            },
        }
        for example in examples
        if (record := records.get(example.key)) is not None
    ]
    write_whole(path, json.dumps(rows, ensure_ascii=False, indent=1) + "\n")


def read_predictions(
    path: str | Path, examples: Sequence[Example]
) -> list[tuple[str, tuple[str, ...]]]:
    """Read predictions for all examples.

    Args:
        path: of a file in INSCIT's format.
        examples: of an `InscitTask`.

    Returns:
        Answers with the ids of their evidence, in the order of the examples.

    Raises:
        DataError: the file can't be read; a field is missing or wrong; a turn is missing, unknown
            or predicted twice; or its context is not the data file's. File, record and field are
            named.
    """
    source = read(path)
    turns = {(one.details["conv_id"], one.details["turn"]): one for one in examples}
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    listed = source.json(list[Any])
    for number, value in enumerate(listed, start=1):
        place = source.place.at(f"record {number}")
        row = validated(_Prediction, value, place)
        example = turns.get((row.conv_id, row.turn_id))
        told = f"turn {row.turn_id} of conversation {shown(row.conv_id)}"
        if example is None:
            raise place.error(f"{told} is not in the data file.")
        if example.key in found:
            raise place.error(f"{told} was predicted already; keep one.")
        # The official script joins them before it compares.
        if " ".join(row.context) != " ".join(example.details["context"]):
            raise place.error(
                f'"context" is not that of {told} in the data file; score predictions with the '
                "data that they were made from."
            )
        evidence = tuple(one.passage_id for one in row.output.evidence)
        found[example.key] = row.output.response, evidence
    if missing := [one for one in examples if one.key not in found]:
        names = [f"{shown(one.details['conv_id'])} turn {one.details['turn']}" for one in missing]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise source.place.error(
            f"{len(missing)} of {len(examples)} turns are not predicted ({', '.join(names[:3])}"
            f"{more}); the score needs every turn of the data file."
        )
    return [found[one.key] for one in examples]


def score_inscit(
    data: str | Path, predictions: str | Path, *, by_type: bool = False
) -> dict[str, dict[str, float]]:
    """The figures of INSCIT's own script, and ChatRAG-Bench's F1, of a finished file.

    Args:
        data: INSCIT's data file.
        predictions: in INSCIT's format; one for every turn of the data file.
        by_type: whether the turns of each response type are scored by themselves, so that BLEU is
            right for them too. A turn whose annotators chose different types counts in each of
            them, with all its references.

    Returns:
        Response types in the order of the data file, or "" for all turns, with "evidence_f1",
        "bleu", "response_f1" and "chatrag_f1" in percent, and "n", the number of turns. A figure
        that no turn counts for is NaN.

    Raises:
        DataError: a file can't be read, or they do not belong together; names file and record.
        MissingExtraError: sacrebleu or spaCy is not installed.
    """
    examples = InscitTask.read(data).examples
    pairs = list(zip(examples, read_predictions(predictions, examples), strict=True))
    kinds = dict.fromkeys(kind for one in examples for kind in one.kinds) if by_type else [""]
    made = {}
    for kind in kinds:
        some = [pair for pair in pairs if not by_type or kind in pair[0].kinds]
        scored = inscit_scores(
            [example for example, _ in some],
            [answer for _, (answer, _) in some],
            [names for _, (_, names) in some],
        )
        values = {one.name: one.value for one in scored}
        made[kind] = {**{name: values[name] for name in _OFFICIAL}, "n": len(some)}
    return made
