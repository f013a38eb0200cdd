"""Predictions in INSCIT's own format, which its official script scores.

The format is a list of ``{"conv_id", "turn_id", "context", "output": {"response", "evidence":
[{"passage_id"}]}}``. The script finds a prediction by the first three, and stops where a turn has
none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_windows.errors import InputError
from rag_windows.evaluation.data.fields import (
    Place,
    checked,
    entries,
    field,
    kind_of,
    record_of,
    several,
    shown,
    strings,
)
from rag_windows.evaluation.data.reading import read
from rag_windows.evaluation.data.writing import write_whole
from rag_windows.evaluation.example import Example
from rag_windows.evaluation.record import Record


@dataclass(frozen=True, slots=True)
class Predictions:
    """What was predicted, one of each an example.

    Attributes:
        answers: the responses.
        evidence: ids of the passages that each rests on.
    """

    answers: tuple[str, ...]
    evidence: tuple[tuple[str, ...], ...]


def evidence_of(record: Record, count: int = 1) -> tuple[str, ...]:
    """Ids of the passages that an answer is taken to rest on.

    Args:
        record: of the answer; none of its passages count where it holds an error.
        count: how many, at most.

    Returns:
        Those that got most attention, and behind them, where attention was not measured, the best
        retrieved. Passages without an id can't be named.
    """
    if record.error is not None:
        return ()
    # The sort is stable: equal ones stay in the order of the ranking.
    ranked = sorted(record.passages, key=lambda one: 1.0 if one.mass is None else -one.mass)
    return tuple(dict.fromkeys(one.id for one in ranked if one.id is not None))[:count]


def write_predictions(
    path: str | Path,
    examples: Sequence[Example],
    records: Sequence[Record],
    *,
    evidence: int = 1,
) -> None:
    """Write one arm's answers in INSCIT's format, whole or not at all.

    Args:
        path: of the file.
        examples: of an `InscitTask`.
        records: one an example, in the same order; an error is written as an empty answer, since
            the official script wants every turn.
        evidence: how many passages count as the evidence of an answer, see `evidence_of`.

    Raises:
        InputError: examples and records do not belong together.
        DataError: the file can't be written.
    """
    if [one.key for one in examples] != [one.key for one in records]:
        raise InputError("Predictions need one record for each example, in the same order.")
    rows = [
        {
            "conv_id": example.details["conv_id"],
            "turn_id": example.details["turn"],
            "context": list(example.details["context"]),
            "output": {
                "response": "" if record.error is not None else record.answer,
                "evidence": [{"passage_id": name} for name in evidence_of(record, evidence)],
            },
        }
        for example, record in zip(examples, records, strict=True)
    ]
    write_whole(path, json.dumps(rows, ensure_ascii=False, indent=1) + "\n")


def read_predictions(path: str | Path, examples: Sequence[Example]) -> Predictions:
    """Read predictions for all examples.

    Args:
        path: of a file in INSCIT's format.
        examples: of an `InscitTask`.

    Returns:
        Answers and evidence in the order of the examples.

    Raises:
        DataError: the file can't be read; a field is missing or wrong; a turn is missing, unknown
            or predicted twice; or its context is not the data file's. File, record and field are
            named.
    """
    source = read(path)
    turns = {(one.details["conv_id"], one.details["turn"]): one for one in examples}
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    records: dict[str, int] = {}
    listed = checked(source.json(), list, source.place, "the file's content")
    for number, row in enumerate(listed, start=1):
        place = source.place.at(f"record {number}")
        example = _example_of(row, turns, place)
        if example.key in records:
            raise place.error(
                f"the turn was predicted in record {records[example.key]} already; keep one."
            )
        records[example.key] = number
        output = field(row, "output", dict, place)
        inside = place.at('"output"')
        named = [
            field(one, "passage_id", str, where)
            for where, one in entries(output, "evidence", "evidence", inside)
        ]
        found[example.key] = field(output, "response", str, inside), tuple(named)
    if missing := [one for one in examples if one.key not in found]:
        names = [f"{shown(one.details['conv_id'])} turn {one.details['turn']}" for one in missing]
        raise source.place.error(
            f"{len(missing)} of {len(examples)} turns are not predicted ({several(names)}); "
            "the score needs every turn of the data file."
        )
    both = [found[one.key] for one in examples]
    return Predictions(tuple(one for one, _ in both), tuple(names for _, names in both))


def _example_of(row: Any, turns: dict[tuple[str, int], Example], place: Place) -> Example:
    name = field(row, "conv_id", str, place)
    turn = _turn(row, place)
    example = turns.get((name, turn))
    if example is None:
        known = sum(conversation == name for conversation, _ in turns)
        raise place.error(
            f"turn {turn} of conversation {shown(name)} is not in the data file, which has "
            + (f"{known} turn(s) of it." if known else "no such conversation.")
        )
    # The official script joins them before it compares.
    if " ".join(strings(row, "context", place)) != " ".join(example.details["context"]):
        raise place.error(
            f'"context" is not that of turn {turn} of {shown(name)} in the data file; '
            "score predictions with the data that they were made from."
        )
    return example


def _turn(row: Any, place: Place) -> int:
    turn = record_of(row, place).get("turn_id")
    if isinstance(turn, str) and turn.isascii() and turn.isdigit():
        return int(turn)
    if isinstance(turn, int) and not isinstance(turn, bool):
        return turn
    told = kind_of(turn) if "turn_id" in row else "missing"
    raise place.error(f'"turn_id" must be a whole number from 1, and is {told}.')
