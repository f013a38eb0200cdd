from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rag_windows import DataError, InputError
from rag_windows.evaluation.chatrag import INSTRUCTION
from rag_windows.evaluation.inscit import InscitTask
from rag_windows.evaluation.task import Task
from tests.rag_windows.evaluation.data.made import TEXTS, inscit, record, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "dev.json", inscit())


def test_turns_become_examples(path: Path) -> None:
    task: Task = InscitTask.read(path)
    assert [one.key for one in task.examples] == ["coast_1/1", "coast_1/2", "coast/2/1"]
    assert [one.group for one in task.examples] == ["coast_1", "coast_1", "coast/2"]
    one = task.examples[1]
    assert [message["role"] for message in one.messages] == ["user", "assistant", "user"]
    assert one.question == "What did its lamp burn?"
    assert one.kinds == ("directAnswer", "clarification")
    assert [answer.text for answer in one.references] == ["Oil, until 1902.", "Do you mean today?"]
    assert [answer.evidence for answer in one.references] == [
        ("Lighthouse:2",),
        ("Lighthouse:2", "Harbour:4"),
    ]
    assert one.passages is None
    assert dict(one.details) == {
        "conv_id": "coast_1",
        "turn": 2,
        "context": [message["content"] for message in one.messages],
        "conversation": list(one.messages),
    }
    assert task.prefix is None
    assert task.name == "inscit"


def test_a_label_without_evidence_is_right(path: Path) -> None:
    task = InscitTask.read(path)
    assert task.examples[2].references[0].evidence == ()
    assert task.gold(task.examples[2]) == ()


def test_the_pool_is_the_evidence_or_a_file(path: Path, tmp_path: Path) -> None:
    task = InscitTask.read(path)
    assert [(one.id, one.text, one.title) for one in task.pool] == [
        ("Lighthouse:1", TEXTS["Lighthouse:1"], "Lighthouse - History"),
        ("Lighthouse:2", TEXTS["Lighthouse:2"], "Lighthouse - History"),
        ("Harbour:4", TEXTS["Harbour:4"], "Harbour - History"),
    ]
    assert task.unfound == 0
    corpus = tmp_path / "corpus.tsv"
    corpus.write_text("Lighthouse:1\tOther words.\tLighthouse\nTown:0\tA town.\n")
    wide = InscitTask.read(path, corpus=corpus)
    assert [one.id for one in wide.pool] == ["Lighthouse:1", "Town:0"]
    assert wide.unfound == 2
    assert [one.id for one in wide.gold(wide.examples[1])] == ["Lighthouse:2", "Harbour:4"]
    assert wide.settings["corpus"]["file"] == "corpus.tsv"
    assert task.settings["corpus"] is None


def test_settings_are_json_and_know_the_data(path: Path, tmp_path: Path) -> None:
    settings = InscitTask.read(path).settings
    assert json.loads(json.dumps(settings)) == settings
    assert settings["data"]["file"] == "dev.json"
    changed = inscit()
    changed["coast_1"]["turns"][0]["context"] = ["When, please?"]
    other = InscitTask.read(write(tmp_path / "dev.json", changed)).settings
    assert other["data"]["sha256"] != settings["data"]["sha256"]


def test_the_style_of_chatrag(path: Path) -> None:
    task = InscitTask.read(path, style="chatrag")
    assert task.prefix == INSTRUCTION
    one = task.examples[1]
    wording = "Please give a full and complete answer for the question. "
    assert one.messages[0]["content"] == wording + "When was the lighthouse built?"
    assert one.messages[-1]["content"] == "What did its lamp burn?"
    assert one.details["conversation"][0]["content"] == "When was the lighthouse built?"
    assert one.details["context"][0] == "When was the lighthouse built?"
    text = f"title: Lighthouse - History, source: {TEXTS['Lighthouse:1']}"
    assert (task.pool[0].text, task.pool[0].title) == (text, None)
    assert task.gold(task.examples[0])[0].text == text


def test_scores_count_errors_as_empty(path: Path) -> None:
    pytest.importorskip("spacy")
    pytest.importorskip("sacrebleu")
    task = InscitTask.read(path)
    records = [
        record("coast_1/1", "In 1811."),
        record("coast_1/2", "Oil, until 1902."),
        record("coast/2/1", "I can't tell.", error="out of memory"),
    ]
    found = {one.name: one for one in task.scores(task.examples, records)}
    assert tuple(found) == task.metrics
    assert found["response_f1"].values == (100.0, 100.0, 0.0)
    # Most attention lies on Lighthouse:2: wrong for the first turn, right for the second.
    assert found["evidence_f1"].values == (0.0, 100.0, 0.0)


def without(value: dict[str, Any], name: str) -> None:
    del value[name]


