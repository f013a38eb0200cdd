"""A killed run keeps its parts, and goes on only under the same settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rag_windows.benchmark import rounds
from rag_windows.benchmark import run as running
from rag_windows.benchmark.journal import Journal, sources
from rag_windows.benchmark.plan import COLD, Plan
from rag_windows.benchmark.result import Result
from rag_windows.benchmark.table import markdown
from rag_windows.errors import DataError, InputError

SETTINGS = {"plan": {"contexts": (1, 2)}, "code": "a"}
PLAN = Plan(
    shape="tiny",
    dtype="float32",
    contexts=(32, 64),
    windows=(16,),
    tokens=(2,),
    rounds=1,
    ways=(COLD,),
    memory=False,
)


class KilledError(Exception):
    """Stands for the end of the process."""


def test_parts_come_back(result: Result, tmp_path: Path) -> None:
    path = tmp_path / "new" / "partial.jsonl"
    first = Journal(path, SETTINGS)
    first.add("one", result.parts[0])
    with path.open("a") as file:
        file.write('{"part": "two", "fou')
    second = Journal(path, SETTINGS)
    assert (second.goes, len(second)) == (2, 1)
    assert second.part("one") == result.parts[0]
    assert second.part("two") is None
    second.add("two", result.parts[1])
    third = Journal(path, SETTINGS)
    assert (third.goes, third.part("two")) == (3, result.parts[1])


def test_without_a_file_nothing_is_kept(result: Result) -> None:
    journal = Journal()
    journal.add("one", result.parts[0])
    assert (journal.goes, journal.part("one")) == (1, result.parts[0])


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "partial.jsonl"
    Journal(path, SETTINGS)
    with pytest.raises(InputError, match=r"other settings: another code\."):
        Journal(path, {**SETTINGS, "code": "b"})
    assert Journal(path, SETTINGS).goes == 2


@pytest.mark.parametrize("line", ['{"part": "x"}', '{"part": "x", "found": {"cells": [{}]}}', "[]"])
def test_something_else_is_an_error(line: str, tmp_path: Path) -> None:
    path = tmp_path / "partial.jsonl"
    path.write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 1"):
        Journal(path, SETTINGS)


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "partial.jsonl"
    measured: list[int] = []
    measure = rounds.measure_ways

    def killed(plan, place, *rest):  # type: ignore[no-untyped-def] # as the function it stands for
        if place.context == 64 and len(measured) == 1:
            raise KilledError
        measured.append(place.context)
        return measure(plan, place, *rest)

    monkeypatch.setattr(running, "measure_ways", killed)
    with pytest.raises(KilledError):
        running.run(PLAN, "bench", journal=path)
    told: list[str] = []
    measured.append(0)
    result = running.run(PLAN, "bench", told.append, path)
    assert measured == [32, 0, 64]
    assert [cell.context for cell in result.cells] == [32, 64]
    assert result.goes == 2
    assert "The run took 2 calls" in markdown(result)
    assert told[0].endswith("partial.jsonl: 1.")
    with pytest.raises(InputError, match="other settings"):
        running.run(dataclasses.replace(PLAN, rounds=2), "bench", journal=path)


def test_sources_have_a_digest_that_stays() -> None:
    assert sources() == sources()
    assert len(sources()) == 16
