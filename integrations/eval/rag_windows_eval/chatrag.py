"""ChatRAG-Bench (Liu et al., NeurIPS 2024, arXiv:2401.10225): ten datasets, a file of records each.

A record has ``messages`` with the user's question last, ``answers`` (or ``answer``), and ``ctxs``,
the passages in the order of their rank. ConvFinQA also has ``exe_answer``, the result of the
calculation.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    Field,
    NonNegativeInt,
    field_validator,
)

from rag_windows.calibration import bag_f1, chatrag_words
from rag_windows.errors import DataError
from rag_windows.passage import Passage
from rag_windows_eval.files import Name, read, shown, write_whole
from rag_windows_eval.task import (
    AnswerRecord,
    Array,
    MetricScore,
    Reference,
    Task,
    TaskExample,
    digest_of,
    ratio,
)

Message = dict[str, str]


INSTRUCTION = (
    "This is a chat between a user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions based on the context. The "
    "assistant should also indicate when the answer cannot be found in the context."
)
LAST_MESSAGES = 7
"""The benchmark's limit for a conversation."""

_LONG = "Please give a full and complete answer for the question. "
_SHORT = {
    "topiocqa": "Answer the following question with a short span, or a full and complete answer. ",
    "coqa": "Answer the following question with a short span. "
    "The answer needs to be just in a few words. ",
    "sqa": "Answer the following question with one or a list of items. ",
}
"""What is put before the question; otherwise `_LONG` stands before the user's first message."""

DATASETS = (
    *("doc2dial", "quac", "qrecc", "inscit", "topiocqa", "coqa", "doqa_cooking", "doqa_travel"),
    *("doqa_movies", "sqa", "hybridial", "convfinqa"),
)
"""Names of the benchmark's datasets; DoQA is one in three domains."""

REFUSING = frozenset({"quac", "doqa_cooking", "doqa_movies", "doqa_travel"})
"""Datasets some of whose questions have no answer in their passages."""

SORRY = "Sorry. I cannot find the answer based on the context."
"""What the benchmark expects where the passages hold no answer."""

_NEGATED = ("provide", "mention", "specify", "include", "contain", "indicate", "disclose")
_PHRASES = (
    *("cannot find", "can't find", "can not find", "could not find", "couldn't find"),
    *("cannot answer", "can't answer", "couldnot answer", "couldn't answer"),
    *("cannot be found", "cannot be determined", "cannot provide", "not able to", "unable to"),
    *(f"does not {verb}" for verb in _NEGATED),
    *(f"doesn't {verb}" for verb in _NEGATED),
    *("not mentioned", "not explicitly mentioned", "not explicitly explain", "not provided"),
    *("do not have", "don't have", "don't know", "no information", "there is no"),
)


def worded(messages: Sequence[Message], dataset: str) -> tuple[Message, ...]:
    """The last seven messages as the benchmark shows them to a model, worded for this dataset.

    Those of one role in a row become one, since most templates take roles only in turn.
    """
    last = [dict(one) for one in messages[-LAST_MESSAGES:]]
    order = last[::-1] if dataset in _SHORT else last
    asked = next(one for one in order if one["role"] == "user")
    asked["content"] = _SHORT.get(dataset, _LONG) + asked["content"]
    made: list[Message] = []
    for one in last:
        if made and made[-1]["role"] == one["role"]:
            made[-1]["content"] += f"\n\n{one['content']}"
        else:
            made.append(one)
    return tuple(made)


class _Message(BaseModel):
    role: Literal["user", "assistant"]
    content: str


class _Passage(BaseModel):
    text: str
    id: Name | None = None
    title: str | None = None
    # DPR writes them as strings.
    score: Annotated[
        float | None, BeforeValidator(lambda one: float(one) if isinstance(one, str) else one)
    ] = Field(None, allow_inf_nan=False)

    def made(self) -> Passage:
        """As the benchmark's scripts show it to a model, with its title in its text."""
        name = self.id or digest_of(self.text)
        if not self.title:
            return Passage(self.text, name, score=self.score)
        text = f"title: {self.title}, source: {self.text}"
        return Passage(text, name, score=self.score, metadata={"title": self.title})


