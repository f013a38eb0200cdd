"""Data files, corpora and predictions: what is read, and one clear error for what is not."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rag_windows import DataError
from rag_windows_eval import chatrag, files, inscit, task
from tests.blackbox.test_evaluation import TEXTS, chatrag_row, inscit_data

KEYS = ("coast_1/1", "coast_1/2", "coast/2/1")
PASSAGES = (
    task.ReadPassage("d1", "Harbour:4", mass=0.1),
    task.ReadPassage("d2", "Lighthouse:2", mass=0.6),
    task.ReadPassage("d3", "Lighthouse:1", mass=0.3),
)


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def answered(key: str, answer: str = "In 1811.", **changes: Any) -> task.AnswerRecord:
    return task.AnswerRecord(key, "ape@20", answer, **{"passages": PASSAGES, **changes})


@pytest.fixture
def talks(tmp_path: Path) -> inscit.InscitTask:
    return inscit.InscitTask.read(write(tmp_path / "dev.json", inscit_data()))


def test_inscits_turns_become_examples(talks: inscit.InscitTask) -> None:
    assert tuple(one.key for one in talks.examples) == KEYS
    assert [one.group for one in talks.examples] == ["coast_1", "coast_1", "coast/2"]
    one = talks.examples[1]
    assert [message["role"] for message in one.messages] == ["user", "assistant", "user"]
    assert one.kinds == ("directAnswer", "clarification")
    assert [(answer.text, answer.evidence) for answer in one.references] == [
        ("Oil, until 1902.", ("Lighthouse:2",)),
        ("Do you mean today?", ("Lighthouse:2", "Harbour:4")),
    ]
    assert [(one.id, one.text, one.title) for one in talks.pool] == [
        (name, text, name.partition(":")[0]) for name, text in TEXTS.items()
    ]
    assert json.loads(json.dumps(talks.settings)) == talks.settings


def test_chatrags_records_become_examples(tmp_path: Path) -> None:
    other = chatrag_row(messages=[{"role": "user", "content": "Who?"}], answer=12.5)
    del other["answers"]
    path = write(tmp_path / "a.json", [chatrag_row(), other, chatrag_row()])
    one, two, three = chatrag.ChatRagTask.read(path, "coqa").examples
    assert [answer.text for answer in (*one.references, *two.references)] == [
        *("In 1902.", "1902", "12.5")
    ]
    assert [one.group, two.group, three.group] == ["coqa/1", "coqa/2", "coqa/1"]
    assert [(one.text, one.title) for one in one.passages] == [
        (f"title: {name}, source: {text}", None) for name, text in TEXTS.items()
    ]
    assert one.question.startswith("Answer the following question with a short span. ")
    assert one.conversation[0]["content"] == "When was the lighthouse wired?"
    long = chatrag.ChatRagTask.read(path, "qrecc").examples[0]
    assert long.question.startswith("Please give a full and complete answer for the question. ")
    assert chatrag.ChatRagTask.read(path, "coqa").prefix == chatrag.INSTRUCTION
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n\n".join(json.dumps(row) for row in (chatrag_row(), other, chatrag_row())))
    assert chatrag.ChatRagTask.read(lines, "coqa").examples == [one, two, three]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"answers": []}, "record 2, answers: List should have at least 1 item"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages: the last message must"),
        ({"ctxs": [{"text": "t", "score": "nan"}]}, "record 2, ctxs 1, score: Input should be a f"),
        ({"exe_answer": None}, 'record 2: "exe_answer" is missing'),
    ],
)
def test_malformed_chatrag_is_named(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    rows = [chatrag_row(exe_answer=1), chatrag_row(**{"exe_answer": 1, **changes})]
    with pytest.raises(DataError) as caught:
        chatrag.ChatRagTask.read(write(tmp_path / "a.json", rows), "convfinqa")
    assert told in str(caught.value)


# Corpora.


def test_corpora_in_every_form(tmp_path: Path) -> None:
    rows = [{"id": "a", "text": "One.", "title": "T"}, {"id": 7, "text": "Half \ud83d."}]
    lines = tmp_path / "corpus.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    found = [(one.id, one.text, one.title) for one in inscit.read_corpus(lines)[0]]
    assert found == [("a", "One.", "T"), ("7", "Half \ufffd.", None)]
    text = (
        "\ufeffid\ttext\ttitle\n"
        "Orvell:0\tA town.\tOrvell [SEP] History\n"
        'Orvell:1\t"The ""old"" mill."\tOrvell\r\n'
        "id\ttext\ttitle\n"
        '2\t"Ice", they say.\tHarbour\n'
        "3\tNo title.\n"
    )
    packed = tmp_path / "corpus.tsv.gz"
    packed.write_bytes(gzip.compress(text.encode(), mtime=0))
    passages, stamp = inscit.read_corpus(packed)
    assert [(one.id, one.text, one.title) for one in passages] == [
        ("Orvell:0", "A town.", "Orvell - History"),
        ("Orvell:1", 'The "old" mill.', "Orvell"),
        ("2", '"Ice", they say.', "Harbour"),
        ("3", "No title.", None),
    ]
    assert stamp["file"] == "corpus.tsv.gz"


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"id\ttext\ttitle\n", " holds no passage"),
        (b"a\tone\na\ttwo\n", ", line 2: the id 'a' is empty or appears twice"),
        (b"only one column\n", ", line 1 must be a JSON object, or id, text"),
        (b'{"id": "a", "text": ["x"]}', ", line 1, text: Input should be a valid string."),
        (b"a\tb\xff\n", " can't be read ('utf-8' codec can't decode byte 0xff in position 3"),
        (gzip.compress(b"1\ttext\n" * 99, mtime=0)[:-20], " can't be read"),
        (None, " can't be read (No such file or directory)"),
    ],
)
def test_a_corpus_that_can_not_be_used(tmp_path: Path, data: bytes | None, told: str) -> None:
    path = tmp_path / "corpus"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        inscit.read_corpus(path)
    assert str(caught.value).startswith(f"{path}{told}")


# Predictions.


def test_inscits_predictions_are_written_and_read(tmp_path: Path, talks: inscit.InscitTask) -> None:
    path = tmp_path / "predictions" / "ape.json"
    answers = ["In 1811.", "Öl,\n“oil” \u2028 it says", ""]
    records = {key: answered(key, answer) for key, answer in zip(KEYS, answers, strict=True)}
    inscit.write_predictions(path, talks.examples, records, evidence=2)
    evidence = ("Lighthouse:2", "Lighthouse:1")
    assert inscit.read_predictions(path, talks.examples) == [(one, evidence) for one in answers]
    rows = json.loads(path.read_text(encoding="utf-8"))
    assert rows[1] == {
        "conv_id": "coast_1",
        "turn_id": 2,
        "context": [message["content"] for message in talks.examples[1].messages],
        "output": {"response": answers[1], "evidence": [{"passage_id": one} for one in evidence]},
    }
    rows[1]["turn_id"] = "2"
    assert inscit.read_predictions(write(path, rows), talks.examples)[1][0] == answers[1]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rows: rows.pop(1), "turn 'coast_1/2' has no prediction"),
        (lambda rows: rows.append(rows[0]), "a turn is predicted twice"),
        (lambda rows: rows[0].update(context=["Else?"]), "or one with another context"),
        (lambda rows: rows[0].update(turn_id=True), "record 1, turn_id: Input should be a valid"),
        (lambda rows: rows[0]["output"].pop("response"), "record 1, output, response: Field req"),
    ],
)
def test_predictions_that_do_not_fit(
    tmp_path: Path, talks: inscit.InscitTask, change: Any, told: str
) -> None:
    path = tmp_path / "ape.json"
    inscit.write_predictions(path, talks.examples, {key: answered(key) for key in KEYS})
    rows = json.loads(path.read_text(encoding="utf-8"))
    change(rows)
    with pytest.raises(DataError) as caught:
        inscit.read_predictions(write(path, rows), talks.examples)
    assert str(caught.value).startswith(f"{path}")
    assert told in str(caught.value)


def test_most_attended_passages_are_evidence_then_the_best_retrieved() -> None:
    assert inscit.evidence_of(answered("k"), 2) == ("Lighthouse:2", "Lighthouse:1")
    assert inscit.evidence_of(answered("k"), 0) == ()
    unmeasured = (
        *(
            task.ReadPassage("d0", None, mass=0.9),
            task.ReadPassage("d1", "a"),
            task.ReadPassage("d2", "b", mass=0.0),
        ),
        *(task.ReadPassage("d3", "c"), task.ReadPassage("d1", "a")),
    )
    assert inscit.evidence_of(answered("k", passages=unmeasured), 5) == ("b", "a", "c")


def test_one_answer_a_line(tmp_path: Path) -> None:
    path, lines = tmp_path / "ape.txt", ("In 1811.", "", "two lines and more \u2028 é", "wide")
    chatrag.write_answers(path, ["In 1811.", "", "two\nlines\r\nand\rmore \u2028 é", "  wide  "])
    assert chatrag.read_answers(path, 4) == lines
    # The benchmark's script reads lines so.
    with path.open(encoding="utf-8") as stream:
        assert tuple(line.strip() for line in stream.readlines()) == lines
    with pytest.raises(
        DataError, match=r"ape\.txt must hold one line for each of the 3 records, not 4"
    ):
        chatrag.read_answers(path, 3)
    path.write_bytes(b"\xef\xbb\xbfone\r\n\r\nthree")
    assert chatrag.read_answers(path, 3) == ("one", "", "three")


def test_the_answerable_that_count_are_listed(tmp_path: Path) -> None:
    rows = [chatrag_row(answers=[chatrag.SORRY]), chatrag_row(), chatrag_row()]
    path = write(tmp_path / "a.json", rows)
    examples = chatrag.ChatRagTask.read(path, "quac").examples
    assert [one.kinds for one in examples] == [("unanswerable",), *[("answerable",)] * 2]
    said, listed = tmp_path / "said.txt", tmp_path / "listed.json"
    chatrag.write_answers(said, ["no", "1811", "1902"])
    for numbers, found in (("[0]", 0), ("[1]", 100), ("[0, 1]", 50)):
        listed.write_text(numbers)
        assert chatrag.score_chatrag(path, "quac", said, listed)["answerable_f1"] == found
    for wrong, told in (
        ("[2]", "beyond the 2 answerable"),
        ("[true]", "record 1: Input should be a val"),
    ):
        listed.write_text(wrong)
        with pytest.raises(DataError, match=told):
            chatrag.score_chatrag(path, "quac", said, listed)


# Writing.


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "a.json"
    files.write_whole(path, "one")
    files.write_whole(path, "two é \ud83d")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"a\.json can't be written \(No space left"):
        files.write_whole(path, "new")
    assert path.read_text(encoding="utf-8") == "two é �"
    assert os.listdir(path.parent) == ["a.json"]
    with pytest.raises(DataError, match="can't be written"):
        files.write_whole(path / "b.json", "x")
