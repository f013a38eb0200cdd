from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from rag_windows import DataError
from rag_windows.evaluation.chatrag import score_chatrag
from rag_windows.evaluation.inscit import score_inscit
from rag_windows.evaluation.metrics import SORRY
from tests.rag_windows.evaluation.scores import literal

KEYS = ["evidence_f1", "bleu", "response_f1", "chatrag_f1", "n"]
DATA, GOLDEN = (os.environ.get(f"RAG_WINDOWS_INSCIT{end}") for end in ("", "_GOLDEN"))


def label(response: str, kind: str, *names: str) -> dict[str, Any]:
    evidence = [
        {"passage_id": name, "passage_text": f"Text of {name}.", "passage_titles": ["Lamps"]}
        for name in names
    ]
    return {"response": response, "responseType": kind, "evidence": evidence}


def turn(context: list[str], *labels: dict[str, Any]) -> dict[str, Any]:
    return {"context": context, "prevEvidence": [], "labels": list(labels)}


TALKS = {
    "lamps_1": {
        "turns": [
            turn(
                ["Who made the first lamp?"],
                label("Ada Brindle made the first lamp in Tarn.", "directAnswer", "Lamps:1"),
                label("It was Ada Brindle.", "directAnswer", "Lamps:1", "Lamps:2"),
            ),
            turn(
                ["Who made the first lamp?", "Ada Brindle.", "Which one do you mean?"],
                label("The red lamp or the green lamp?", "clarification", "Lamps:3"),
                label("She isn't known for it.", "noAnswerNoRelevantInfo"),
            ),
        ]
    },
    "lamps_2": {
        "turns": [
            turn(
                ["Do lamps sing?"],
                label("I couldn't find anything on that.", "noAnswerNoRelevantInfo"),
            )
        ]
    },
}
SAID: list[tuple[str, int | str, str, list[str]]] = [
    ("lamps_1", 1, "ada Brindle made the  first lamp.", ["Lamps:1"]),
    ("lamps_1", "2", "The red lamp or the blue lamp?", ["Lamps:3", "Lamps:1"]),
    ("lamps_2", 1, "", []),
]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    rows = [
        {
            "conv_id": name,
            "turn_id": number,
            "context": TALKS[name]["turns"][int(number) - 1]["context"],
            "output": {"response": text, "evidence": [{"passage_id": one} for one in ids]},
        }
        for name, number, text, ids in SAID
    ]
    data, predictions = tmp_path / "dev.json", tmp_path / "said.json"
    data.write_text(json.dumps(TALKS))
    predictions.write_text(json.dumps(rows[::-1]))
    return data, predictions


def test_inscit_by_hand(files: tuple[Path, Path]) -> None:
    found = score_inscit(*files)[""]
    assert list(found) == KEYS
    assert found["n"] == 3
    assert found["evidence_f1"] == pytest.approx((100 + 200 / 3 + 0) / 3)
    # "ada brindle made first lamp" against seven words; "red lamp or blue lamp" against five.
    expected = (200 * 5 / 12 + 200 * 4 / 10 + 0) / 3
    assert found["response_f1"] == pytest.approx(expected)
    assert found["chatrag_f1"] == pytest.approx(expected)
    bleu = literal.bleu(
        ["ada brindle made the first lamp .", "the red lamp or the blue lamp ?", ""],
        [
            ["ada brindle made the first lamp in tarn .", "it was ada brindle ."],
            ["the red lamp or the green lamp ?", "she isn't known for it ."],
            ["i couldn't find anything on that ."],
        ],
    )
    assert found["bleu"] == pytest.approx(bleu)


def test_inscit_by_response_type(files: tuple[Path, Path]) -> None:
    found = score_inscit(*files, by_type=True)
    assert list(found) == ["directAnswer", "clarification", "noAnswerNoRelevantInfo"]
    assert [list(one) for one in found.values()] == [KEYS] * 3
    assert [one["n"] for one in found.values()] == [1, 1, 2]
    assert found["directAnswer"]["evidence_f1"] == 100
    assert found["noAnswerNoRelevantInfo"]["response_f1"] == pytest.approx(40)