class _Row(BaseModel):
    messages: list[_Message]
    answers: Annotated[
        list[str | int | float],
        Field(min_length=1, validation_alias=AliasChoices("answers", "answer")),
        BeforeValidator(lambda one: one if isinstance(one, list) else [one]),
    ]
    ctxs: Annotated[list[_Passage], Field(min_length=1)]
    exe_answer: str | int | float | None = None

    @field_validator("messages")
    @classmethod
    def _asked(cls, value: list[_Message]) -> list[_Message]:
        if not value or value[-1].role != "user":
            raise ValueError("the last message must be the user's question")
        return value


class ChatRagTask(Task):
    """One of `DATASETS`, ready to be asked.

    Examples are one a record, ``dataset/number`` as their keys. Records with the same first message
    are one group. Kinds tell "answerable" from "unanswerable" where a dataset has both.
    """

    @classmethod
    def read(cls, path: str | Path, dataset: str) -> ChatRagTask:
        """Read a dataset's file: a JSON list of records, or one record a line."""
        if dataset not in DATASETS:
            raise DataError(
                f"{shown(dataset)} is not a dataset of ChatRAG-Bench. Choose one of "
                f"{', '.join(DATASETS)}."
            )
        source, examples, groups = read(path), [], dict[str, str]()
        for number, (place, row) in enumerate(source.records(_Row), start=1):
            if dataset == "convfinqa" and row.exe_answer is None:
                raise DataError(
                    f'{place}: "exe_answer" is missing. It must be a number or a string.'
                )
            key, refused = f"{dataset}/{number}", row.answers[0] == SORRY
            conversation = [one.model_dump() for one in row.messages]
            examples.append(
                TaskExample(
                    key=key,
                    messages=worded(conversation, dataset),
                    references=tuple(Reference(str(one)) for one in row.answers),
                    group=groups.setdefault(row.messages[0].content, key),
                    kinds=("unanswerable" if refused else "answerable",) * (dataset in REFUSING),
                    passages=tuple(one.made() for one in row.ctxs),
                    details={"conversation": conversation, "exe_answer": row.exe_answer},
                )
            )
        if not examples:
            raise DataError(f"{path} holds no record. Download or write it again.")
        settings = {"dataset": dataset, "data": source.stamp}
        name = f"chatrag/{dataset}"
        return cls(name=name, examples=examples, settings=settings, prefix=INSTRUCTION)

    def scores(
        self, examples: Sequence[TaskExample], records: Sequence[AnswerRecord]
    ) -> list[MetricScore]:
        """See `chatrag_scores`."""
        return chatrag_scores(self.settings["dataset"], examples, [one.answer for one in records])


def chatrag_scores(
    dataset: str,
    examples: Sequence[TaskExample],
    answers: Sequence[str],
    answerable: Collection[str] | None = None,
) -> list[MetricScore]:
    """Score answers as ChatRAG-Bench's own script scores this dataset, one an example.

    - ConvFinQA has only "accuracy": `holds_result`.
    - All others have "f1". INSCIT's additional answer `SORRY` is no reference.
    - QuAC and DoQA: `settled` answers are scored. "unanswerable_accuracy" is the share of questions
      whose first reference is `SORRY` that are answered so, "answerable_accuracy" the share of the
      others that are not, "mean_accuracy" the mean of both shares, and "answerable_f1" the F1 of
      the answerable ones: those with the keys ``answerable``, or all.
    """
    said = [one_line(answer) for answer in answers]
    if dataset == "convfinqa":
        held = [100.0 * holds_result(*pair) for pair in zip(examples, said, strict=True)]
        return [MetricScore.mean("accuracy", held)]
    if dataset in REFUSING:
        said = [settled(answer) for answer in said]
    f1, answered, counted, refused = [], [], [], []
    for example, answer in zip(examples, said, strict=True):
        texts = [one.text for one in example.references]
        f1.append(chatrag_f1(answer, [t for t in texts if dataset != "inscit" or t != SORRY]))
        sorry, without = 100.0 * refuses(answer), unanswerable(example)
        counts = not without and (answerable is None or example.key in answerable)
        refused.append(sorry if without else None)
        answered.append(100.0 - sorry if counts else None)
        counted.append(f1[-1] if counts else None)
    scores = [MetricScore.mean("f1", f1)]
    if dataset in REFUSING:
        right = MetricScore.mean("answerable_accuracy", answered)
        sad = MetricScore.mean("unanswerable_accuracy", refused)
        # Both shares count the same, however many questions each has: it is no mean over these.
        both = np.concatenate([sad.rows, right.rows], axis=1)
        mean = MetricScore("mean_accuracy", both, _mean_of_ratios)
        scores += [MetricScore.mean("answerable_f1", counted), sad, right, mean]
    return scores


