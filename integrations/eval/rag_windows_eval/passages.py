"""Questions that bring their passages, in the formats in which people have them.

A file holds one of these, as JSON lines, a JSON list, or (SQuAD) one object, perhaps compressed:

- plain: ``question``, ``answers`` (or ``answer``), ``passages`` of ``text``, ``title``, ``score``,
  ``right`` and, of a document's chunks, ``before``, the texts of the chunks in front of it;
- lost-in-the-middle's and DPR's: ``question``, ``answers`` (or ``answer``), ``ctxs`` of ``text``,
  ``title``, ``score``, and ``isgold``, or ``hasanswer`` or ``has_answer``;
- HotpotQA's and 2WikiMultihopQA's: ``question``, ``answer``, ``context`` as pairs of title and
  sentences, ``supporting_facts`` as pairs of title and sentence;
- MuSiQue's: ``question``, ``answer``, ``answer_aliases``, ``paragraphs`` of ``title``,
  ``paragraph_text`` and ``is_supporting``;
- SQuAD's: ``data`` of articles; the other paragraphs of an article are what distracts.

In all but the last a ``question`` may also be a list of texts: a conversation, in which user and
assistant take turns and the user has the last word.
"""

from __future__ import annotations

import json
import random
import re
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, cycle, islice, starmap
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from rag_windows.calibration import bag_f1, chatrag_words, compared_words, contains
from rag_windows.errors import DataError
from rag_windows.passage import Passage
from rag_windows_eval.files import Name, SourceFile, read, shown, validated
from rag_windows_eval.task import AnswerRecord, MetricScore, Reference, Task, TaskExample

PREFIX = "Answer the question with a short phrase, using the documents."
"""The instruction before the passages, unless the user gives another one."""

NEW_TOKENS = 32
"""Largest number of tokens of an answer, unless the user gives another one."""


_SAYS = (
    r"(?:stat|mention|specif|give|giving|provid|f[oi]u?nd|availab|includ|contain|kn[oe]w|say|have|"
    r"answer|disclos|indicat|clear)\w*"
)
_ABSTAINS = re.compile(
    rf"(?:\bnot|n't|\bcannot be) (?:\w+ )?{_SAYS}|\bno (?:\w+ )?(?:information|mention|answer)\b"
    r"|\b(?:unknown|unclear|unable to)\b",
    re.IGNORECASE,
)
"""Matches answers that say that the passages lack the answer."""


@dataclass(frozen=True, slots=True)
class PassagesQuestion:
    """A question with right answers and its passages, the right ones marked.

    ``turns`` are the texts of the user and the assistant in turn, the question last.
    """

    key: str
    turns: tuple[str, ...]
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]
    right: tuple[bool, ...]

    def reading(self, size: int | None, seed: int, *, without_right: bool = False) -> TaskExample:
        """An example with ``size`` passages: all right ones, then the first others, shuffled.

        The order depends only on question, size and seed. A size of None means all passages.
        Without the right ones, only the others of the same selection are read.
        """
        order = sorted(range(len(self.passages)), key=lambda index: not self.right[index])
        read = order[: max(size, sum(self.right))] if size is not None else order
        if without_right:
            read = [index for index in read if not self.right[index]]
        random.Random(f"{seed}/{self.key}/{size}").shuffle(read)
        named = [replace(self.passages[at], id=f"{self.key}/{at + 1}") for at in read]
        right = [one.id for one, at in zip(named, read, strict=True) if self.right[at]]
        return TaskExample(
            key=self.key if size is None else f"{self.key}/{size}",
            messages=tuple(
                {"role": role, "content": text}
                for role, text in zip(cycle(("user", "assistant")), self.turns, strict=False)
            ),
            references=tuple(map(Reference, self.answers)),
            group=self.key,
            kinds=() if size is None else (f"{size} passages",),
            passages=tuple(named),
            details={"right": right, "given": len(self.passages)},
        )


