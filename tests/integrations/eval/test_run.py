"""A run answers everything once, keeps what comes, and goes on where it stopped."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rag_windows import (
    DataError,
    InputError,
    MissingExtraError,
    ModelError,
    Passage,
    RetrievalError,
    WindowedLM,
)
from rag_windows_eval import run, task
from tests.integrations.eval.invented import (
    Invented,
    arms_of,
    begin,
    given,
    go,
    invented,
)
from tests.rag_windows import small
from tests.retrievers.small import CORPUS, WordEncoder

TASK = invented()
ARMS = arms_of("sequential", "ape")
OPTIONS = run.Generating.of(TASK)


class Counting:
    """Generates, and notes what it was asked; fails at a question, or at the fourth."""

    def __init__(self, fail: str = "", error: BaseException | None = None) -> None:
        self.asked: list[tuple[str, str]] = []
        self._fail, self._error = fail, error

    def __call__(
        self, lm: WindowedLM, arm: run.Condition, asked: Sequence[Any]
    ) -> list[run.Answered]:
        if self._error and len(self.asked) == 3:
            raise self._error
        if any(example.key == self._fail for example, _ in asked):
            raise InputError(f"{self._fail} can't be asked.")
        self.asked += [(example.key, arm.name) for example, _ in asked]
        return OPTIONS.answer(lm, arm, asked)


EVERYTHING = [(one.key, arm.name) for one in TASK.examples for arm in ARMS]


def test_records_hold_what_generate_gave(tmp_path: Path) -> None:
    answerer, told = Counting(), []
    failed = go(
        *(tmp_path, small.lm(), TASK, ARMS),
        answerer=answerer,
        progress=lambda done, total: told.append((done, total)),
    )
    assert failed == []
    assert answerer.asked == EVERYTHING, "every arm answers an example before the next"
    assert told == [(done, 12) for done in range(13)]
    folder, example = run.RunFolder.open(tmp_path), TASK.examples[3]
    passages = given(example)
    for arm in ARMS:
        asked = list(example.messages)
        made = small.lm().generate(
            asked, passages, prefix="Answer.", method=arm.method, max_new_tokens=4
        )
        found = folder.records[arm.name][example.key]
        assert (found.answer, found.finish_reason) == (made.text, made.finish_reason)
        assert found.prompt_tokens == made.usage.prompt_tokens
        masses = [one.mass for one in found.passages]
        assert masses == pytest.approx([one.mass for one in made.citations or ()])
        assert 0 < found.encode_s < found.ttft_s <= found.total_s
        assert [(one.id, one.title, folder.texts[one.text]) for one in found.passages] == [
            (one.id, one.title, one.text) for one in passages
        ]
    read = folder.records["ape"][example.key].passages
    assert [one.spans for one in read] == [((0, len(one.text)),) for one in passages]


def test_a_long_passage_has_a_span_for_each_window(tmp_path: Path) -> None:
    long = Passage("Kadan keeps a lion, and a hare beside it. " * 30, "p", score=2.5)
    example = replace(TASK.examples[0], passages=(long, Passage(" "), long))
    go(tmp_path, small.lm(), Invented(examples=[example]), arms_of("pcw"))
    record = run.RunFolder.open(tmp_path).records["pcw"][example.key]
    first, blank, again = record.passages
    assert (first.spans[0][0], first.spans[-1][1]) == (0, len(long.text))
    assert [end for _, end in first.spans[:-1]] == [start for start, _ in first.spans[1:]] != []
    assert blank.spans == again.spans == ()
    assert (first.score, len(record.notes)) == (2.5, 3)


@pytest.mark.parametrize(
    ("sizes", "read"), [((300, 300, 300, 300), 3), ((300, 900, 10), 1), ((440, 440, 140, 1), 2)]
)
def test_what_does_not_fit_in_order_is_left_out_and_counted(
    tmp_path: Path, sizes: tuple[int, ...], read: int
) -> None:
    # One byte is one token in the small model, which has 1024 positions.
    passages = tuple(Passage(chr(97 + n) * size, f"p{n}") for n, size in enumerate(sizes))
    example = replace(TASK.examples[0], passages=passages)
    go(tmp_path, small.lm(), Invented(examples=[example]), ARMS)
    folder = run.RunFolder.open(tmp_path)
    record = folder.records["sequential"][example.key]
    assert [one.id for one in record.passages] == [f"p{n}" for n in range(read)]
    assert (record.error, record.left_out) == (None, len(sizes) - read)
    beside = folder.records["ape"][example.key]
    assert (len(beside.passages), beside.left_out) == (len(sizes), 0)


@pytest.mark.parametrize("batch", [1, 4])
def test_an_error_of_one_question_is_kept_and_asked_again(tmp_path: Path, batch: int) -> None:
    failing, again = Counting(fail="c1-1"), Counting()
    found = go(tmp_path, small.lm(), TASK, ARMS, answerer=failing, batch=batch)
    failed = [("c1-1", "sequential"), ("c1-1", "ape")]
    assert [(one.key, one.arm) for one in found] == failed
    kept = run.RunFolder.open(tmp_path).records["ape"]
    assert [one.error for one in kept.values() if one.error] == ["c1-1 can't be asked."]
    assert go(tmp_path, small.lm(), TASK, ARMS, answerer=again, batch=batch) == []
    assert again.asked == failed


def test_rankings_are_asked_once_and_their_errors_are_the_questions(tmp_path: Path) -> None:
    asked: list[str] = []

    def ranking(example: Any) -> Sequence[Passage]:
        asked.append(example.key)
        if example.key == "c2-2":
            raise RetrievalError("Nothing to search for.")
        return given(example)

    compared = arms_of("ape", depths=(1, 3, None))
    failed = go(tmp_path, small.lm(), TASK, compared, ranking=ranking)
    folder = run.RunFolder.open(tmp_path)
    counts = {arm.name: len(folder.records[arm.name]["c0-0"].passages) for arm in compared}
    assert counts == {"ape@1": 1, "ape@3": 3, "ape": 3}
    assert asked[:5] == [example.key for example in TASK.examples[:5]], "once an example"
    assert [one.error for one in failed] == ["Nothing to search for."] * 3


@pytest.mark.parametrize(
    "error", [ModelError("x"), MissingExtraError("x"), MemoryError(), RuntimeError("device")]
)
def test_what_concerns_the_whole_run_stops_it(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        go(tmp_path, small.lm(), TASK, ARMS, answerer=Counting(error=error))
    assert sum(len(run.RunFolder.open(tmp_path).records[arm.name]) for arm in ARMS) == 3


# The folder.

TEXT = "Kadan keeps a lion. \u2028 Grüße \x1b[31m"
RECORD = task.AnswerRecord(
    *("c0-0", "ape", "a lion\u2028 \n"),
    passages=(task.ReadPassage(task.digest_of(TEXT), "p1", None, 1.5, 0.25, ((0, 4), (4, 9))),),
    left_out=2,
    prefix_mass=0.5,
    scores={"yes": -0.5, "no": float("-inf")},
    notes=("one",),
)


def folder_at(path: Path, fresh: bool = False) -> Any:
    return begin(path, small.lm(), TASK, ARMS, fresh=fresh)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    with folder_at(tmp_path) as folder:
        folder.add([(RECORD, [TEXT, "other", TEXT])])
        folder.add([(task.AnswerRecord("c1-0", "ape", "", error="no"), ())])
        folder.add([(task.AnswerRecord("c1-0", "ape", "yes"), [TEXT])])
    return tmp_path / "records.jsonl"


def test_what_is_added_is_read_back(filled: Path) -> None:
    found = run.RunFolder.open(filled.parent)
    assert found.records["ape"] == {"c0-0": RECORD, "c1-0": task.AnswerRecord("c1-0", "ape", "yes")}
    assert found.records["sequential"] == {}
    assert list(found.texts.values()) == [TEXT, "other"]


@pytest.mark.parametrize(
    ("name", "old", "new", "told"),
    [
        ("records.jsonl", "\n", "\n{\n", "line 2: Invalid JSON"),
        ("records.jsonl", '"answer"', '"hot"', "line 1, answer: Field required"),
        ("records.jsonl", '"ape"', '"linked"', "line 1: \"arm\" is 'linked'"),
        ("passages.jsonl", "lion", "bear", "line 1: the passage was changed"),
        ("manifest.json", "evaluation run", "x", "format: Input should be 'rag-windows evaluation"),
    ],
)
def test_damage_is_named(filled: Path, name: str, old: str, new: str, told: str) -> None:
    path = filled.with_name(name)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(DataError) as raised:
        run.RunFolder.open(filled.parent)
    assert str(raised.value).startswith(f"{path}, {told}")


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with folder_at(tmp_path):
        with (
            pytest.raises(InputError, match="Wait for the process that writes"),
            folder_at(tmp_path),
        ):
            pass
        assert run.RunFolder.open(tmp_path).records["ape"] == {}
    with folder_at(tmp_path):
        pass


def test_a_full_disk_leaves_whole_lines(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = filled.read_bytes()

    def full(descriptor: int) -> None:
        os.ftruncate(descriptor, len(before) + 60)
        raise OSError(errno.ENOSPC, "No space left on device")

    with folder_at(filled.parent) as folder, monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DataError, match="No space left on device"):
            folder.add([(RECORD, ())])
    with folder_at(filled.parent) as folder:
        assert filled.read_bytes() == before
        with pytest.raises(DataError, match="float32"):
            folder.add([(replace(RECORD, prefix_mass=float("nan")), ())])
    assert filled.read_bytes() == before


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"manifest\.json can't be read"):
        run.RunFolder.open(tmp_path)
    (tmp_path / "records.jsonl").write_text("mine")
    with pytest.raises(InputError, match="but no manifest"), folder_at(tmp_path, fresh=True):
        pass
    assert (tmp_path / "records.jsonl").read_text() == "mine"


def test_fresh_removes_what_is_ours_and_nothing_else(filled: Path) -> None:
    for name in ("scores.json", "report.md", "predictions/ape.json", "notes.txt"):
        (filled.parent / name).parent.mkdir(exist_ok=True)
        (filled.parent / name).write_text("x")
    with folder_at(filled.parent, fresh=True) as folder:
        assert (folder.records["ape"], folder.texts) == ({}, {})
    assert {one.name for one in filled.parent.iterdir()} == {".lock", "manifest.json", "notes.txt"}


# Which passages a question is read with.

CORPUS_TASK = replace(TASK, pool=CORPUS)


def example(*said: str, **details: Any) -> Any:
    roles = ["user", "assistant"] * len(said)
    messages = tuple({"role": r, "content": c} for r, c in zip(roles, said, strict=False))
    return replace(CORPUS_TASK.examples[0], messages=messages, details=details)


def ids(passages: Sequence[Passage] | None) -> list[str | None]:
    return [one.id for one in passages or ()]


def test_the_conversation_is_the_query_without_a_styles_wording(tmp_path: Path) -> None:
    search = run.Search("bm25", 1)
    ranker = search.over(CORPUS_TASK, tmp_path)
    assert ids(ranker(example("When was it?"))) == ["bridge"]
    assert ids(ranker(example("Is there a harbour?", "Yes.", "Behind what?"))) == ["harbour"]
    bare = [{"role": "user", "content": "Who sells bread?"}]
    assert ids(ranker(example("Answer over lakes: bread?", conversation=bare))) == ["bread"]
    query = {"turns": 3, "weight": 3}
    assert search.settings == {"retriever": "bm25", "depth": 1, "query": query}


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_vectors_are_kept_and_embedded_once(tmp_path: Path, kind: Any) -> None:
    first, again, asked = WordEncoder(), WordEncoder(), example("bakers sell bread")
    ranker = run.Search(kind, 2, first).over(CORPUS_TASK, tmp_path / "index")
    second = run.Search(kind, 2, again)
    assert ids(second.over(CORPUS_TASK, tmp_path / "index")(asked)) == ids(ranker(asked))
    assert len(first.asked) >= len(CORPUS) > len(again.asked)
    assert ids(ranker(asked))[0] == "bread"
    assert second.settings["embedder"] == "words"