def test_a_turn_without_prediction_is_named(files: tuple[Path, Path]) -> None:
    data, predictions = files
    rows = json.loads(predictions.read_text())
    predictions.write_text(json.dumps(rows[1:]))
    with pytest.raises(DataError, match=r"said\.json.*lamps_2"):
        score_inscit(data, predictions)


def record(question: str, *answers: str) -> dict[str, Any]:
    passages = [{"title": "Lamps", "text": "Lamps are made in Tarn."}]
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "ctxs": passages, "answers": list(answers)}


def test_chatrag_by_hand(tmp_path: Path) -> None:
    data, predictions, listed = (tmp_path / name for name in ("quac.json", "said.txt", "list.json"))
    data.write_text(
        json.dumps(
            [record("Who?", "Ada Brindle"), record("When?", SORRY), record("Where?", "Tarn")]
        )
    )
    predictions.write_text("It was Ada Brindle\nI don't know\n\n")
    found = score_chatrag(data, "quac", predictions)
    assert found == {
        "f1": pytest.approx((200 * 2 / 6 + 100 + 0) / 3),
        "answerable_f1": pytest.approx(100 / 3),
        "unanswerable_accuracy": 100,
        "answerable_accuracy": 100,
        "mean_accuracy": 100,
        "n": 3,
    }
    listed.write_text("[0]")
    assert score_chatrag(data, "quac", predictions, listed)["answerable_f1"] == pytest.approx(
        200 / 3
    )
    assert score_chatrag(data, "doc2dial", predictions).keys() == {"f1", "n"}


def test_convfinqa_reads_the_bare_question(tmp_path: Path) -> None:
    data, predictions = tmp_path / "data.json", tmp_path / "said.txt"
    first = record("What was it in percent?", "12 / 50") | {"exe_answer": 0.24}
    first["messages"] += [
        {"role": "assistant", "content": "0.24"},
        {"role": "user", "content": "And as a share?"},
    ]
    second = record("What was it in percent?", "12 / 50") | {"exe_answer": 0.24}
    data.write_text(json.dumps([first, second]))
    predictions.write_text("24.0\n24.0%\n")
    assert score_chatrag(data, "convfinqa", predictions) == {"accuracy": 50, "n": 2}


def test_a_figure_without_any_record_is_no_number(tmp_path: Path) -> None:
    data, predictions = tmp_path / "data.json", tmp_path / "said.txt"
    data.write_text(json.dumps([record("Who?", " ")]))
    predictions.write_text("Ada\n")
    assert math.isnan(score_chatrag(data, "sqa", predictions)["f1"])


@pytest.mark.skipif(
    not (DATA and GOLDEN), reason="RAG_WINDOWS_INSCIT and RAG_WINDOWS_INSCIT_GOLDEN are not set"
)
@pytest.mark.parametrize(
    ("name", "official"),
    [
        (
            "first_sentence",
            {
                "evidence_f1": 59.81407702523244,
                "bleu": 33.433924789455276,
                "response_f1": 44.305630661753746,
                "chatrag_f1": 44.277668645179304,
                "n": 502,
            },
        ),
        (
            "last_context",
            {
                "evidence_f1": 59.820717131474126,
                "bleu": 0.7112541087166735,
                "response_f1": 16.649511875608034,
                "chatrag_f1": 16.56066470825421,
                "n": 502,
            },
        ),
    ],
)
def test_the_official_figures_are_met(name: str, official: dict[str, float]) -> None:
    folder = Path(GOLDEN or "")
    assert json.loads((folder / f"inscit_{name}.scores.json").read_text()) == official
    predictions = folder / f"inscit_{name}.predictions.json"
    begun = time.monotonic()
    assert score_inscit(DATA or "", predictions)[""] == pytest.approx(official, rel=0, abs=1e-6)
    assert time.monotonic() - begun < 20
    types = score_inscit(DATA or "", predictions, by_type=True)
    assert sum(one["n"] for one in types.values()) >= 502
