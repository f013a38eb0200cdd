"""ChatRAG-Bench (Liu et al., 2024, arXiv:2401.10225): ten datasets, a file of records each.

A record has ``messages`` with the user's question last, ``answers`` (or ``answer``), and ``ctxs``,
the passages in the order of their rank. ConvFinQA also has ``exe_answer``, the result of the
calculation. Several datasets name the right passage in ``ground_truth_ctx``.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from rag_windows.errors import DataError, InputError
from rag_windows.evaluation.files import (
    Place,
    Source,
    decoded,
    read,
    read_bytes,
    shown,
    write_whole,
)
from rag_windows.evaluation.metrics import (
    REFUSING,
    chatrag_metrics,
    chatrag_scores,
    one_line,
    unanswerable,
)
from rag_windows.evaluation.record import Record
from rag_windows.evaluation.task import Example, Reference, Score
from rag_windows.passage import Passage

Style = Literal["chatrag", "plain"]
Message = dict[str, str]

INSTRUCTION = (
    "This is a chat between a user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions based on the context. The "
    "assistant should also indicate when the answer cannot be found in the context."
)
MAX_NEW_TOKENS = 64
"""The benchmark's limit for an answer."""

LAST_MESSAGES = 7
"""Earlier messages are left out."""

_LONG = "Please give a full and complete answer for the question. "
_SHORT = {
    "topiocqa": "Answer the following question with a short span, or a full and complete answer. ",
    "coqa": "Answer the following question with a short span. "
    "The answer needs to be just in a few words. ",
    "sqa": "Answer the following question with one or a list of items. ",
}
"""What is put before the question. In the other datasets `_LONG` stands before the first message of
the user that is left."""

DATASETS = (
    *("doc2dial", "quac", "qrecc", "inscit", "topiocqa", "coqa", "doqa_cooking", "doqa_travel"),
    *("doqa_movies", "sqa", "hybridial", "convfinqa"),
)
"""Names of the benchmark's datasets; DoQA is one in three domains."""


def check_style(style: str) -> None:
    """Refuse an unknown style.

    Raises:
        InputError: it is neither "chatrag" nor "plain".
    """
    if style not in get_args(Style):
        raise InputError(f"Unknown style {style!r}; use one of {', '.join(get_args(Style))}.")


def worded(messages: Sequence[Message], dataset: str) -> tuple[Message, ...]:
    """The messages that the benchmark shows to a model, the dataset's wording among them.

    The roles' marks ("User: ") are the model's own template's.

    Args:
        messages: of a conversation; the last one is the user's.
        dataset: a name in `DATASETS`.
    """
    last = [dict(one) for one in messages[-LAST_MESSAGES:]]
    order = last[::-1] if dataset in _SHORT else last
    asked = next(one for one in order if one["role"] == "user")
    asked["content"] = _SHORT.get(dataset, _LONG) + asked["content"]
    return united(last)


def united(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with those of one role in a row as one, a blank line between them.

    Most templates take roles only in turn.
    """
    made: list[Message] = []
    for one in messages:
        if made and made[-1]["role"] == one["role"]:
            made[-1]["content"] += f"\n\n{one['content']}"
        else:
            made.append(dict(one))
    return tuple(made)


def titled(passage: Passage) -> Passage:
    """The passage with its title in its text, as the benchmark's scripts show it to a model."""
    if passage.title is None:
        return passage
    return Passage(
        f"title: {passage.title}, source: {passage.text}",
        id=passage.id,
        score=passage.score,
        metadata={**passage.metadata, "title": passage.title},
    )


def _words(text: str) -> str:
    return " ".join(text.split())


def name_of(text: str) -> str:
    """An id for a text that has none."""
    return hashlib.sha256(_words(text).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, list) for one in value)


def _text_of(value: Any) -> Any:
    """A table (a list of rows) becomes lines with " | " between cells."""
    if not _is_table(value):
        return value
    if any(isinstance(cell, dict | list) for cells in value for cell in cells):
        raise ValueError("a cell of a table must be a text or a number")
    return "\n".join(" | ".join("" if c is None else str(c) for c in cells) for cells in value)


class _Message(BaseModel):
    role: Literal["user", "assistant"]
    content: str


