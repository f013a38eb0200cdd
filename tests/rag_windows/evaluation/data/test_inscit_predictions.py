from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rag_windows import DataError
from rag_windows.evaluation.inscit import (
    InscitTask,
    evidence_of,
    read_predictions,
    write_predictions,
)
from rag_windows.evaluation.record import ReadPassage, Record
from rag_windows.evaluation.task import Example
from tests.rag_windows.evaluation.data.made import inscit, record, write

KEYS = ("coast_1/1", "coast_1/2", "coast/2/1")


@pytest.fixture
def examples(tmp_path: Path) -> tuple[Example, ...]:
    return InscitTask.read(write(tmp_path / "dev.json", inscit())).examples


@pytest.fixture
def path(tmp_path: Path, examples: tuple[Example, ...]) -> Path:
    made = tmp_path / "predictions" / "ape.json"
    answers = ["In 1811.", "Öl,\n“oil” \u2028 it says", ""]
    records = {key: record(key, answer) for key, answer in zip(KEYS, answers, strict=True)}
    write_predictions(made, examples, records, evidence=2)
    return made


def test_what_is_written_is_read_again(path: Path, examples: tuple[Example, ...]) -> None:
    found = read_predictions(path, examples)
    assert [answer for answer, _ in found] == ["In 1811.", "Öl,\n“oil” \u2028 it says", ""]
    assert [names for _, names in found] == [("Lighthouse:2", "Lighthouse:1")] * 3
    assert os.listdir(path.parent) == ["ape.json"]


def test_the_format_is_inscits(path: Path, examples: tuple[Example, ...]) -> None:
    assert json.loads(path.read_text(encoding="utf-8"))[1] == {
        "conv_id": "coast_1",
        "turn_id": 2,
        "context": list(examples[1].details["context"]),
        "output": {
            "response": "Öl,\n“oil” \u2028 it says",
            "evidence": [{"passage_id": "Lighthouse:2"}, {"passage_id": "Lighthouse:1"}],
        },
    }


def test_the_context_is_the_datas_own_in_any_style(tmp_path: Path) -> None:
    data = write(tmp_path / "dev.json", inscit())
    task = InscitTask.read(data, style="chatrag")
    made = tmp_path / "p.json"
    write_predictions(made, task.examples, {key: record(key) for key in KEYS})
    found = read_predictions(made, InscitTask.read(data).examples)
    assert [answer for answer, _ in found] == ["In 1811."] * 3


def test_an_error_is_an_empty_answer(tmp_path: Path, examples: tuple[Example, ...]) -> None:
    records = {key: record(key, "", error="failed") for key in KEYS}
    write_predictions(tmp_path / "p.json", examples, records)
    assert read_predictions(tmp_path / "p.json", examples) == [("", ())] * 3


def test_most_attended_passages_are_evidence() -> None:
    assert evidence_of(record("k")) == ("Lighthouse:2",)
    assert evidence_of(record("k"), 2) == ("Lighthouse:2", "Lighthouse:1")
    assert evidence_of(record("k"), 0) == ()
    assert evidence_of(record("k", error="failed"), 2) == ()


