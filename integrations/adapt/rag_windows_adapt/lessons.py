"""What a model learns from: passages that are read together, questions, and its own answers."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rag_windows import Passage, WindowedLM
from rag_windows.errors import InputError, LimitError
from rag_windows_retrievers import BM25Retriever

ASK = (
    "Write one question that this passage answers. Name what the question is about. Write only the "
    "question."
)
QUESTION_TOKENS, ANSWER_TOKENS = 40, 24

TOGETHER = 8
"""Lessons whose questions and answers are written in one batch."""

_ABOUT_ITSELF = re.compile(r"\b(passages?|questions?|texts?|documents?|articles?)\b", re.IGNORECASE)

Query = str | tuple[Mapping[str, str], ...]
"""A question, or the messages of a conversation that ends with one."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, and the model's own answer to it over the right passages alone.

    Attributes:
        right: indices of these among the lesson's passages.
        answer: token ids of the answer, with its end token.
        text: the answer.
    """

    question: Query
    right: tuple[int, ...]
    answer: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Lesson:
    """Passages as a retriever would find them together, and questions about them."""

    passages: tuple[Passage, ...]
    asked: tuple[Asked, ...]


@dataclass(frozen=True, slots=True)
class Marked:
    """A question that somebody asked, with its passages and whether each is a right one."""

    question: Query
    passages: tuple[Passage, ...]
    right: tuple[bool, ...]


class Teacher:
    """The model, which answers from the right passages alone, and asks about passages.

    What it wrote goes into a file, from which the same comes at the next start.

    Args:
        lm: the model.
        file: of questions and answers (JSONL), made where there is none; None for none.
        instruction: system prompt of answers.
    """

    def __init__(self, lm: WindowedLM, file: Path | None, *, instruction: str | None) -> None:
        self._lm, self._file, self._instruction = lm, file, instruction
        self._asked: dict[str, Asked | None] = {}
        if file is not None and file.exists():
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                self._take(line, f"{file}, line {number}")

    def _take(self, line: str, where: str) -> None:
        try:
            one = json.loads(line)
            question = one["question"]
            if isinstance(question, list):
                question = tuple(question)
            asked = question and Asked(question, (0,), (*one["ids"],), one["answer"])
            self._asked[one["passage"]] = asked
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{where} can't be read: {error!r}. Delete the line, or the file to have all "
                "questions written again."
            ) from error

    def about(self, passages: Sequence[Passage]) -> list[Asked | None]:
        """A question for each passage; None where the model asks nothing that can be used."""
        names = [_name([one]) for one in passages]
        new = {
            name: one for name, one in zip(names, passages, strict=True) if name not in self._asked
        }
        if new:
            texts = self._generate([(ASK, [one]) for one in new.values()], QUESTION_TOKENS, None)
            questions = [None if one is None else question_in(one.text) for one in texts]
            pairs = {
                name: (question, [new[name]])
                for name, question in zip(new, questions, strict=True)
                if question is not None
            }
            self._answer(pairs, nothing=new.keys() - pairs.keys())
        return [self._asked[name] for name in names]

    def over(self, asked: Sequence[tuple[Query, Sequence[Passage]]]) -> list[Asked | None]:
        """The answer to each question over its right passages.

        None where it is empty, or where these are too long for the model.
        """
        names = [_name(passages, question) for question, passages in asked]
        pairs = {
            name: pair for name, pair in zip(names, asked, strict=True) if name not in self._asked
        }
        self._answer(pairs)
        return [self._asked[name] for name in names]

    def _answer(
        self,
        pairs: Mapping[str, tuple[Query, Sequence[Passage]]],
        nothing: Iterable[str] = (),
    ) -> None:
        answers = self._generate([*pairs.values()], ANSWER_TOKENS, self._instruction)
        made: dict[str, Asked | None] = dict.fromkeys([*sorted(nothing), *pairs])
        for (name, (question, _)), answer in zip(pairs.items(), answers, strict=True):
            if answer is not None and answer.text.strip():
                made[name] = Asked(question, (0,), answer.token_ids, answer.text.strip())
        self._asked |= made
        if self._file is not None and made:
            with self._file.open("a", encoding="utf-8") as file:
                for name, one in made.items():
                    line: dict[str, Any] = {"passage": name, "question": None}
                    if one is not None:
                        line |= {"question": one.question, "answer": one.text, "ids": one.answer}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _generate(
        self, asked: Sequence[tuple[Query, Sequence[Passage]]], tokens: int, prefix: str | None
    ) -> list[Any]:
        requests = [
            {
                "query": query if isinstance(query, str) else list(query),
                "passages": list(passages),
                "prefix": prefix,
                "method": "sequential",
                "max_new_tokens": tokens,
                "citations": False,
                "do_sample": False,
            }
            for query, passages in asked
        ]
        made: list[Any] = []
        try:
            made = self._lm.generate_batch(requests) if requests else []
        except LimitError:
            for request in requests:
                try:
                    made += self._lm.generate_batch([request])
                except LimitError:
                    made.append(None)
        if any(one is not None and one.reasoning for one in made):
            raise InputError(
                "The model writes reasoning before its answers, which it would learn from. Switch "
                "that off, as with --template-option enable_thinking=false."
            )
        return made


class OwnLessons:
    """Passages that a retriever would find together, with a question of the model about each.

    Those of a lesson are what the words of the first one's question find, so that they resemble
    each other, or any others where that is too few. There is no end of lessons.

    Args:
        teacher: asks and answers.
        first: passages, each the first of a lesson in turn.
        others: among which the words of a question look.
        count: passages of a lesson.
        seed: of the order.
    """

    def __init__(
        self,
        teacher: Teacher,
        first: Iterable[Passage],
        others: Sequence[Passage],
        *,
        count: int,
        seed: int,
    ) -> None:
        self._teacher, self._first, self._count, self._seed = teacher, list(first), count, seed
        self._others, self._retriever = list(others), BM25Retriever(others)

    def __iter__(self) -> Iterator[Lesson]:
        return _rounds(
            self._first,
            self._together,
            self._seed,
            InputError(
                "The model asks nothing about these passages that could be used: what it writes "
                "does not end with a question mark, or is about the passage itself. Take a larger "
                "model, or one that follows instructions."
            ),
        )

    def held_out(self) -> Iterator[Lesson]:
        """One lesson for each first passage, which alone is asked about."""
        draw = random.Random(self._seed)
        for first, own in zip(self._first, self._teacher.about(self._first), strict=True):
            if own is not None:
                passages = self._found(first, own, draw)
                draw.shuffle(passages)
                place = [_name([one]) for one in passages].index(_name([first]))
                yield Lesson(tuple(passages), (replace(own, right=(place,)),))

    def _found(self, first: Passage, own: Asked, draw: random.Random) -> list[Passage]:
        found = self._retriever.retrieve(str(own.question), self._count + 1)
        # Words that no other passage has find none.
        more = draw.sample(self._others, min(len(self._others), 2 * self._count))
        return list({_name([one]): one for one in [first, *found, *more]}.values())[: self._count]

    def _together(self, firsts: Sequence[Passage], draw: random.Random) -> Iterator[Lesson]:
        pairs = zip(firsts, self._teacher.about(firsts), strict=True)
        lessons = [self._found(first, own, draw) for first, own in pairs if own is not None]
        self._teacher.about([one for lesson in lessons for one in lesson])
        for passages in lessons:
            draw.shuffle(passages)
            asked = [
                replace(one, right=(place,))
                for place, one in enumerate(self._teacher.about(passages))
                if one is not None
            ]
            yield Lesson(tuple(passages), tuple(asked))


class MarkedLessons:
    """Questions that people asked, each with its right passages and some of the others.

    Which others is drawn anew each time that a question comes again. There is no end of lessons.

    Args:
        teacher: answers.
        questions: with a right passage at least.
        count: passages of a lesson, or its right ones where those are more.
        seed: of order and draws.
    """

    def __init__(
        self, teacher: Teacher, questions: Sequence[Marked], *, count: int, seed: int
    ) -> None:
        self._teacher, self._questions, self._count = teacher, list(questions), count
        self._seed = seed

    def __iter__(self) -> Iterator[Lesson]:
        return _rounds(
            self._questions,
            self._together,
            self._seed,
            InputError("The model answers none of these questions. Take other questions."),
        )

    def _together(self, questions: Sequence[Marked], draw: random.Random) -> Iterator[Lesson]:
        split = []
        for one in questions:
            pairs = [*zip(one.passages, one.right, strict=True)]
            right = [passage for passage, is_right in pairs if is_right]
            split.append((right, [passage for passage, is_right in pairs if not is_right]))
        answers = self._teacher.over(
            [(one.question, right) for one, (right, _) in zip(questions, split, strict=True)]
        )
        for asked, (right, others) in zip(answers, split, strict=True):
            if asked is None:
                continue
            some = draw.sample(others, min(len(others), max(0, self._count - len(right))))
            places = [*range(len(right) + len(some))]
            draw.shuffle(places)
            every = [*right, *some]
            passages = tuple(every[place] for place in places)
            # In the order in which the teacher read them.
            found = tuple(places.index(place) for place in range(len(right)))
            yield Lesson(passages, (replace(asked, right=found),))


T = TypeVar("T")


def _rounds(
    given: Sequence[T],
    together: Callable[[Sequence[T], random.Random], Iterator[Lesson]],
    seed: int,
    nothing: InputError,
) -> Iterator[Lesson]:
    """Lessons of all that is given, in an order drawn anew each time that it comes round.

    Raises:
        InputError: ``nothing``, where no lesson comes of it.
    """
    draw = random.Random(seed)
    while True:
        order = list(given)
        draw.shuffle(order)
        some = False
        for begin in range(0, len(order), TOGETHER):
            for lesson in together(order[begin : begin + TOGETHER], draw):
                some = True
                yield lesson
        if not some:
            raise nothing


def question_in(text: str) -> str | None:
    """The question that a model wrote, if it is one and not about the passage itself."""
    first = text.strip().partition("\n")[0].strip().strip('"')
    if not first.endswith("?") or _ABOUT_ITSELF.search(first) or len(first.split()) < 4:
        return None
    return first


def _name(passages: Sequence[Passage], question: Query | None = None) -> str:
    """The same for the same question over passages that make equal windows."""
    parts = [[one.title or "", one.text] for one in passages]
    text = json.dumps([parts, question])
    return hashlib.sha256(text.encode()).hexdigest()[:32]