class PassagesTask(Task):
    """A file of questions that bring their passages, ready to be asked."""

    @classmethod
    def read(
        cls,
        path: str,
        *,
        sizes: Sequence[int | None] = (None,),
        seed: int = 0,
        questions: int | None = None,
        without_right: bool = False,
    ) -> Self:
        """Read a file of one of the formats.

        Args:
            path: the file.
            sizes: numbers of passages to read; None for all that a question has. A question with
                fewer is read with all of them.
            seed: of the places of the passages.
            questions: how many to take, from the first on; None for all.
            without_right: leave out the passages that are marked as right, so that a good answer
                says that they do not tell.

        Raises:
            DataError: naming the line and the field that is wrong.
        """
        source = read(path)
        most = None if questions is None else min(questions, sys.maxsize)
        found = list(islice(questions_of(source), most))
        if not found:
            raise DataError(f"{path} holds no questions. Give a file that does.")
        if without_right and (plain := next((one for one in found if not any(one.right)), None)):
            raise DataError(
                f"{path}: no passage of question {plain.key!r} is marked as right, so none can be "
                "left out. Mark them, or leave --without-right out."
            )
        examples = [
            one.reading(size, seed, without_right=without_right) for one in found for size in sizes
        ]
        return cls(
            name=f"passages/{Path(path).name.partition('.')[0]}",
            examples=examples,
            settings={
                "data": source.stamp,
                "sizes": list(sizes),
                "seed": seed,
                "questions": questions,
                "without_right": without_right,
            },
            prefix=PREFIX,
            behind_own_system=True,
            max_new_tokens=NEW_TOKENS,
        )

    def notes(self) -> list[str]:
        """What is not as ``--passages`` says it."""
        given = {one.group: one for one in self.examples}.values()
        total, cut = len(given), [size for size in self.settings["sizes"] if size is not None]
        if not cut:
            return []
        notes, most, least = list[str](), max(cut), min(cut)
        if few := sum(one.details["given"] < most for one in given):
            notes.append(
                f"{few} of {total} questions bring fewer than {most} passages; where a number of "
                "passages is larger than theirs, they are asked over all they bring."
            )
        # Where right ones are left out, each question has one.
        all_marked = self.settings["without_right"]
        unmarked = [one for one in given if not (all_marked or one.details["right"])]
        if plain := sum(one.details["given"] > least for one in unmarked):
            notes.append(
                f"{plain} of {total} questions mark no passage as right, so the first ones are "
                'read, and those with the answer may be left out. Mark them with "right": true.'
            )
        return notes

    def scores(
        self, examples: Sequence[TaskExample], records: Sequence[AnswerRecord]
    ) -> list[MetricScore]:
        """Whether answers are right, and whether citations are.

        "contains" is whether the answer holds the words of a right one in a row, "exact" whether it
        has no other words, "f1" the best F1 of words with a right one; case never counts,
        punctuation and articles only where a right one has no other words. "not_mentioned" is
        whether the answer is empty or says that the passages do not tell. "cites_right" is whether
        the passage with the largest citation is a right one, "cites_right_if_right" the same of
        answers that contain a right one; both count only questions whose right passages are marked.
        """
        found: dict[str, list[float | None]] = {name: [] for name in _METRICS}
        for example, record in zip(examples, records, strict=True):
            said, rights = record.answer, [one.text for one in example.references]
            words = chatrag_words(said)
            held = any(contains(said, right) for right in rights)
            found["contains"].append(100.0 * held)
            pairs = [compared_words(said, right) for right in rights]
            found["exact"].append(100.0 * any(one == right for one, right in pairs))
            found["f1"].append(100.0 * max(starmap(bag_f1, pairs)))
            abstains = bool(_ABSTAINS.search(said)) or not (words or held)
            found["not_mentioned"].append(100.0 * abstains)
            cited = max(
                (one for one in record.passages if one.mass),
                key=lambda one: one.mass or 0.0,
                default=None,
            )
            marked = example.details["right"]
            cites = 100.0 * (cited is not None and cited.id in marked) if marked else None
            measured = any(one.mass is not None for one in record.passages)
            found["cites_right"].append(cites if measured else None)
            found["cites_right_if_right"].append(cites if measured and held else None)
        return [MetricScore.mean(name, values) for name, values in found.items()]


