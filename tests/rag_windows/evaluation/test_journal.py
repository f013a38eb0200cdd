"""What a run's folder keeps, what it reads back, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from rag_windows import DataError, InputError
from rag_windows.evaluation.files import JsonLines
from rag_windows.evaluation.record import ReadPassage, Record, Speed, digest_of
from rag_windows.evaluation.run import RunFolder
from tests.rag_windows import small
from tests.rag_windows.evaluation.invented import arms_of, begin, invented

TEXT = "Kadan keeps a lion. \u2028 Grüße \x1b[31m"
RECORD = Record(
    "c0-0",
    "ape",
    "a lion\u2028 \n",
    passages=(ReadPassage(digest_of(TEXT), "p1", None, 1.5, 0.25, ((0, 4), (4, 9))),),
    left_out=2,
    prefix_mass=0.5,
    windows_encoded=3,
    ttft_s=0.125,
    scores={"yes": -0.5, "no": float("-inf")},
    notes=("one",),
)
SPEED = Speed("c0-0", "ape", 100, (0.5, 0.25), (0.125, 0.0625))


def folder_at(path: Path, fresh: bool = False) -> RunFolder:
    return begin(path, small.lm(), invented(), arms_of("ape", "pcw"), fresh=fresh)


def filled(path: Path) -> Path:
    with folder_at(path) as folder:
        folder.add([RECORD], [TEXT])
        folder.add([SPEED])
        folder.add([Record("c1-0", "ape", "", error="too long")])
    return path / "records.jsonl"


def test_what_is_added_is_read_back(tmp_path: Path) -> None:
    filled(tmp_path)
    found = RunFolder.open(tmp_path)
    assert found.records("ape")["c0-0"] == RECORD
    assert found.records("ape")["c1-0"].error == "too long"
    assert found.speeds("ape") == {"c0-0": SPEED}
    assert found.records("pcw") == {} == found.speeds("pcw")
    assert found.texts[digest_of(TEXT)] == TEXT
    assert found.notes == ()


def test_the_last_record_of_a_question_counts(tmp_path: Path) -> None:
    with folder_at(tmp_path) as folder:
        folder.add([Record("c0-0", "ape", "", error="no"), Record("c0-0", "ape", "yes")])
        assert folder.records("ape")["c0-0"].answer == "yes"
    assert RunFolder.open(tmp_path).records("ape")["c0-0"].answer == "yes"


def test_each_text_is_kept_once(tmp_path: Path) -> None:
    with folder_at(tmp_path) as folder:
        folder.add([RECORD], [TEXT, "other", TEXT])
    with folder_at(tmp_path) as folder:
        folder.add([RECORD], ["other", TEXT])
    lines = (tmp_path / "passages.jsonl").read_text().splitlines()
    assert [json.loads(line)["passage"] for line in lines] == [TEXT, "other"]


@pytest.mark.parametrize("cut", [1, 20, -3])
def test_a_torn_last_line_is_dropped_and_told(tmp_path: Path, cut: int) -> None:
    path = filled(tmp_path)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(whole + lines[0][:cut])
    reading = RunFolder.open(tmp_path)
    assert len(reading.records("ape")) == 2
    assert "has no end and was dropped" in reading.notes[0]
    assert path.read_bytes() != whole, "who only reads changes nothing"
    with folder_at(tmp_path) as folder:
        assert str(path) in folder.notes[0]
        folder.add([SPEED])
    assert path.read_bytes() == whole + lines[1]


def test_a_file_that_is_one_torn_line_is_empty(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "x.jsonl")
    lines.path.write_bytes(b'{"a": "' + b"x" * 200_000)
    assert list(lines) == []
    assert lines.torn == 200_007
    lines.repair()
    assert lines.path.read_bytes() == b""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2: not valid JSON"),
        ("[]", "line 2: Input should be an object"),
        ("[" * 100_000, "line 2: lists and objects are nested too deeply"),
        ('{"kind": "row"}', "line 2, kind: Input should be 'record' or 'speed'"),
        ('{"kind": "record", "key": "k", "arm": "ape"}', "line 2, answer: Field required"),
        (
            '{"kind": "record", "key": 1, "arm": "ape", "answer": ""}',
            "line 2, key: Input should be a valid string",
        ),
        ('{"kind": "speed", "key": "k", "arm": "ape", "hot": 1}', "line 2, context_tokens: Field"),
        (
            '{"kind": "record", "key": "k", "arm": "ape", "answer": "", "hot": 1}',
            "line 2, hot: Unexpected keyword argument",
        ),
        ('{"kind": "record", "key": "k", "arm": "linked", "answer": ""}', "does not name"),
        (
            '{"kind": "record", "key": "k", "arm": "ape", "answer": "", "passages": [{}]}',
            "line 2, passages 1, text: Field required",
        ),
        (
            '{"kind": "record", "key": "k", "arm": "ape", "answer": "", "left_out": "x"}',
            "line 2, left_out: Input should be a valid integer",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, told: str) -> None:
    path = filled(tmp_path)
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first, line, *rest]) + "\n")
    for attempt in (RunFolder.open, folder_at):
        with pytest.raises(DataError) as raised:
            attempt(tmp_path)
        assert str(raised.value).startswith(f"{path}, line 2")
        assert told in str(raised.value)


def test_a_changed_passage_is_noticed(tmp_path: Path) -> None:
    filled(tmp_path)
    path = tmp_path / "passages.jsonl"
    path.write_text(path.read_text().replace("lion", "bear"))
    with pytest.raises(DataError, match="line 1: the passage is not the one"):
        RunFolder.open(tmp_path)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with folder_at(tmp_path):
        with pytest.raises(InputError, match="Another process is writing"):
            folder_at(tmp_path)
        assert RunFolder.open(tmp_path).records("ape") == {}
    folder_at(tmp_path).close()


def test_who_only_reads_can_not_add(tmp_path: Path) -> None:
    filled(tmp_path)
    with pytest.raises(DataError, match="reading only"):
        RunFolder.open(tmp_path).add([SPEED])


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(tmp_path)
    before = path.read_bytes()
    write = os.write

    def half(descriptor: int, data: memoryview) -> int:
        if len(data) < 60:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: len(data) // 2])

    with folder_at(tmp_path) as folder:
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(DataError, match="No space left on device"):
            folder.add([RECORD])
        assert path.read_bytes() == before
        monkeypatch.undo()
        folder.add([SPEED])
    assert len(path.read_bytes().splitlines()) == 4


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no manifest\.json"):
        RunFolder.open(tmp_path)
    (tmp_path / "report.md").write_text("mine")
    with pytest.raises(DataError, match=r"holds report\.md but no manifest"):
        folder_at(tmp_path, fresh=True)
    assert (tmp_path / "report.md").read_text() == "mine"


def test_fresh_removes_only_what_is_ours(tmp_path: Path) -> None:
    filled(tmp_path)
    ours = ["scores.json", "report.html", "report.md", "predictions/ape.json"]
    others = ["notes.txt", "predictions/mine.json", "index/photo.png"]
    for name in (*ours, *others):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    with folder_at(tmp_path, fresh=True) as folder:
        assert folder.records("ape") == {}
        assert len(folder.texts) == 0
    assert not any((tmp_path / name).exists() for name in ours)
    assert all((tmp_path / name).exists() for name in others)


def test_names_of_arms_lead_nowhere_else(tmp_path: Path) -> None:
    with folder_at(tmp_path) as folder:
        paths = [folder.predictions(name) for name in ("../../x", "a/b", "..", "a_b", "ape@20")]
    assert len(set(paths)) == 5
    assert all(path.parent == tmp_path / "predictions" for path in paths)
    assert paths[-1].name == "ape@20.json"
