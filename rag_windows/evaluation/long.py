"""A needle among passages: how many there are and where it stands, swept."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, model_validator

from rag_windows import Passage
from rag_windows.errors import InputError
from rag_windows.evaluation.files import Keys, read
from rag_windows.evaluation.metrics import contained, exact_match
from rag_windows.evaluation.record import Record, digest_of
from rag_windows.evaluation.task import Example, Reference, Score
from rag_windows.samples import samples_path

INVENTED_PREFIX = (
    "Answer the question from the passages. Give the number alone, without other words."
)

_QUESTIONS = 10
_TRIES = 1000
_STARTS = (
    "Bel Cor Dra Fen Gal Hes Jor Kel Lum Mar Nor Pol Quin Ros Sel Tam Ul Var Wen Yor Zim"
).split()
_ENDS = (
    "ador bin cott dane ewick fara gorn hold ina jeth kris lund mira nix oway pry rell sen tova"
).split()


@dataclass(frozen=True, slots=True)
class Cell:
    """One number of passages with one place of the needle.

    Attributes:
        size: passages in all.
        index: the needle's, from 0.
        depth: where it was to stand, from 0 (first) to 1 (last); None for a single passage, which
            stands everywhere.
    """

    size: int
    index: int
    depth: float | None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Labels by which results are broken down."""
        if self.depth is None:
            return ("1 passage",)
        return (f"{self.size} passages", f"position {self.depth:.0%}")


def grid(sizes: Sequence[int], depths: Sequence[float]) -> tuple[Cell, ...]:
    """All cells, by size and then by place.

    Where two depths mean the same place, as 50% and 75% do among two passages, the nearer one
    names it.

    Raises:
        InputError: no size or depth, one of them twice, or one out of range.
    """
    for name, values in (("numbers of passages", sizes), ("positions", depths)):
        if not values or len(set(values)) < len(values):
            raise InputError(f"{name} must be different, and at least one: not {list(values)}.")
    if min(sizes) < 1:
        raise InputError(f"At least 1 passage is read, not {min(sizes)}.")
    wrong = next((one for one in depths if not 0 <= one <= 1), None)
    if wrong is not None:
        raise InputError(f"A position is between 0 (first) and 1 (last), not {wrong}.")
    cells = []
    for size in sorted(sizes):
        last = size - 1
        nearest: dict[int, float] = {}
        for depth in sorted(depths):
            # Halves go up, unlike round(), so that steps stay even.
            index = int(depth * last + 0.5)
            known = nearest.get(index)
            if known is None or abs(depth - index / last) < abs(known - index / last):
                nearest[index] = depth
            if not last:
                break
        places = sorted(nearest.items()) if last else [(0, None)]
        cells += [Cell(size, index, depth) for index, depth in places]
    return tuple(cells)


@dataclass(frozen=True, slots=True)
class LongOptions:
    """The sweep.

    Attributes:
        sizes: numbers of passages, the needle's included.
        depths: where it stands among them, from 0 (first) to 1 (last).
        questions: asked in each cell, the same ones. None: all of a file, else ten.
        seed: of the draw of questions and haystacks.
        passage_words: about how long a passage of a folder's texts is.

    Raises:
        InputError: see `grid`; or no questions.
    """

    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    questions: int | None = None
    seed: int = 0
    passage_words: int = 100

    def __post_init__(self) -> None:
        grid(self.sizes, self.depths)
        if self.questions is not None and self.questions < 1:
            raise InputError(f"At least 1 question is asked in each cell, not {self.questions}.")

    @property
    def most(self) -> int:
        """Passages of a haystack at most."""
        return max(self.sizes) - 1


@dataclass(frozen=True, slots=True)
class Needle:
    """A question with its passage among others.

    Attributes:
        key: unique in its source.
        question: what is asked.
        answers: any of them is right.
        passage: the one that answers it.
        haystack: others, of which the first are read; none has the needle's text.
    """

    key: str
    question: str
    answers: tuple[str, ...]
    passage: Passage
    haystack: tuple[Passage, ...]


