"""Predictions as ChatRAG-Bench's own script reads them: a line an answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rag_windows.evaluation.data.fields import Place
from rag_windows.evaluation.data.reading import read_text
from rag_windows.evaluation.data.writing import write_whole
from rag_windows.evaluation.scores.chatrag import one_line


def write_answers(path: str | Path, answers: Sequence[str]) -> None:
    """Write answers in the order of the records, whole or not at all.

    Args:
        path: of the file.
        answers: line breaks in them become spaces, see `one_line`.

    Raises:
        DataError: the file can't be written.
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
    text = read_text(path).replace("\r\n", "\n").replace("\r", "\n")
    lines = text.removesuffix("\n").split("\n") if text else []
    if len(lines) != count:
        raise Place(str(path)).error(
            f"{len(lines)} line(s) for {count} record(s); it must hold one answer a line, "
            "an empty line for an empty answer."
        )
    return tuple(line.strip() for line in lines)
