"""What is done already, line by line, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rag_windows.errors import DataError
from rag_windows.evaluation.lines import JsonLines


@dataclass(frozen=True, slots=True)
class Cell:
    """One method's answers to the questions of a task over a number of passages.

    Attributes:
        model: its name.
        task: one of the page's tasks.
        passages: of each context.
        label: of the method.
        method: the method with its numbers, in full.
        right: a string a context, ``1`` where an answer is right as a whole, else ``0``.
        value: the same for the value behind the right steps; for most tasks the same.
        cited: the same for right answers whose most attended passage holds the answer; ``-`` where
            the answer is wrong; empty where it was not measured.
        blind: mean chance of a reader that knows the relation, but not whom it is asked about.
        encode_s: seconds that encoding for this method took, all contexts together; None where
            windows encoded for another method were read.
        read_s: seconds for reading all questions.
    """

    model: str
    task: str
    passages: int
    label: str
    method: str
    right: tuple[str, ...]
    value: tuple[str, ...]
    cited: tuple[str, ...]
    blind: float
    encode_s: float | None
    read_s: float

    @property
    def questions(self) -> int:
        """How many were asked."""
        return sum(map(len, self.right))


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds a question by ``WindowedLM.generate``, with nothing kept between questions.

    Attributes:
        encode_s: per question, what comes before the first token is asked for.
        answer_s: per question, from there to the end of the answer.
        agreed: questions on which it was right exactly where one pass over the answer said so.
    """

    model: str
    passages: int
    label: str
    method: str
    encode_s: tuple[float, ...]
    answer_s: tuple[float, ...]
    agreed: int


@dataclass(frozen=True, slots=True)
class Choice:
    """What calibration found for a model.

    Attributes:
        description: the best setting as JSON, see `rag_windows.methods.describe`.
        adopted: whether a user of calibration would get it rather than the default.
        verdict: calibration's own sentence.
        examples: how many it saw.
        seconds: that it took.
    """

    model: str
    description: str
    adopted: bool
    verdict: str
    examples: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the command that added something.

    Attributes:
        seconds: wall clock.
        jobs: processes, of one thread each.
        machine: in words.
    """

    seconds: float
    jobs: int
    machine: str


Record = Cell | Cost | Choice | Run
_KINDS: dict[str, type[Record]] = {
    kind.__name__.lower(): kind for kind in (Cell, Cost, Choice, Run)
}


class JournalError(RuntimeError):
    """A journal of other settings, or one that can't be read."""


class Journal:
    """A JSONL file: the run's settings, then a line a record.

    Args:
        path: made if it does not exist.
        settings: what the records depend on; a file of others is refused.

    Raises:
        JournalError: the file was written under other settings, or holds something else.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._lines = JsonLines(path)
        self.records: list[Record] = []
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lines.append({"settings": settings})
            return
        try:
            lines = [line for _, line in self._lines]
            self._lines.repair()
        except DataError as error:
            raise JournalError(str(error)) from error
        # Through JSON, so that tuples and lists are the same.
        if not lines or lines[0].get("settings") != json.loads(json.dumps(settings)):
            raise JournalError(
                f"{path} holds a run of other settings (or other weights): name another --journal, "
                "or begin anew with --fresh."
            )
        self.records = [_record(line) for line in lines[1:]]

    def add(self, record: Record) -> None:
        """Keep a record."""
        self.records.append(record)
        self._lines.append({"kind": type(record).__name__.lower(), **asdict(record)})


def _record(line: dict[str, Any]) -> Record:
    kind = _KINDS[line.pop("kind")]
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in line.items()}
    return kind(**values)
