"""ChatRAG-Bench (Liu et al., 2024, arXiv:2401.10225): ten datasets, a file of records each.

A record has ``messages`` with the user's question last, ``answers`` (or ``answer``), and ``ctxs``,
the passages in the order of their rank. ConvFinQA also has ``exe_answer``, the result of the
calculation. Several datasets name the right passage in ``ground_truth_ctx``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rag_windows.errors import DataError
from rag_windows.evaluation.data.chatrag_form import (
    INSTRUCTION,
    MAX_NEW_TOKENS,
    WORDINGS,
    Message,
    Style,
    check_style,
    titled,
    united,
    worded,
)
from rag_windows.evaluation.data.chatrag_passages import found_among, gold_of, passages_of
from rag_windows.evaluation.data.fields import (
    Place,
    checked,
    entries,
    field,
    kind_of,
    record_of,
    shown,
)
from rag_windows.evaluation.data.reading import Source, read
from rag_windows.evaluation.example import Example, Reference
from rag_windows.evaluation.record import Record
from rag_windows.evaluation.scores.chatrag import (
    REFUSING,
    chatrag_metrics,
    chatrag_scores,
    unanswerable,
)
from rag_windows.evaluation.task import Score
from rag_windows.passage import Passage

DATASETS = tuple(WORDINGS)
"""Names of the benchmark's datasets; DoQA is one in three domains."""


@dataclass(frozen=True)
class ChatRagTask:
    """A dataset of ChatRAG-Bench, ready to be asked.

    Attributes:
        dataset: its name, one of `DATASETS`.
        examples: one a record, ``dataset/number`` as their keys. Records with the same first
            message are one group. ``kinds`` tell "answerable" from "unanswerable" where a dataset
            has both. ``details`` hold the whole ``conversation``, and for ConvFinQA ``exe_answer``.
        style: "chatrag" for the benchmark's wording, or "plain".
        settings: see `Task`.
        right: the passages named as ``ground_truth_ctx``, by the examples' keys.
    """

    dataset: str
    examples: tuple[Example, ...]
    style: Style
    settings: Mapping[str, Any]
    right: Mapping[str, tuple[Passage, ...]]

    pool = None
    max_new_tokens = MAX_NEW_TOKENS

    @property
    def name(self) -> str:
        """Such as "chatrag/doc2dial"."""
        return f"chatrag/{self.dataset}"

    @property
    def prefix(self) -> str | None:
        """The benchmark's instruction in its style, nothing in the plain one."""
        return INSTRUCTION if self.style == "chatrag" else None

    @property
    def metrics(self) -> tuple[str, ...]:
        """See `chatrag_metrics`."""
        return chatrag_metrics(self.dataset)

    @classmethod
    def read(cls, path: str | Path, dataset: str, *, style: Style = "chatrag") -> ChatRagTask:
        """Read a dataset's file.

        Args:
            path: a JSON list of records, or one record a line.
            dataset: one of `DATASETS`.
            style: "chatrag": the benchmark's instruction, its wording for this dataset, the last
                seven messages, and titles in the passages' text. "plain": messages as they are,
                no instruction.

        Raises:
            DataError: an unknown dataset, or a file that can't be read; names file, record and
                field.
            InputError: an unknown style.
        """
        check_style(style)
        check_dataset(dataset)
        source = read(path)
        examples, right = read_records(source, dataset)
        if style == "chatrag":
            examples = tuple(_worded(one, dataset) for one in examples)
            right = {key: tuple(titled(one) for one in found) for key, found in right.items()}
        settings = {"dataset": dataset, "data": source.stamp, "style": style}
        return cls(dataset, examples, style, settings, right)

    def gold(self, example: Example) -> tuple[Passage, ...]:
        """The passages that the record names as right; none where it names none."""
        return self.right.get(example.key, ())

    def scores(self, examples: Sequence[Example], records: Sequence[Record]) -> list[Score]:
        """See `Task.scores` and `chatrag_scores`."""
        answers = ["" if one.error is not None else one.answer for one in records]
        return chatrag_scores(self.dataset, examples, answers)