@dataclass(frozen=True, slots=True)
class Needles:
    """What a sweep asks.

    Attributes:
        source: name of where they come from.
        needles: each with at least as many others as the sweep reads.
        stamp: what a manifest keeps of the source. JSON.
        prefix: an instruction that suits them, or None.
    """

    source: str
    needles: tuple[Needle, ...]
    stamp: dict[str, object]
    prefix: str | None = None


def _others(
    pool: Sequence[Passage], count: int, seed: str, fits: Callable[[Passage], bool]
) -> tuple[Passage, ...]:
    """So many passages of a pool, drawn by a seed, in the order of the draw; or fewer.

    The first n of them are the same whatever the count is. Of equal texts only one is drawn, since
    the engine reads them once.
    """
    made: dict[str, Passage] = {}
    for index in random.Random(seed).sample(range(len(pool)), len(pool)):
        if len(made) == count:
            break
        if fits(pool[index]):
            made.setdefault(pool[index].text, pool[index])
    return tuple(made.values())


def _apart_from(text: str) -> Callable[[Passage], bool]:
    return lambda passage: passage.text != text


def _pool_stamp(pool: Sequence[Passage]) -> dict[str, object]:
    made = hashlib.sha256()
    for one in pool:
        made.update(json.dumps([one.title, one.text]).encode())
    return {"passages": len(pool), "sha256": made.hexdigest()}


