"""Needles from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_windows.evaluation.data.fields import Place, checked, field, optional, record_of
from rag_windows.evaluation.data.fields import strings as strings_of
from rag_windows.evaluation.data.keys import Keys, filled
from rag_windows.evaluation.data.reading import read
from rag_windows.evaluation.long.needle import Needle, Needles, digest, others
from rag_windows.passage import Passage


@dataclass(frozen=True, slots=True)
class _Line:
    place: Place
    key: str
    question: str
    answers: tuple[str, ...]
    needle: Passage
    haystack: tuple[Passage, ...] | None


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
    source = read(path)
    lines: list[_Line] = []
    keys = Keys()
    for number, (place, value) in enumerate(source.records(), start=1):
        lines.append(_line(value, number, place, keys))
    if not lines:
        raise source.place.error("it holds no questions.")
    hidden_in = pool if pool is not None else [line.needle for line in lines]
    needles = []
    for line in lines[:count]:

        def other(passage: Passage, text: str = line.needle.text) -> bool:
            return passage.text != text

        if line.haystack is None:
            haystack = others(hidden_in, most, f"{seed}/{line.key}", other)
        else:
            haystack = line.haystack[:most]
        needles.append(Needle(line.key, line.question, line.answers, line.needle, haystack))
    stamp: dict[str, object] = {"needles": source.stamp}
    if pool is not None:
        stamp["haystack"] = {"passages": len(pool), "sha256": digest(pool)}
    return Needles(path.stem, tuple(needles), stamp)


def _line(value: Any, number: int, place: Place, keys: Keys) -> _Line:
    record = record_of(value, place)
    key = keys.take(record, number, place)
    question = filled(record, "question", place)
    if "answers" in record:
        answers = strings_of(record, "answers", place)
    else:
        answers = [field(record, "answer", str, place)]
    if not answers or not all(one.strip() for one in answers):
        raise place.error('"answers" must hold at least one, and none that is blank.')
    if "needle" not in record:
        raise place.error('"needle" is missing; it must be the passage that answers the question.')
    needle = _passage(record["needle"], '"needle"', f"needle {key}", place)
    haystack = None
    if (given := optional(record, "haystack", list, place)) is not None:
        haystack = tuple(
            _passage(one, f'entry {i} of "haystack"', f"{key}/{i}", place)
            for i, one in enumerate(given, start=1)
        )
        seen = [needle.text]
        for i, one in enumerate(haystack, start=1):
            if one.text in seen:
                twin = f"entry {seen.index(one.text)}" if one.text != needle.text else "the needle"
                raise place.error(f'entry {i} of "haystack" equals {twin}; take it out.')
            seen.append(one.text)
    return _Line(place, key, question, tuple(answers), needle, haystack)


def _passage(value: Any, name: str, identity: str, place: Place) -> Passage:
    if isinstance(value, str):
        passage = Passage(value, id=identity)
    else:
        inside = place.at(name)
        record = checked(value, dict, place, f"{name}, if it is no string,")
        passage = Passage(
            field(record, "text", str, inside),
            id=optional(record, "id", str, inside) or identity,
            title=optional(record, "title", str, inside),
        )
    if not passage.text.strip():
        raise place.error(f"{name} is blank; fill it in, or take it out.")
    return passage
