"""A needle among passages: how many there are and where it stands, swept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from rag_windows.errors import InputError
from rag_windows.evaluation.example import Example, Reference
from rag_windows.evaluation.long.grid import Cell, grid
from rag_windows.evaluation.long.invented import folder_passages, invented_needles
from rag_windows.evaluation.long.lines import file_needles
from rag_windows.evaluation.long.needle import Needle, Needles
from rag_windows.evaluation.long.samples import sample_needles
from rag_windows.evaluation.long.scoring import CellScore, cells, most_read
from rag_windows.evaluation.record import Record
from rag_windows.evaluation.scores.exact import contained, exact_match
from rag_windows.evaluation.task import Score
from rag_windows.evaluation.texts import digest_of
from rag_windows.passage import Passage

_QUESTIONS = 10


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
    def cells(self) -> tuple[Cell, ...]:
        """What is swept."""
        return grid(self.sizes, self.depths)


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
        wanted = max(options.sizes) - 1
        short = next((one for one in needles.needles if len(one.haystack) < wanted), None)
        if short is not None:
            raise InputError(
                f"{max(options.sizes)} passages need {wanted} beside the needle, and question "
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
        most, seed = max(options.sizes) - 1, options.seed
        count = options.questions or _QUESTIONS
        pool = None if haystack is None else folder_passages(haystack, options.passage_words)
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
        return tuple(
            _example(needle, cell) for needle in self.needles.needles for cell in self.options.cells
        )

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
        """Score one arm's records, one an example in the same order."""
        answers = [one.answer for one in records]
        return [
            contained(examples, answers),
            exact_match(examples, answers),
            most_read(examples, records),
        ]

    def cells(self, examples: Sequence[Example], records: Sequence[Record]) -> list[CellScore]:
        """The same for each number of passages and place of the needle."""
        return cells(examples, records)


def _example(needle: Needle, cell: Cell) -> Example:
    hay = needle.haystack[: cell.size - 1]
    return Example(
        key=f"{needle.key}/{cell.key}",
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
