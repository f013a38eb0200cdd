"""What a model learns from: passages that are read together, and its own questions and answers."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rag_windows import Passage, WindowedLM
from rag_windows.errors import InputError
from rag_windows_retrievers import BM25Retriever

ASK = (
    "Write one question that this passage answers. Name what the question is about. Write only the "
    "question."
)
QUESTION_TOKENS, ANSWER_TOKENS = 40, 24

TOGETHER = 8
"""Lessons whose questions are written in one batch."""

LEAST_PASSAGES = 40
"""Fewer hold too few passages that resemble each other."""

_ABOUT_ITSELF = re.compile(r"\b(passages?|questions?|texts?|documents?|articles?)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, and the model's own answer to it over the right passages alone.

    Attributes:
        right: indices of these among the lesson's passages.
        answer: token ids of the answer, with its end token.
        text: the answer.
    """

    question: str
    right: tuple[int, ...]
    answer: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Lesson:
    """Passages as a retriever would find them together, and questions about them."""

    passages: tuple[Passage, ...]
    asked: tuple[Asked, ...]


class OwnQuestions:
    """The model asks about each passage, and answers from that passage alone.

    What it asked is written into a file, from which the same questions come at the next start.

    Args:
        lm: the model.
        file: of questions (JSONL), made where there is none; None for none.
        instruction: system prompt of answers.
        seed: of questions.
    """

    def __init__(
        self, lm: WindowedLM, file: Path | None, *, instruction: str | None, seed: int = 0
    ) -> None:
        self._lm, self._file, self._instruction, self._seed = lm, file, instruction, seed
        self._asked: dict[str, Asked | None] = {}
        if file is not None and file.exists():
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                self._take(line, f"{file}, line {number}")

    def _take(self, line: str, where: str) -> None:
        try:
            one = json.loads(line)
            asked = one["question"] and Asked(one["question"], (0,), (*one["ids"],), one["answer"])
            self._asked[one["passage"]] = asked
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{where} can't be read: {error!r}. Delete the line, or the file to have all "
                "questions written again."
            ) from error

    def about(self, passages: Sequence[Passage]) -> list[Asked | None]:
        """A question for each passage; None where the model asks nothing that can be used."""
        names = [_name(one) for one in passages]
        new = {
            name: one for name, one in zip(names, passages, strict=True) if name not in self._asked
        }
        if new:
            self._ask(new)
        return [self._asked[name] for name in names]

    def _ask(self, new: dict[str, Passage]) -> None:
        texts = self._generate([(ASK, one) for one in new.values()], QUESTION_TOKENS, None)
        questions = {name: question_in(one.text) for name, one in zip(new, texts, strict=True)}
        kept = [(name, asked) for name, asked in questions.items() if asked is not None]
        pairs = [(asked, new[name]) for name, asked in kept]
        answers = self._generate(pairs, ANSWER_TOKENS, self._instruction)
        made: dict[str, Asked | None] = dict.fromkeys(new)
        for (name, asked), answer in zip(kept, answers, strict=True):
            if answer.text.strip():
                made[name] = Asked(asked, (0,), answer.token_ids, answer.text.strip())
        self._asked |= made
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                for name, one in made.items():
                    line: dict[str, Any] = {"passage": name, "question": None}
                    if one is not None:
                        line |= {"question": one.question, "answer": one.text, "ids": one.answer}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _generate(
        self, asked: Sequence[tuple[str, Passage]], tokens: int, prefix: str | None
    ) -> list[Any]:
        requests = [
            {
                "query": query,
                "passages": [passage],
                "prefix": prefix,
                "method": "sequential",
                "max_new_tokens": tokens,
                "citations": False,
                "do_sample": False,
            }
            for query, passage in asked
        ]
        made = self._lm.generate_batch(requests) if requests else []
        if any(one.reasoning for one in made):
            raise InputError(
                "The model writes reasoning before its answers, which it would learn from. Switch "
                "that off, as with --template-option enable_thinking=false."
            )
        return made


class Lessons:
    """Passages that a retriever would find together, with a question about each, without end.

    Those of a lesson are what the words of the first one's question find, so that they resemble
    each other, or any others where that is too few.

    Args:
        own: the model's questions.
        first: passages, each the first of a lesson in turn.
        others: among which the words of a question look.
        count: passages of a lesson.
        seed: of the order.
    """

    def __init__(
        self,
        own: OwnQuestions,
        first: Iterable[Passage],
        others: Sequence[Passage],
        *,
        count: int,
        seed: int,
    ) -> None:
        self._own, self._first, self._count, self._seed = own, list(first), count, seed
        self._others, self._retriever = list(others), BM25Retriever(others)

    def __iter__(self) -> Iterator[Lesson]:
        draw = random.Random(self._seed)
        while True:
            order = list(self._first)
            draw.shuffle(order)
            some = False
            for begin in range(0, len(order), TOGETHER):
                for lesson in self._together(order[begin : begin + TOGETHER], draw):
                    some = True
                    yield lesson
            if not some:
                raise InputError(
                    "The model asks nothing about these passages that could be used: its "
                    "questions are no sentences with a question mark, or they are about the "
                    "passage itself. Take a larger model, or one that follows instructions."
                )

    def held_out(self) -> Iterator[Lesson]:
        """One lesson for each first passage, which alone is asked about."""
        draw = random.Random(self._seed)
        for first, own in zip(self._first, self._own.about(self._first), strict=True):
            if own is not None:
                passages = self._found(first, own, draw)
                draw.shuffle(passages)
                place = [_name(one) for one in passages].index(_name(first))
                yield Lesson(tuple(passages), (replace(own, right=(place,)),))

    def _found(self, first: Passage, own: Asked, draw: random.Random) -> list[Passage]:
        found = self._retriever.retrieve(own.question, self._count + 1)
        # Words that no other passage has find none.
        more = draw.sample(self._others, min(len(self._others), 2 * self._count))
        return list({_name(one): one for one in [first, *found, *more]}.values())[: self._count]

    def _together(self, firsts: Sequence[Passage], draw: random.Random) -> Iterator[Lesson]:
        pairs = zip(firsts, self._own.about(firsts), strict=True)
        lessons = [self._found(first, own, draw) for first, own in pairs if own is not None]
        self._own.about([one for lesson in lessons for one in lesson])
        for passages in lessons:
            draw.shuffle(passages)
            asked = [
                replace(one, right=(place,))
                for place, one in enumerate(self._own.about(passages))
                if one is not None
            ]
            yield Lesson(tuple(passages), tuple(asked))


def question_in(text: str) -> str | None:
    """The question that a model wrote, if it is one and not about the passage itself."""
    first = text.strip().partition("\n")[0].strip().strip('"')
    if not first.endswith("?") or _ABOUT_ITSELF.search(first) or len(first.split()) < 4:
        return None
    return first


def _name(passage: Passage) -> str:
    """The same for passages that make equal windows."""
    text = f"{passage.title or ''}\0{passage.text}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