def _mean_of_ratios(sums: Array) -> Array:
    return ratio(sums.reshape(*sums.shape[:-1], -1, 2)).mean(axis=-1)


def chatrag_f1(answer: str, references: Iterable[str]) -> float | None:
    """F1 as ChatRAG-Bench counts it, with the best of the references that have text; percent."""
    words = chatrag_words(answer.strip().replace("</s>", ""))
    right = [chatrag_words(text) for text in references if text.strip()]
    return max((100 * bag_f1(words, one) for one in right), default=None)


def one_line(answer: str) -> str:
    """The answer as it stands in a predictions file of the benchmark, which has one a line."""
    return answer.replace("\r\n", " ").replace("\n", " ").replace("\r", " ").strip()


def unanswerable(example: TaskExample) -> bool:
    """Whether the benchmark says that the passages hold no answer."""
    return example.references[0].text == SORRY


def settled(answer: str) -> str:
    """`SORRY` if the answer holds a phrase of refusal, otherwise the answer in lower case."""
    lowered = answer.lower()
    return SORRY if any(phrase in lowered for phrase in _PHRASES) else lowered


def refuses(answer: str) -> bool:
    """Whether the answer counts as refusal: it is sorry and cannot find the answer."""
    lowered = answer.lower()
    return "sorry" in lowered and "cannot find the answer" in lowered


def holds_result(example: TaskExample, answer: str) -> bool:
    """Whether an answer is right for ConvFinQA.

    Readers answer at length, so it is enough that the answer contains the result, perhaps written
    otherwise, or its formula, the dataset's first answer.
    """
    question, result = example.conversation[-1]["content"], example.details["exe_answer"]
    text = re.sub("[,$]|million|billion", "", answer)
    text = " ".join(re.sub(r"\(\w+\)", "", text).split())
    formula = example.references[0].text
    wanted = (str(result), formula, *_written(result, "percent" in question, "decrease" in text))
    return any(one.strip() and one in text for one in wanted)


def _written(result: float | str, percent: bool, decrease: bool) -> Iterator[str]:
    """Other forms of a result that is a number: rounded, in percent, without ".0" or minus."""
    try:
        number = float(result)
    except (ValueError, OverflowError):
        return
    yield str(round(number, 3))
    yield str(round(number, 2))
    if percent:
        yield str(number * 100)
        yield str(round(number * 100, 1))
        yield str(round(number * 100, 2))
    if str(result).endswith(".0"):
        yield str(int(number))
    if decrease and number < 0:
        yield str(-number if isinstance(result, str) else -result)


def write_answers(path: str | Path, answers: Sequence[str]) -> None:
    """Write predictions as the benchmark's own script reads them: a line an answer, in order."""
    write_whole(path, "".join(f"{one_line(answer)}\n" for answer in answers))


def read_answers(path: str | Path, count: int) -> tuple[str, ...]:
    """Read as many answers as there are records; the benchmark's script would take fewer."""
    lines = tuple(line.strip() for line in io.StringIO(read(path).text, newline=None))
    if len(lines) != count:
        raise DataError(
            f"{path} must hold one line for each of the {count} records, not {len(lines)}. Write "
            "an empty line for an empty answer."
        )
    return lines


def score_chatrag(
    data: Path, dataset: str, predictions: Path, answerable: Path | None = None
) -> dict[str, float]:
    """The figures of ChatRAG-Bench's own script, and the number "n" of records; NaN for no figure.

    ``answerable`` is a JSON list of places among the answerable questions, from 0. The benchmark's
    script has it for QuAC, ``quac_correct_retrieved_instance_idx_list``: those whose first five
    passages hold the right answer.
    """
    examples = ChatRagTask.read(data, dataset).examples
    answers, keys = read_answers(predictions, len(examples)), None
    if answerable is not None:
        there = [example.key for example in examples if not unanswerable(example)]
        try:
            keys = {there[place] for place in read(answerable).json(list[NonNegativeInt])}
        except IndexError as error:
            raise DataError(
                f"{answerable} names a place beyond the {len(there)} answerable questions of the "
                "data. Name the list that belongs to this data file."
            ) from error
    scores = chatrag_scores(dataset, examples, answers, keys)
    return {**{one.name: one.value for one in scores}, "n": len(examples)}
