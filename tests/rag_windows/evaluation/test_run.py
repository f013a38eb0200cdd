"""A run answers everything once, keeps what comes, and goes on where it stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rag_windows import (
    InputError,
    MissingExtraError,
    ModelError,
    Passage,
    PassageCache,
    RetrievalError,
    WindowedLM,
)
from rag_windows.evaluation.asking import Answered, Asked, Generating, run
from rag_windows.evaluation.record import ReadPassage, Record, digest_of
from rag_windows.evaluation.run import Arm, RunFolder, RunOptions
from rag_windows.evaluation.task import Example
from tests.rag_windows import small
from tests.rag_windows.evaluation.invented import (
    Invented,
    arms_of,
    begin,
    given,
    go,
    invented,
    untimed,
)

TASK = invented()
ARMS = arms_of("sequential", "ape")


class Counting:
    """Generates, and notes what it was asked; fails or stops where it is told to."""

    def __init__(self, fail: str = "", stop_after: int = 10_000, batch: int = 1) -> None:
        self._generating = Generating(RunOptions.of(TASK))
        self.batch = batch
        self.asked: list[tuple[str, str]] = []
        self.calls = 0
        self._fail = fail
        self._stop_after = stop_after

    def answer(self, lm: WindowedLM, arm: Arm, asked: Sequence[Asked]) -> list[Answered]:
        self.calls += 1
        if len(self.asked) >= self._stop_after:
            raise KeyboardInterrupt
        if any(example.key == self._fail for example, _ in asked):
            raise InputError(f"{self._fail} can't be asked.")
        self.asked += [(example.key, arm.name) for example, _ in asked]
        return self._generating.answer(lm, arm, asked)


def everything(task: Invented = TASK, compared: Sequence[Arm] = ARMS) -> list[tuple[str, str]]:
    return [(one.key, arm.name) for one in task.examples for arm in compared]


def test_every_arm_answers_an_example_before_the_next(tmp_path: Path) -> None:
    answerer, told = Counting(), []
    outcome = go(
        tmp_path,
        small.lm(),
        TASK,
        ARMS,
        answerer=answerer,
        progress=lambda done, total: told.append((done, total)),
    )
    assert (outcome.answered, outcome.kept, outcome.failed) == (12, 0, ())
    assert answerer.asked == everything()
    assert told == [(done, 12) for done in range(13)]


def test_records_hold_what_generate_gave(tmp_path: Path) -> None:
    go(tmp_path, small.lm(), TASK, ARMS)
    folder, example = RunFolder.open(tmp_path), TASK.examples[3]
    for arm in ARMS:
        given_back = small.lm().generate(
            list(example.messages),
            given(example),
            prefix="Answer.",
            method=arm.method,
            max_new_tokens=4,
            do_sample=False,
        )
        found = folder.records(arm.name)[example.key]
        assert found.answer == given_back.text
        assert found.finish_reason == given_back.finish_reason
        assert found.prompt_tokens == given_back.usage.prompt_tokens
        assert found.completion_tokens == given_back.usage.completion_tokens
        masses = [one.mass for one in found.passages]
        assert masses == pytest.approx([one.mass for one in given_back.citations or ()])
        shares = [*masses, found.prefix_mass, found.query_mass]
        assert sum(one or 0.0 for one in shares) == pytest.approx(1, abs=1e-3)
        assert 0 < found.encode_s < found.ttft_s <= found.total_s
        assert [(one.id, one.title) for one in found.passages] == [
            (one.id, one.title) for one in given(example)
        ]
        assert [folder.texts[one.text] for one in found.passages] == [
            one.text for one in given(example)
        ]
    read = folder.records("ape")[example.key].passages
    assert [one.spans for one in read] == [((0, len(one.text)),) for one in given(example)]
    assert all(one.spans == () for one in folder.records("sequential")[example.key].passages)


def test_a_long_passage_has_a_span_for_each_window(tmp_path: Path) -> None:
    long = Passage("Kadan keeps a lion, and a hare beside it. " * 30, "p", score=2.5)
    example = replace(TASK.examples[0], passages=(long, Passage(" "), long))
    go(tmp_path, small.lm(), Invented([example]), arms_of("pcw"))
    record = RunFolder.open(tmp_path).records("pcw")[example.key]
    first, blank, again = record.passages
    assert first.spans[0][0] == 0
    assert first.spans[-1][1] == len(long.text)
    ends = [end for _, end in first.spans[:-1]]
    assert ends == [start for start, _ in first.spans[1:]] != []
    assert blank.spans == again.spans == ()
    assert first.score == 2.5
    assert len(record.notes) == 3


def test_depths_take_the_top_of_the_ranking(tmp_path: Path) -> None:
    asked: list[str] = []

    def ranking(example: Example) -> Sequence[Passage]:
        asked.append(example.key)
        return given(example)

    compared = arms_of("ape", depths=(1, 3, None))
    with begin(tmp_path, small.lm(), TASK, compared) as folder:
        run(small.lm(), TASK, compared, ranking, folder, answerer=Generating(RunOptions.of(TASK)))
        counts = {arm.name: len(folder.records(arm.name)["c0-0"].passages) for arm in compared}
    assert counts == {"ape@1": 1, "ape@3": 3, "ape": 3}
    assert asked == [example.key for example in TASK.examples], "once an example"


@pytest.mark.parametrize("batch", [1, 4])
def test_an_interrupted_run_goes_on(tmp_path: Path, batch: int) -> None:
    undisturbed, stopped = tmp_path / "a", tmp_path / "b"
    go(undisturbed, small.lm(), TASK, ARMS, answerer=Counting(batch=batch))
    first = Counting(stop_after=5, batch=batch)
    with pytest.raises(KeyboardInterrupt):
        go(stopped, small.lm(), TASK, ARMS, answerer=first)
    second, told = Counting(batch=batch), []
    outcome = go(
        stopped,
        small.lm(),
        TASK,
        ARMS,
        answerer=second,
        progress=lambda done, total: told.append(done),
    )
    assert sorted(first.asked + second.asked) == sorted(everything())
    assert outcome.kept == len(first.asked) == told[0]
    assert outcome.answered == len(second.asked)
    one, other = RunFolder.open(undisturbed), RunFolder.open(stopped)
    for arm in ARMS:
        expected = {key: untimed(found) for key, found in one.records(arm.name).items()}
        assert {k: untimed(found) for k, found in other.records(arm.name).items()} == expected
    third = Counting(batch=batch)
    assert go(stopped, small.lm(), TASK, ARMS, answerer=third).kept == 12
    assert third.asked == []


@pytest.mark.parametrize("batch", [1, 4])
def test_an_error_of_one_question_is_kept_and_asked_again(tmp_path: Path, batch: int) -> None:
    outcome = go(tmp_path, small.lm(), TASK, ARMS, answerer=Counting(fail="c1-1", batch=batch))
    assert [(one.key, one.arm) for one in outcome.failed] == [
        ("c1-1", "sequential"),
        ("c1-1", "ape"),
    ]
    assert outcome.answered == 10
    kept = RunFolder.open(tmp_path).records("ape")
    assert kept["c1-1"].error == "c1-1 can't be asked."
    assert all(kept[key].error is None for key in kept if key != "c1-1")
    again = Counting(batch=batch)
    outcome = go(tmp_path, small.lm(), TASK, ARMS, answerer=again)
    assert again.asked == [("c1-1", "sequential"), ("c1-1", "ape")]
    assert (outcome.answered, outcome.kept, outcome.failed) == (2, 10, ())
    assert RunFolder.open(tmp_path).records("ape")["c1-1"].error is None


def test_an_error_of_the_ranking_is_one_of_the_question(tmp_path: Path) -> None:
    def ranking(example: Example) -> Sequence[Passage]:
        if example.key == "c0-0":
            raise RetrievalError("Nothing to search for.")
        return given(example)

    with begin(tmp_path, small.lm(), TASK, ARMS) as folder:
        outcome = run(
            small.lm(), TASK, ARMS, ranking, folder, answerer=Generating(RunOptions.of(TASK))
        )
    assert [one.error for one in outcome.failed] == ["Nothing to search for."] * 2


@pytest.mark.parametrize(
    "error", [ModelError("x"), MissingExtraError("x"), MemoryError(), RuntimeError("device")]
)
def test_what_concerns_the_whole_run_stops_it(tmp_path: Path, error: BaseException) -> None:
    class Failing(Counting):
        def answer(self, lm: WindowedLM, arm: Arm, asked: Sequence[Asked]) -> list[Answered]:
            if len(self.asked) == 3:
                raise error
            return super().answer(lm, arm, asked)

    with pytest.raises(type(error)):
        go(tmp_path, small.lm(), TASK, ARMS, answerer=Failing())
    folder = RunFolder.open(tmp_path)
    assert sum(len(folder.records(arm.name)) for arm in ARMS) == 3


def test_the_second_method_encodes_nothing_that_the_first_encoded(tmp_path: Path) -> None:
    lm = small.lm().with_cache(PassageCache(memory="64MB"))
    compared = arms_of("pcw", "ape", depths=(2, 3))
    go(tmp_path, lm, TASK, compared)
    folder = RunFolder.open(tmp_path)
    for example in TASK.examples:
        both = [
            (found.windows_encoded, found.windows_reused)
            for arm in compared
            for found in [folder.records(arm.name)[example.key]]
        ]
        assert sum(both[0]) == sum(both[1]) == 2
        assert sum(both[2]) == sum(both[3]) == 3
        assert both[1] == (0, 2)
        assert both[3] == (0, 3)
        assert both[2][0] <= 1
    encoded = sum(found.windows_encoded for found in folder.records("pcw@2").values())
    assert encoded > 0
    different = {one.id for example in TASK.examples for one in given(example)}
    total = sum(r.windows_encoded for arm in compared for r in folder.records(arm.name).values())
    assert total == len(different), "each passage is encoded once in the whole run"


def test_windows_are_counted_without_a_cache(tmp_path: Path) -> None:
    go(tmp_path, small.lm(), TASK, ARMS)
    folder = RunFolder.open(tmp_path)
    assert {r.windows_encoded for r in folder.records("ape").values()} == {3}
    assert {r.windows_encoded for r in folder.records("sequential").values()} == {1}
    assert {r.windows_reused for arm in ARMS for r in folder.records(arm.name).values()} == {0}


def test_answers_may_come_from_elsewhere(tmp_path: Path) -> None:
    class Choosing:
        batch = 4

        def answer(self, lm: WindowedLM, arm: Arm, asked: Sequence[Asked]) -> list[Answered]:
            return [
                Answered(
                    Record(
                        example.key,
                        arm.name,
                        "lion",
                        "chosen",
                        (ReadPassage.of(passages[0], 0.5),),
                        scores={"lion": -0.1},
                    ),
                    (passages[0].text,),
                )
                for example, passages in asked
            ]

    go(tmp_path, small.lm(), TASK, ARMS, answerer=Choosing())
    folder = RunFolder.open(tmp_path)
    found = folder.records("ape")["c2-1"]
    assert (found.answer, found.finish_reason, found.scores) == ("lion", "chosen", {"lion": -0.1})
    assert found.passages[0].text == digest_of(given(TASK.examples[4])[0].text)
    assert folder.texts[found.passages[0].text] == given(TASK.examples[4])[0].text


def test_a_folder_of_other_arms_is_refused(tmp_path: Path) -> None:
    with (
        begin(tmp_path, small.lm(), TASK, ARMS) as folder,
        pytest.raises(InputError, match="is a run of sequential, ape"),
    ):
        run(small.lm(), TASK, ARMS[:1], given, folder, answerer=Generating(RunOptions.of(TASK)))