def turn(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = data["coast_1"]["turns"][1]
    return found


SECOND = ", coast_1, turns 2"
LABEL = f"{SECOND}, labels 2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: turn(d).update(labels=[]), f"{SECOND}, labels: List should have at least 1"),
        (lambda d: without(turn(d), "labels"), f"{SECOND}, labels: Field required."),
        (lambda d: without(turn(d), "context"), f"{SECOND}, context: Field required."),
        (lambda d: turn(d).update(context=[]), f"{SECOND}, context: it has 0 messages"),
        (lambda d: turn(d).update(context=["a", "b"]), f"{SECOND}, context: it has 2 messages"),
        (lambda d: turn(d).update(context="a"), f"{SECOND}, context: Input should be a valid arr"),
        (lambda d: turn(d).update(context=["a", 1, "b"]), f"{SECOND}, context 2: Input should be"),
        (lambda d: turn(d)["labels"].__setitem__(1, "x"), f"{LABEL}: Input should be an object"),
        (lambda d: without(turn(d)["labels"][1], "response"), f"{LABEL}, response: Field requir"),
        (lambda d: turn(d)["labels"][1].update(response=None), f"{LABEL}, response: Input shoul"),
        (lambda d: without(turn(d)["labels"][1], "responseType"), f"{LABEL}, responseType: Fiel"),
        (lambda d: turn(d)["labels"][1].update(evidence={}), f"{LABEL}, evidence: Input should "),
        (
            lambda d: without(turn(d)["labels"][1]["evidence"][0], "passage_id"),
            f"{LABEL}, evidence 1, passage_id: Field required.",
        ),
        (
            lambda d: turn(d)["labels"][1]["evidence"][0].update(passage_titles=[None]),
            f"{LABEL}, evidence 1, passage_titles 1: Input should be a valid string.",
        ),
        (
            lambda d: turn(d)["labels"][1]["evidence"][0].update(passage_text="Other."),
            ", conversation 'coast_1', turn 2: the id 'Lighthouse:2' stands for two different",
        ),
        (lambda d: d["coast_1"].update(turns={}), ", coast_1, turns: Input should be a valid arr"),
        (lambda d: d.update({"coast/2": []}), ", 'coast/2': Input should be an object"),
        (lambda d: d.update({"\x1b[2Jx": {}}), ", '\\x1b[2Jx', turns: Field required."),
    ],
)
def test_malformed_data_is_named(path: Path, change: Any, message: str) -> None:
    data = inscit()
    change(data)
    write(path, data)
    with pytest.raises(DataError) as caught:
        InscitTask.read(path)
    assert str(caught.value).startswith(f"{path}{message}")


def test_a_conversation_that_stands_twice_is_named(path: Path) -> None:
    one = json.dumps(inscit()["coast/2"])
    path.write_text(f'{{"a": {one}, "a": {one}}}')
    with pytest.raises(DataError, match="the key 'a' stands twice in one object"):
        InscitTask.read(path)


@pytest.mark.parametrize("data", [[], {}, "x", {"a": {"turns": []}}])
def test_other_files_are_told(path: Path, data: Any) -> None:
    with pytest.raises(DataError, match=r"should be an object|there is no turn in it"):
        InscitTask.read(write(path, data))


def test_the_same_passage_under_another_title_is_the_same(path: Path) -> None:
    data = inscit()
    turn(data)["labels"][1]["evidence"][0]["passage_titles"] = ["Lamp"]
    task = InscitTask.read(write(path, data))
    assert [one.title for one in task.pool][1] == "Lighthouse - History"


def test_a_megabyte_passage_is_whole(path: Path) -> None:
    data = inscit()
    long = "word " * 250_000
    data["coast_1"]["turns"][0]["labels"][0]["evidence"][0]["passage_text"] = long
    assert InscitTask.read(write(path, data)).pool[0].text == long


def test_wrong_options_are_refused(path: Path) -> None:
    with pytest.raises(InputError, match="Unknown style 'loud'; use one of chatrag, plain"):
        InscitTask.read(path, style="loud")  # type: ignore[arg-type]  # what is tested
    with pytest.raises(InputError, match="evidence=-1"):
        InscitTask.read(path, evidence=-1)


@pytest.mark.skipif("RAG_WINDOWS_INSCIT" not in os.environ, reason="INSCIT's file is not here")
def test_the_real_dev_set() -> None:
    task = InscitTask.read(os.environ["RAG_WINDOWS_INSCIT"])
    assert len(task.examples) == 502
    assert len({one.group for one in task.examples}) == 86
    assert len(task.pool) == 996
    assert len({one.key for one in task.examples}) == 502
    labels = [answer for one in task.examples for answer in one.references]
    assert sum(not answer.evidence for answer in labels) == 26
    assert sum(len(one.kinds) == 2 for one in task.examples) == 77
    assert {kind for one in task.examples for kind in one.kinds} == {
        "directAnswer",
        "clarification",
        "noAnswerButRelevantInfo",
        "noAnswerNoRelevantInfo",
    }
