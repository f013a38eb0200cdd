"""First tokens are timed cold and warm, on examples far apart, and once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rag_windows import Passage, PassageCache, RetrievalError
from rag_windows.evaluation.asking import evenly, measure_speed
from rag_windows.evaluation.run import RunFolder, RunOptions
from rag_windows.evaluation.task import Example
from tests.rag_windows import small
from tests.rag_windows.evaluation.invented import arms_of, begin, given, invented

TASK = invented()
ARMS = arms_of("sequential", "ape", depths=(2,))
OPTIONS = RunOptions.of(TASK)


@pytest.mark.parametrize(
    ("count", "keys"),
    [
        (1, ["c0-0"]),
        (2, ["c0-0", "c2-2"]),
        (3, ["c0-0", "c1-1", "c2-2"]),
        (5, ["c0-0", "c1-0", "c1-1", "c2-0", "c2-2"]),
        (6, [one.key for one in TASK.examples]),
        (99, [one.key for one in TASK.examples]),
    ],
)
def test_examples_are_evenly_spaced(count: int, keys: list[str]) -> None:
    assert [one.key for one in evenly(TASK.examples, count)] == keys
    assert evenly([], count) == []


def test_rounds_are_kept_for_each_arm(tmp_path: Path) -> None:
    own = PassageCache(memory="64MB")
    lm = small.lm().with_cache(own)
    told: list[tuple[int, int]] = []
    with begin(tmp_path, lm, TASK, ARMS) as folder:
        notes = measure_speed(
            lm,
            TASK,
            ARMS,
            given,
            folder,
            3,
            options=OPTIONS,
            rounds=2,
            progress=lambda done, total: told.append((done, total)),
        )
    found = RunFolder.open(tmp_path)
    assert notes == ()
    assert told == [(0, 6), (2, 6), (4, 6)]
    for arm in ARMS:
        speeds = found.speeds(arm.name)
        assert list(speeds) == ["c0-0", "c1-1", "c2-2"]
        for speed in speeds.values():
            assert len(speed.cold_s) == len(speed.warm_s) == 2
            assert min(*speed.cold_s, *speed.warm_s) > 0
            # A byte is a token: header, text, and the line breaks around them.
            texts = given(next(one for one in TASK.examples if one.key == speed.key))[:2]
            expected = sum(len(one.text) + len(one.title or "") + 3 for one in texts)
            assert speed.context_tokens == expected
    assert own.stats().misses == own.stats().hits == 0, "the model's own cache is left alone"


def test_warm_windows_are_not_encoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []

    class Watched(PassageCache):
        def clear(self) -> None:
            seen.append((self.stats().misses, self.stats().hits))
            super().clear()

    monkeypatch.setattr("rag_windows.evaluation.asking.PassageCache", Watched)
    compared = arms_of("ape", depths=(2,))
    with begin(tmp_path, small.lm(), TASK, compared) as folder:
        measure_speed(small.lm(), TASK, compared, given, folder, 2, options=OPTIONS, rounds=3)
    # Two windows and the prefix are encoded once an example, and found in each of three rounds.
    assert seen == [(3, 9), (6, 18)]


def test_what_was_timed_is_not_timed_again(tmp_path: Path) -> None:
    def measure(count: int) -> None:
        with begin(tmp_path, small.lm(), TASK, ARMS) as folder:
            measure_speed(small.lm(), TASK, ARMS, given, folder, count, options=OPTIONS, rounds=1)

    measure(2)
    before = dict(RunFolder.open(tmp_path).speeds("ape@2"))
    measure(3)
    after = RunFolder.open(tmp_path).speeds("ape@2")
    assert list(after) == ["c0-0", "c2-2", "c1-1"]
    assert {key: after[key] for key in before} == before


def test_what_can_not_be_timed_is_told(tmp_path: Path) -> None:
    def ranking(example: Example) -> Sequence[Passage]:
        if example.key == "c0-0":
            raise RetrievalError("Nothing to search for.")
        return given(example)

    with begin(tmp_path, small.lm(), TASK, ARMS) as folder:
        notes = measure_speed(small.lm(), TASK, ARMS, ranking, folder, 2, options=OPTIONS, rounds=1)
        assert list(folder.speeds("ape@2")) == ["c2-2"]
    assert notes == ("c0-0: not timed: Nothing to search for.",)