_METRICS = ("contains", "exact", "f1", "not_mentioned", "cites_right", "cites_right_if_right")


def _turns(value: object) -> object:
    """A conversation; a question by itself is its only turn."""
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or len(value) % 2 == 0:
        raise ValueError(
            "it must be a text, or a list of texts in which user and assistant take turns and the "
            "user has the last word"
        )
    if any(isinstance(one, str) and not one.strip() for one in value):
        raise ValueError("it must not be blank")
    return value


_Turns = Annotated[list[str], BeforeValidator(_turns)]


class _Row(BaseModel):
    """What all formats have in common."""

    model_config = ConfigDict(extra="ignore")

    question: _Turns
    answer: str | list[str] | None = None
    answers: str | list[str] | None = None
    answer_aliases: list[str] = []
    id: Name | None = None

    @property
    def rights(self) -> tuple[str, ...]:
        """Right answers and what else they are called, each once."""
        given = self.answers if self.answers is not None else self.answer
        listed = [given] if isinstance(given, str) else given or []
        every = [*listed, *self.answer_aliases]
        return tuple(dict.fromkeys(one for one in every if one.strip()))

    @abstractmethod
    def marked(self) -> list[tuple[Passage, bool]]:
        """Its passages, and whether each is a right one."""


_Number = Annotated[
    float | None, BeforeValidator(lambda one: float(one) if isinstance(one, str) else one)
]
"""DPR writes scores as strings."""


class _Given(BaseModel):
    model_config = ConfigDict(extra="ignore")

    text: str
    title: str | None = None
    score: _Number = None
    before: tuple[str, ...] = ()
    right: bool | None = None
    isgold: bool | None = None
    hasanswer: bool | None = None
    has_answer: bool | None = None

    @property
    def passage(self) -> Passage:
        """The entry as a passage."""
        return Passage(self.text, title=self.title or None, score=self.score, before=self.before)


class _Plain(_Row):
    passages: list[_Given]

    def marked(self) -> list[tuple[Passage, bool]]:
        return [(one.passage, bool(one.right)) for one in self.passages]


class _Contexts(_Row):
    ctxs: list[_Given]

    def marked(self) -> list[tuple[Passage, bool]]:
        gold = any(one.isgold for one in self.ctxs)
        return [
            (one.passage, bool(one.isgold if gold else one.hasanswer or one.has_answer))
            for one in self.ctxs
        ]


class _Columns(BaseModel):
    title: list[str]
    sentences: list[list[str]] = []


class _Facts(_Row):
    id: Name | None = Field(None, alias="_id")
    # The Hub has them as columns.
    context: list[tuple[str, list[str]]] | _Columns
    supporting_facts: list[tuple[str, int]] | _Columns

    @field_validator("context")
    @classmethod
    def _paired(
        cls, given: list[tuple[str, list[str]]] | _Columns
    ) -> list[tuple[str, list[str]]] | _Columns:
        if isinstance(given, _Columns) and len(given.title) != len(given.sentences):
            raise ValueError(
                f"it must have as many titles as lists of sentences, not {len(given.title)} and "
                f"{len(given.sentences)}"
            )
        return given

    def marked(self) -> list[tuple[Passage, bool]]:
        given, facts = self.context, self.supporting_facts
        if isinstance(given, _Columns):
            given = list(zip(given.title, given.sentences, strict=True))
        right = set(facts.title) if isinstance(facts, _Columns) else {title for title, _ in facts}
        return [
            (Passage(_paragraph(sentences), title=title), title in right)
            for title, sentences in given
        ]