class _Passage(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)

    text: Annotated[str, BeforeValidator(_text_of)]
    id: str | int | None = None
    title: str | None = None
    score: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return {"text": value} if isinstance(value, str) or _is_table(value) else value

    @field_validator("score", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        # DPR writes them as strings.
        return float(value) if isinstance(value, str) else value

    def made(self) -> Passage:
        name = name_of(self.text) if self.id is None or self.id == "" else str(self.id)
        return Passage(self.text, name, self.title or None, self.score)


class _Row(BaseModel):
    """A record; its passages are ``ctxs``, or where these are missing ``documents``/``document``.

    Each is a text, a table, or an object with ``text`` and maybe ``title``, ``id`` and ``score``.
    """

    messages: Annotated[list[_Message], Field(min_length=1)]
    answers: Annotated[list[str | int | float], Field(min_length=1)]
    passages: Annotated[list[_Passage], Field(min_length=1)]
    exe_answer: str | int | float | None = None
    ground_truth_ctx: Any = None

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        made = {name: value[name] for name in cls.model_fields if value.get(name) is not None}
        if value.get("answers") is None and (answer := value.get("answer")) is not None:
            made["answers"] = answer if isinstance(answer, list) else [answer]
        for name in ("ctxs", "documents", "document"):
            found = value.get(name)
            if found is not None and found != []:
                alone = name == "document" and (not isinstance(found, list) or _is_table(found))
                made["passages"] = [found] if alone else found
                break
        else:
            raise ValueError('it has no passages; give them as "ctxs", "documents" or "document"')
        return made

    @field_validator("messages")
    @classmethod
    def _asked(cls, value: list[_Message]) -> list[_Message]:
        if value[-1].role != "user":
            raise ValueError("the last message is the assistant's; it must be a question")
        return value


def _gold(value: Any) -> tuple[Passage, ...]:
    """The right passages as ``ground_truth_ctx`` names them; what is no known form is left out."""
    found = []
    for one in value if isinstance(value, list) else [value]:
        text = one.get("ctx", one.get("text")) if isinstance(one, dict) else one
        if isinstance(text, str) and text.strip():
            title = one.get("title") if isinstance(one, dict) else None
            found.append(Passage(text, name_of(text), title if isinstance(title, str) else None))
    return tuple(found)


@dataclass(frozen=True)
class ChatRagTask:
    """A dataset of ChatRAG-Bench, ready to be asked.

    Attributes:
        dataset: its name, one of `DATASETS`.
        examples: one a record, ``dataset/number`` as their keys. Records with the same first
            message are one group. ``kinds`` tell "answerable" from "unanswerable" where a dataset
            has both. ``details`` hold the whole ``conversation``, and for ConvFinQA ``exe_answer``.
        style: "chatrag" for the benchmark's wording, or "plain".
        settings: what the answers depend on.
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
        _check_dataset(dataset)
        source = read(path)
        examples, right = _read_records(source, dataset)
        if style == "chatrag":
            examples = [
                replace(
                    one,
                    messages=worded(one.details["conversation"], dataset),
                    passages=tuple(map(titled, one.passages or ())),
                )
                for one in examples
            ]
            right = {key: tuple(map(titled, found)) for key, found in right.items()}
        settings = {"dataset": dataset, "data": source.stamp, "style": style}
        return cls(dataset, tuple(examples), style, settings, right)

    def gold(self, example: Example) -> tuple[Passage, ...]:
        """The passages that the record names as right; none where it names none."""
        return self.right.get(example.key, ())

    def scores(self, examples: Sequence[Example], records: Sequence[Record]) -> list[Score]:
        """Score one arm's records; see `chatrag_scores`."""
        answers = ["" if one.error is not None else one.answer for one in records]
        return chatrag_scores(self.dataset, examples, answers)


def _check_dataset(name: str) -> None:
    """Refuse an unknown dataset, naming all of them, and the nearest."""
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


def _read_records(
    source: Source, dataset: str
) -> tuple[list[Example], dict[str, tuple[Passage, ...]]]:
    """The examples of a file in plain wording, and the right passages that it names.

    An example's references name the right passages as their evidence. A right passage is known by
    its text; where the file shows none of them among any record's passages, it writes the two
    differently, and no evidence is named, since nothing could be told from it.
    """
    examples: list[Example] = []
    right: dict[str, tuple[Passage, ...]] = {}
    groups: dict[str, str] = {}
    comparable = False
    for number, (place, row) in enumerate(source.records(_Row), start=1):
        key = f"{dataset}/{number}"
        example = _example(key, row, dataset, place)
        right[key] = _gold(row.ground_truth_ctx)
        ids = {_words(one.text): str(one.id) for one in reversed(example.passages or ())}
        found = [ids.get(_words(one.text)) for one in right[key]]
        comparable |= any(found)
        names = dict.fromkeys(
            name or str(one.id) for name, one in zip(found, right[key], strict=True)
        )
        examples.append(
            replace(
                example,
                group=groups.setdefault(row.messages[0].content, key),
                references=_with_evidence(example.references, names),
            )
        )
    if not examples:
        raise source.place.error("there is no record in it; fetch or write it again.")
    if not comparable:
        examples = [replace(e, references=_with_evidence(e.references, ())) for e in examples]
    return examples, right


def _with_evidence(references: Sequence[Reference], names: Iterable[str]) -> tuple[Reference, ...]:
    return tuple(replace(one, evidence=tuple(names)) for one in references)


def _example(key: str, row: _Row, dataset: str, place: Place) -> Example:
    conversation = [one.model_dump() for one in row.messages]
    details: dict[str, Any] = {"conversation": conversation}
    if dataset == "convfinqa":
        if row.exe_answer is None:
            raise place.error('"exe_answer" is missing; it must be a number or a string.')
        details["exe_answer"] = row.exe_answer
    example = Example(
        key=key,
        messages=united(conversation),
        references=tuple(Reference(str(one)) for one in row.answers),
        group=key,
        passages=tuple(one.made() for one in row.passages),
        details=details,
    )
    if dataset not in REFUSING:
        return example
    return replace(example, kinds=("unanswerable" if unanswerable(example) else "answerable",))


def write_answers(path: str | Path, answers: Sequence[str]) -> None:
    """Write predictions as the benchmark's own script reads them: a line an answer.

    Args:
        path: of the file.
        answers: in the order of the records; line breaks in them become spaces.
    """
    write_whole(path, "".join(f"{one_line(answer)}\n" for answer in answers))


def read_answers(path: str | Path, count: int) -> tuple[str, ...]:
    """Read answers, one for each record.

    Args:
        path: of the file.
        count: how many there must be. The benchmark's script takes fewer and scores these alone.

    Raises:
        DataError: the file can't be read, or holds another number of lines.
    """
    place = Place(str(path))
    text = decoded(read_bytes(path), place).replace("\r\n", "\n").replace("\r", "\n")
    lines = text.removesuffix("\n").split("\n") if text else []
    if len(lines) != count:
        raise place.error(
            f"{len(lines)} line(s) for {count} record(s); it must hold one answer a line, "
            "an empty line for an empty answer."
        )
    return tuple(line.strip() for line in lines)


def read_answerable(path: str | Path, examples: Sequence[Example]) -> frozenset[str]:
    """Keys of the questions that a list names, for `chatrag_scores`.

    ChatRAG-Bench's scorer holds such a list for QuAC, ``quac_correct_retrieved_instance_idx_list``:
    the answerable questions whose first five passages hold the right answer. It is not part of this
    project; save it as JSON.

    Args:
        path: JSON, a list of numbers: each the position of a question among the answerable ones of
            the dataset, from 0.
        examples: the whole dataset, in the order of its file.

    Raises:
        DataError: the file can't be read, is no such list, or names a question that isn't there.
    """
    source = read(path)
    keys = [example.key for example in examples if not unanswerable(example)]
    numbers = source.json(list[int])
    wrong = next((one for one in numbers if not 0 <= one < len(keys)), None)
    if wrong is not None:
        raise source.place.error(
            f"{wrong} is in the list, but the {len(keys)} answerable questions are counted from 0; "
            "take the list that belongs to this dataset."
        )
    return frozenset(keys[number] for number in numbers)


def score_chatrag(
    data: str | Path,
    dataset: str,
    predictions: str | Path,
    answerable: str | Path | None = None,
) -> dict[str, float]:
    """The figures of ChatRAG-Bench's own script, of a finished file of predictions.

    Args:
        data: the dataset's file.
        dataset: its name in the benchmark, such as "doc2dial".
        predictions: a line an answer, in the order of the data file.
        answerable: see `read_answerable`; None to count all answerable questions.

    Returns:
        What `chatrag_scores` gives, by name, in percent; and "n", the number of records. A figure
        that no record counts for is NaN.

    Raises:
        DataError: an unknown dataset, a file that can't be read, or files that do not belong
            together.
    """
    examples = ChatRagTask.read(data, dataset, style="plain").examples
    answers = read_answers(predictions, len(examples))
    keys = None if answerable is None else read_answerable(answerable, examples)
    scores = chatrag_scores(dataset, examples, answers, keys)
    return {**{one.name: one.value for one in scores}, "n": len(examples)}