def sample_needles(count: int, most: int, seed: int) -> Needles:
    """Questions about entries of the shipped sample corpus, whose names the shipped reader knows.

    The haystack is made of other entries that never name what the question is about.

    Args:
        count: of questions.
        most: passages of a haystack at most.
        seed: of the draw.

    Raises:
        InputError: the samples have fewer questions.
    """
    folder, corpus = samples_path(), {}
    for path in sorted((folder / "corpus").glob("*.md")):
        heading, _, text = path.read_text(encoding="utf-8").partition("\n")
        corpus[path.name] = Passage(text.strip(), path.name, heading.removeprefix("#").strip())
    lines = (folder / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [row for row in map(json.loads, lines) if row["task"] == "single"]
    if count > len(asked):
        raise InputError(f"The samples have {len(asked)} questions, not {count}; ask fewer.")
    pool, needles = tuple(corpus.values()), []
    for row in (asked[index] for index in random.Random(seed).sample(range(len(asked)), count)):

        def silent(passage: Passage, title: str = row["title"]) -> bool:
            return title not in f"{passage.title} {passage.text}"

        document = row["document"]
        hay = _others(pool, most, f"{seed}/{document}", silent)
        key, answers = document.removesuffix(".md"), (row["answer"],)
        needles.append(Needle(key, row["question"], answers, corpus[document], hay))
    return Needles("samples", tuple(needles), {"samples": _pool_stamp(pool)["sha256"]})


def invented_needles(
    pool: Sequence[Passage], source: str, count: int, most: int, seed: int
) -> Needles:
    """A sentence such as "The secret number of Kelnix Tambin is 48213." in a passage of the pool.

    It stands between two sentences near the middle of its passage. Neither its name nor its number
    occurs in the pool.

    Args:
        pool: passages to hide it in and among.
        source: name of the pool.
        count: of needles.
        most: passages of a haystack at most.
        seed: of the draw.

    Raises:
        InputError: the pool is empty, or holds every number there is.
    """
    if not pool:
        raise InputError(f"{source} holds no passages to hide anything in.")
    rng = random.Random(seed)
    known = {word for one in pool for word in re.findall(r"\w+", one.text)}
    made = []
    for number in range(1, count + 1):
        for _ in range(_TRIES):
            names = [rng.choice(_STARTS) + rng.choice(_ENDS) for _ in range(2)]
            drawn = {*names, code := str(rng.randrange(10_000, 100_000))}
            if len(drawn - known) == 3:
                break
        else:
            raise InputError("No name or number is left to invent; ask fewer questions.")
        known |= drawn
        name = " ".join(names)
        around = pool[rng.randrange(len(pool))]
        text = _inserted(around.text, f"The secret number of {name} is {code}.")
        hay = _others(pool, most, f"{seed}/{number}", _apart_from(around.text))
        needle = replace(around, text=text, id=f"needle {number}")
        question = f"What is the secret number of {name}?"
        made.append(Needle(str(number), question, (code,), needle, hay))
    return Needles(source, tuple(made), {"texts": source, **_pool_stamp(pool)}, INVENTED_PREFIX)


def _inserted(text: str, sentence: str) -> str:
    """The sentence behind the end of a sentence near the middle of the text, or behind the text."""
    ends = [match.end() for match in re.finditer(r"[.!?]\s+", text)]
    if not ends:
        return f"{text.rstrip()} {sentence}"
    at = min(ends, key=lambda end: abs(end - len(text) / 2))
    return f"{text[:at]}{sentence} {text[at:]}"


class _Hay(BaseModel):
    """A passage of a file: a text, or an object."""

    text: str
    id: str | None = None
    title: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return {"text": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _filled(self) -> _Hay:
        if not self.text.strip():
            raise ValueError("a passage is blank; fill it in, or take it out")
        return self

    def made(self, name: str) -> Passage:
        return Passage(self.text, self.id or name, self.title)


class _Line(BaseModel):
    id: str | int | None = None
    question: str
    answers: Annotated[list[str], Field(min_length=1)]
    needle: _Hay
    haystack: list[_Hay] | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_answer(cls, value: Any) -> Any:
        if isinstance(value, dict) and "answers" not in value and "answer" in value:
            return {**value, "answers": [value["answer"]]}
        return value

    @model_validator(mode="after")
    def _whole(self) -> _Line:
        if not all(one.strip() for one in (self.question, *self.answers)):
            raise ValueError("the question or an answer is blank; fill it in")
        texts = [self.needle.text, *(one.text for one in self.haystack or ())]
        if twice := next((i for i, one in enumerate(texts) if one in texts[:i]), None):
            twin = texts.index(texts[twice])
            told = f"entry {twin}" if twin else "the needle"
            raise ValueError(f'entry {twice} of "haystack" equals {told}; take it out')
        return self


def file_needles(
    path: Path, pool: Sequence[Passage] | None, count: int | None, most: int, seed: int
) -> Needles:
    """Needles of JSON lines: ``{"question", "answers" or "answer", "needle"}``.

    A needle is a text, or an object with "text" and perhaps "id" and "title". "haystack" is a list
    of such, read in its order; lines without one are hidden among the pool, and without a pool
    among the needles of the other lines. "id" is any name.

    Args:
        path: of the file.
        pool: passages to hide in, or None.
        count: of lines, the first ones; None for all.
        most: passages of a haystack at most.
        seed: of the draw from the pool.

    Raises:
        DataError: naming file, line and field.
    """
    source, keys = read(path), Keys()
    lines = []
    for place, line in source.records(_Line):
        key = keys.take(line.id, place)
        lines.append((key, line, line.needle.made(f"needle {key}")))
    if not lines:
        raise source.place.error("it holds no questions.")
    hidden_in = [needle for _, _, needle in lines] if pool is None else pool
    needles = []
    for key, line, needle in lines[:count]:
        if line.haystack is None:
            hay = _others(hidden_in, most, f"{seed}/{key}", _apart_from(needle.text))
        else:
            hay = tuple(one.made(f"{key}/{i}") for i, one in enumerate(line.haystack, 1))[:most]
        needles.append(Needle(key, line.question, tuple(line.answers), needle, hay))
    stamp: dict[str, object] = {"needles": source.stamp}
    if pool is not None:
        stamp["haystack"] = _pool_stamp(pool)
    return Needles(path.stem, tuple(needles), stamp)


class LongTask:
    """The same questions in every cell, over nested haystacks.

    A question's haystack of 16 passages begins with its haystack of 8, in the same order, and only
    the needle changes its place: cells are compared in pairs, and windows of one are those of
    another. All cells of a question come one after the other. Methods that give every window the
    same positions can't tell places apart, by design; the sequential one can.

    Args:
        needles: questions with their passages.
        options: the sweep.

    Raises:
        InputError: a haystack that is too small for the largest size.
    """

    pool: Sequence[Passage] | None = None
    max_new_tokens = 32
    metrics: tuple[str, ...] = ("contained", "exact_match", "needle_most_read")

    def __init__(self, needles: Needles, options: LongOptions) -> None:
        self.needles = needles
        self.options = options
        self.name = f"long/{needles.source}"
        self.prefix = needles.prefix
        short = next((one for one in needles.needles if len(one.haystack) < options.most), None)
        if short is not None:
            raise InputError(
                f"{options.most + 1} passages need {options.most} beside the needle, and question "
                f"{short.key!r} of {needles.source} has {len(short.haystack)}. Ask for smaller "
                "numbers, or give more texts."
            )

    @classmethod
    def open(
        cls,
        task: Path | None = None,
        *,
        haystack: Path | None = None,
        options: LongOptions | None = None,
    ) -> Self:
        """A sweep over the shipped samples, over a folder of texts, or of a file's questions.

        Args:
            task: a file; see `file_needles`. None: needles are made here.
            haystack: a folder of texts to hide the needles in; None: the file's own passages, or
                those of the shipped samples.
            options: the sweep.

        Raises:
            DataError: naming file, line and field.
            DocumentError: there are no texts in the folder.
            InputError: too few passages.
        """
        options = options or LongOptions()
        most, seed, count = options.most, options.seed, options.questions or _QUESTIONS
        pool = None
        if haystack is not None:
            from rag_windows_retrievers import load_documents, split_documents

            words = options.passage_words
            if words < 1:
                raise InputError(f"A passage has at least 1 word, not {words}.")
            documents = load_documents([haystack], root=haystack).documents
            pool = tuple(split_documents(documents, words=words))
        if task is not None:
            needles = file_needles(task, pool, options.questions, most, seed)
        elif pool is not None and haystack is not None:
            needles = invented_needles(pool, haystack.resolve().name, count, most, seed)
        else:
            needles = sample_needles(count, most, seed)
        return cls(needles, options)

    @cached_property
    def examples(self) -> tuple[Example, ...]:
        """Question by question, each in all cells."""
        cells = grid(self.options.sizes, self.options.depths)
        return tuple(_example(needle, cell) for needle in self.needles.needles for cell in cells)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The source's digest, and the sweep."""
        return {
            "data": dict(self.needles.stamp),
            "sizes": list(self.options.sizes),
            "depths": list(self.options.depths),
            "questions": len(self.needles.needles),
            "seed": self.options.seed,
            "passage_words": self.options.passage_words,
        }

    def scores(self, examples: Sequence[Example], records: Sequence[Record]) -> list[Score]:
        """Score one arm's records, one an example in the same order.

        "needle_most_read" are answers during which the needle got more attention than any other
        passage; it counts those whose attention was measured. A needle that was left out was not
        read, and a single passage is always the most read one.
        """
        answers = [one.answer for one in records]
        most_read: list[float | None] = []
        for example, record in zip(examples, records, strict=True):
            measured = [(one.mass, one.text) for one in record.passages if one.mass is not None]
            _, text = max(measured, key=lambda pair: pair[0], default=(None, None))
            most_read.append(100.0 * (text == example.details["needle"]) if measured else None)
        return [
            contained(examples, answers),
            exact_match(examples, answers),
            Score.mean("needle_most_read", most_read),
        ]


def _example(needle: Needle, cell: Cell) -> Example:
    hay = needle.haystack[: cell.size - 1]
    return Example(
        key=f"{needle.key}/{cell.size}/{cell.index}",
        messages=({"role": "user", "content": needle.question},),
        references=tuple(Reference(answer) for answer in needle.answers),
        group=needle.key,
        kinds=cell.kinds,
        passages=(*hay[: cell.index], needle.passage, *hay[cell.index :]),
        details={
            "size": cell.size,
            "depth": cell.depth,
            "index": cell.index,
            "needle": digest_of(needle.passage.text),
        },
    )
