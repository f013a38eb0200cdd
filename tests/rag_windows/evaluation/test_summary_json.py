from __future__ import annotations

import json
from typing import Any

import pytest

from rag_windows.errors import DataError
from rag_windows.evaluation.summary import Summary
from rag_windows.evaluation.summary_json import dump, parse
from rag_windows.evaluation.summary_making import summarise_records
from tests.rag_windows.evaluation.summaries import ARMS, HarbourTask, records_of, speeds_of

TASK = HarbourTask(talks=3)


def some(talks_answered: bool = True) -> Summary:
    records = records_of(TASK) if talks_answered else {}
    return summarise_records(TASK, ARMS, records, speeds_of())


@pytest.mark.parametrize("answered", [True, False])
def test_a_summary_survives_its_file(answered: bool) -> None:
    text = dump(some(answered))
    again = parse(text)
    assert dump(again) == text
    assert "NaN" not in text
    # NaN is not equal to itself, but all else is compared by its text.
    assert repr(again) == repr(some(answered))


def damaged(**changes: Any) -> str:
    data = json.loads(dump(some()))
    data.update(changes)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "s.json: not valid JSON"),
        ("[]", "s.json: this must be an object"),
        ('{"format": "x"}', "no summary of an evaluation"),
        (damaged(version=9), "has version 9"),
        (damaged(groups=None), "s.json, groups: this must be a whole number, not null"),
        (damaged(groups=True), "groups: this must be a whole number"),
        (damaged(missing={"ape\x1b": "x"}), r"missing, 'ape\\x1b': this must be a whole number"),
        (damaged(arms=[{"name": "a"}]), r'arms, entry 1: "label" is missing'),
        (damaged(retrieval=[7]), "retrieval, entry 1: this must be an object"),
        (damaged(metrics={}), "metrics: this must be a list"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse(text, "s.json")