def check_dataset(name: str) -> None:
    """Refuse an unknown dataset.

    Raises:
        DataError: names all of them, and the nearest.
    """
    if name in DATASETS:
        return
    plain = name.lower().replace("-", "_")
    domains = [one for one in DATASETS if one.startswith(f"{plain}_")]
    near = domains or difflib.get_close_matches(plain, DATASETS, n=1)
    raise DataError(
        f"{shown(name)} is no dataset of ChatRAG-Bench"
        + (f"; did you mean {' or '.join(sorted(near))}?" if near else ".")
        + f" It has {', '.join(DATASETS)}."
    )


def read_records(
    source: Source, dataset: str
) -> tuple[tuple[Example, ...], dict[str, tuple[Passage, ...]]]:
    """The examples of a file in plain wording, and the right passages that it names.

    An example's references name the right passages as their evidence. A right passage is known by
    its text; where the file shows none of them among any record's passages, it writes the two
    differently, and no evidence is named, since nothing could be told from it.

    Raises:
        DataError: naming record and field.
    """
    examples: list[Example] = []
    right: dict[str, tuple[Passage, ...]] = {}
    groups: dict[str, str] = {}
    evidence: list[tuple[str, ...]] = []
    comparable = False
    for number, (place, record) in enumerate(source.records(), start=1):
        key = f"{dataset}/{number}"
        example = _example(key, record, dataset, place)
        first = example.details["conversation"][0]["content"]
        examples.append(replace(example, group=groups.setdefault(first, key)))
        right[key] = gold_of(record)
        named = list(found_among(right[key], example.passages or ()))
        comparable |= any(found for _, found in named)
        evidence.append(tuple(dict.fromkeys(name for name, _ in named)))
    if not examples:
        raise source.place.error("there is no record in it; fetch or write it again.")
    if comparable:
        examples = [
            replace(
                one, references=tuple(replace(answer, evidence=names) for answer in one.references)
            )
            for one, names in zip(examples, evidence, strict=True)
        ]
    return tuple(examples), right


def _example(key: str, record: Any, dataset: str, place: Place) -> Example:
    conversation = _messages(record, place)
    details: dict[str, Any] = {"conversation": conversation}
    if dataset == "convfinqa":
        details["exe_answer"] = _result(record, place)
    example = Example(
        key=key,
        messages=united(conversation),
        references=tuple(Reference(text) for text in _answers(record, place)),
        group=key,
        passages=passages_of(record, place),
        details=details,
    )
    if dataset not in REFUSING:
        return example
    return replace(example, kinds=("unanswerable" if unanswerable(example) else "answerable",))


def _messages(record: Any, place: Place) -> list[Message]:
    found: list[Message] = []
    for where, one in entries(record, "messages", "message", place):
        role = field(one, "role", str, where)
        if role not in ("user", "assistant"):
            raise where.error(f'"role" is {shown(role)}; it must be "user" or "assistant".')
        found.append({"role": role, "content": field(one, "content", str, where)})
    if not found:
        raise place.error('"messages" is empty; the last one must hold the question.')
    if found[-1]["role"] != "user":
        raise place.error('the last of the "messages" is the assistant\'s; it must be a question.')
    return found


def _answers(record: Any, place: Place) -> list[str]:
    record = record_of(record, place)
    name = "answers" if record.get("answers") is not None else "answer"
    if record.get(name) is None:
        raise place.error('"answers" is missing; it must be a list with at least one answer.')
    value = record[name]
    many = value if isinstance(value, list) else [value]
    if name == "answers":
        checked(value, list, place, '"answers"')
    if not many:
        raise place.error(f'"{name}" is empty; each record needs at least one answer.')
    for number, one in enumerate(many, start=1):
        if isinstance(one, bool) or not isinstance(one, str | int | float):
            raise place.error(f'entry {number} of "{name}" must be a string, not {kind_of(one)}.')
    return [str(one) for one in many]


def _result(record: Any, place: Place) -> str | int | float:
    value = record.get("exe_answer")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        told = kind_of(value) if "exe_answer" in record else "missing"
        raise place.error(f'"exe_answer" must be a number or a string, and is {told}.')
    return value


def _worded(example: Example, dataset: str) -> Example:
    return replace(
        example,
        messages=worded(example.details["conversation"], dataset),
        passages=tuple(titled(one) for one in example.passages or ()),
    )