def _paragraph(sentences: Sequence[str]) -> str:
    """Sentences as one text; HotpotQA's bring the blank between them, 2WikiMultihopQA's do not."""
    spaced = any(one[:1].isspace() for one in sentences[1:])
    return ("" if spaced else " ").join(sentences).strip()


class _Paragraph(BaseModel):
    title: str | None = None
    paragraph_text: str
    is_supporting: bool = False


class _Paragraphs(_Row):
    paragraphs: list[_Paragraph]

    def marked(self) -> list[tuple[Passage, bool]]:
        return [
            (Passage(one.paragraph_text, title=one.title), one.is_supporting)
            for one in self.paragraphs
        ]


_FORMATS: Mapping[str, type[_Row]] = {
    "passages": _Plain,
    "ctxs": _Contexts,
    "context": _Facts,
    "paragraphs": _Paragraphs,
}
"""Formats by the field that has the passages."""


class _Text(BaseModel):
    text: str


class _Asked(BaseModel):
    id: Name
    question: str
    answers: list[_Text] = []


class _Context(BaseModel):
    context: str
    qas: list[_Asked]


class _Article(BaseModel):
    title: str | None = None
    paragraphs: list[_Context]


class _Squad(BaseModel):
    data: list[_Article]

    def questions(self) -> Iterator[PassagesQuestion]:
        """Questions with an answer; their paragraph and those after it come first, in a ring."""
        keys = set[str]()
        for article in self.data:
            texts = [one.context for one in article.paragraphs]
            title = article.title and article.title.replace("_", " ")
            for at, paragraph in enumerate(article.paragraphs):
                ring = dict.fromkeys([*texts[at:], *texts[:at]])
                passages = tuple(Passage(text, title=title) for text in ring)
                for one in paragraph.qas:
                    answers = tuple(dict.fromkeys(a.text for a in one.answers if a.text.strip()))
                    if answers:
                        if not one.question.strip():
                            raise DataError(f"Question {one.id!r} is blank. Leave it out.")
                        right = (True, *[False] * (len(passages) - 1))
                        key = _own_key(one.id, one.id, keys)
                        yield PassagesQuestion(key, (one.question,), answers, passages, right)


def questions_of(source: SourceFile) -> Iterator[PassagesQuestion]:
    """The questions of a file, whichever of the formats it has.

    Raises:
        DataError: naming the place of what is wrong.
    """
    if _is_squad(source.text):
        yield from source.json(_Squad).questions()
        return
    keys = set[str]()
    for number, (place, row) in enumerate(source.records(dict[str, Any]), start=1):
        kind = next((kind for field, kind in _FORMATS.items() if field in row), None)
        if kind is None:
            raise DataError(
                f"{place}: The question brings no passages in its fields {shown([*row])}. Give it "
                f'"question", "answer" (or "answers") and one of the fields {", ".join(_FORMATS)}.'
            )
        read_row = validated(kind, json.dumps(row), place)
        marked = read_row.marked()
        if not read_row.rights or not marked:
            lacks = "passages" if read_row.rights else 'right answer in "answer" or "answers"'
            raise DataError(f"{place}: The question has no {lacks}. Add one, or leave it out.")
        key = _own_key(read_row.id, str(number), keys)
        passages, right = zip(*marked, strict=True)
        yield PassagesQuestion(key, tuple(read_row.question), read_row.rights, passages, right)


def _own_key(wanted: str | None, number: str, keys: set[str]) -> str:
    """What a file calls a question, if no other one is called so; else its number."""
    others = (f"{number}-{at}" for at in count(2))
    key = next(one for one in chain([wanted or number, number], others) if one not in keys)
    keys.add(key)
    return key


def _is_squad(text: str) -> bool:
    """Whether the file is one object with articles, and no JSON lines."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(whole.get("data"), list)