def test_best_retrieved_passages_where_attention_was_not_measured() -> None:
    passages = (
        ReadPassage("d0", None, mass=0.9),
        ReadPassage("d1", "a"),
        ReadPassage("d2", "b", mass=0.0),
        ReadPassage("d3", "c"),
        ReadPassage("d1", "a"),
    )
    assert evidence_of(Record("k", "pcw", "x", passages=passages[1:2] + passages[3:]), 5) == (
        "a",
        "c",
    )
    assert evidence_of(Record("k", "pcw", "x", passages=passages), 5) == ("b", "a", "c")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda rows: rows.pop(1),
            ": 1 of 3 turns are not predicted ('coast_1' turn 2); the score",
        ),
        (list.clear, ": 3 of 3 turns are not predicted ('coast_1' turn 1, 'coast_1' turn 2, 'coas"),
        (
            lambda rows: rows.append(rows[0]),
            ", record 4: turn 1 of conversation 'coast_1' was predicted already; keep one.",
        ),
        (
            lambda rows: rows[0].update(turn_id=9),
            ", record 1: turn 9 of conversation 'coast_1' is not in the data file.",
        ),
        (
            lambda rows: rows[0].update(conv_id="c\x07"),
            ", record 1: turn 1 of conversation 'c\\x07' is not in the data file.",
        ),
        (lambda rows: rows[0].update(context=["Else?"]), ', record 1: "context" is not that of tu'),
        (lambda rows: rows[0].pop("context"), ", record 1, context: Field required."),
        (lambda rows: rows[0].pop("conv_id"), ", record 1, conv_id: Field required."),
        (lambda rows: rows[0].pop("turn_id"), ", record 1, turn_id: Field required."),
        (lambda rows: rows[0].update(turn_id=1.5), ", record 1, turn_id: Input should be a valid"),
        (lambda rows: rows[0].update(turn_id=True), ", record 1, turn_id: Input should be a vali"),
        (lambda rows: rows[0].update(turn_id="²"), ", record 1, turn_id: invalid literal"),
        (lambda rows: rows[0].pop("output"), ", record 1, output: Field required."),
        (lambda rows: rows[0]["output"].pop("response"), ", record 1, output, response: Field re"),
        (lambda rows: rows[0]["output"].pop("evidence"), ", record 1, output, evidence: Field re"),
        (
            lambda rows: rows[0]["output"].update(evidence=[{}]),
            ", record 1, output, evidence 1, passage_id: Field required.",
        ),
        (
            lambda rows: rows[0]["output"].update(evidence=["Lighthouse:1"]),
            ", record 1, output, evidence 1: Input should be an object.",
        ),
        (lambda rows: rows.__setitem__(0, None), ", record 1: Input should be an object."),
    ],
)
def test_what_is_wrong_is_named(
    path: Path, examples: tuple[Example, ...], change: Any, message: str
) -> None:
    rows = json.loads(path.read_text(encoding="utf-8"))
    change(rows)
    write(path, rows)
    with pytest.raises(DataError) as caught:
        read_predictions(path, examples)
    assert str(caught.value).startswith(f"{path}{message}")


def test_turn_ids_may_be_strings(path: Path, examples: tuple[Example, ...]) -> None:
    rows = json.loads(path.read_text(encoding="utf-8"))
    for row in rows:
        row["turn_id"] = str(row["turn_id"])
    assert read_predictions(write(path, rows), examples)[0][0] == "In 1811."


def test_another_kind_of_file_is_told(path: Path, examples: tuple[Example, ...]) -> None:
    with pytest.raises(DataError, match="Input should be a valid array"):
        read_predictions(write(path, inscit()), examples)


@pytest.mark.skipif(
    not {"RAG_WINDOWS_INSCIT", "RAG_WINDOWS_INSCIT_GOLDEN"} <= os.environ.keys(),
    reason="INSCIT's files are not here",
)
@pytest.mark.parametrize("name", ["first_sentence", "last_context"])
def test_the_golden_files_are_read(name: str, tmp_path: Path) -> None:
    task = InscitTask.read(os.environ["RAG_WINDOWS_INSCIT"])
    golden = Path(os.environ["RAG_WINDOWS_INSCIT_GOLDEN"]) / f"inscit_{name}.predictions.json"
    found = read_predictions(golden, task.examples)
    rows = json.loads(golden.read_text(encoding="utf-8"))
    assert [answer for answer, _ in found] == [row["output"]["response"] for row in rows]
    records = {
        one.key: Record(
            one.key,
            "golden",
            answer,
            passages=tuple(ReadPassage("digest", name) for name in names),
        )
        for one, (answer, names) in zip(task.examples, found, strict=True)
    }
    write_predictions(tmp_path / "again.json", task.examples, records, evidence=9)
    for row in rows:
        named = [one["passage_id"] for one in row["output"]["evidence"]]
        row["output"]["evidence"] = [{"passage_id": name} for name in dict.fromkeys(named)]
    assert json.loads((tmp_path / "again.json").read_text(encoding="utf-8")) == rows
