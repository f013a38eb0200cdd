"""Which texts are asked, what is shown before them, and how answers are counted."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_windows import InputError
from rag_windows.evaluation.icl import IclOptions, IclTask, drawn
from rag_windows.evaluation.icl_data import Item
from rag_windows.evaluation.record import Record


def open_task(folder: Path, count: int = 12, **options: Any) -> IclTask:
    rows = [
        {"text": f"demo {i}", "label": "abbbbb"[i % 6], "split": "train"} for i in range(count)
    ] + [{"text": f"text {i}", "label": "aab"[i % 3], "split": "test"} for i in range(6)]
    path = folder / "some.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return IclTask.open(str(path), options=IclOptions(**options))


def record(key: str, answer: str, error: str | None = None) -> Record:
    return Record(key, "pcw", answer, error=error)


def test_labels_take_turns_until_they_run_out() -> None:
    items = [Item(str(i), str(i), ("a", "b", "c"), 0 if i < 20 else 1 + i % 2) for i in range(26)]
    order = drawn(items, 3, balanced=True)
    assert sorted(one.key for one in order) == sorted(one.key for one in items)
    for start in range(0, 9, 3):
        assert {one.label for one in order[start : start + 3]} == {"a", "b", "c"}
    assert [one.label for one in order[9:]] == ["a"] * 17
    assert order == drawn(items, 3, balanced=True)
    assert order != drawn(items, 4, balanced=True)
    assert Counter(one.label for one in drawn(items, 3, balanced=False)[:9])["a"] > 3
    # Which label leads a round is drawn, too.
    assert len({drawn(items, seed, balanced=True)[0].label for seed in range(20)}) == 3


def test_fewer_demonstrations_are_the_first_of_more(tmp_path: Path) -> None:
    task = open_task(tmp_path, demonstrations=8)
    assert task.shown(4, 0) == task.shown(None, 0)[:4]
    assert len(task.shown(None, 0)) == 8
    assert task.shown(0, 0) == []
    assert task.shown(4, 0) != task.shown(4, 1)
    assert open_task(tmp_path).shown(4, 1) == task.shown(4, 1)
    with pytest.raises(InputError, match="13 demonstrations are asked for, and some has 12"):
        task.shown(13, 0)
    with pytest.raises(InputError, match="Mark lines with"):
        open_task(tmp_path, 0, labels=["a", "b"]).shown(1, 0)


def test_texts_are_asked_once_for_each_seed(tmp_path: Path) -> None:
    plain = open_task(tmp_path).examples
    assert [one.key for one in plain] == [str(i) for i in range(13, 19)]
    assert (plain[0].question, plain[0].kinds, plain[0].choices) == ("text 0", ("a",), ("a", "b"))
    task = open_task(tmp_path, seeds=(5, 2))
    assert len(task.examples) == 12
    assert len({one.key for one in task.examples}) == 12
    assert [one.group for one in task.examples[:6]] == [one.group for one in task.examples[6:]]
    assert task.examples[6].kinds == ("a", "demonstrations of seed 2")
    some = open_task(tmp_path, texts=3)
    assert len(some.examples) == 3
    assert {one.key for one in some.examples} < {one.key for one in plain}
    assert [one.key for one in some.examples] == [
        one.key for one in open_task(tmp_path, texts=3).examples
    ]


def test_settings_tell_what_answers_depend_on(tmp_path: Path) -> None:
    task = open_task(tmp_path, windows=3, calibrate_with=("N/A",))
    assert json.loads(json.dumps(task.settings)) == task.settings
    assert task.settings["baselines"] == {"chance": 50.0, "majority": 66.67}
    assert task.settings["windows"] == 3
    for changed in (
        {"windows": 2},
        {"windows": 3, "seeds": (1,)},
        {"windows": 3, "normalize": "mean"},
    ):
        assert open_task(tmp_path, **changed).settings != task.settings
    assert open_task(tmp_path, 11, windows=3).settings["data"] != task.settings["data"]


def test_scores(tmp_path: Path) -> None:
    task = open_task(tmp_path)
    examples = task.examples
    # a a b a a b
    answers = ["a", "b", "b", "a", "", "zzz"]
    errors = [None, None, None, None, "No.", None]
    records = [
        record(one.key, answer, error)
        for one, answer, error in zip(examples, answers, errors, strict=True)
    ]
    accuracy, macro = task.scores(examples, records)
    assert (accuracy.name, macro.name) == task.metrics
    assert accuracy.value == pytest.approx(50)
    assert accuracy.values == (100, 0, 100, 100, 0, 0)
    # a: 2 hits, 2 misses; b: 1 hit, 1 miss, 1 false alarm.
    assert macro.value == pytest.approx(100 * (2 / 3 + 1 / 2) / 2)
    assert macro.values == (None,) * 6
    sums = np.stack([macro.rows.sum(axis=0), np.zeros(6)])
    first, none = macro.formula(sums)
    assert first == pytest.approx(macro.value)
    assert math.isnan(none)


def test_options_are_checked() -> None:
    for options, message in (
        ({"seeds": ()}, "seeds must be different numbers"),
        ({"seeds": (1, 1)}, "seeds must be different numbers"),
        ({"texts": 0}, "texts must be at least 1"),
        ({"demonstrations": -1}, "demonstrations must be at least 0"),
        ({"windows": 0}, "windows must be at least 1"),
        ({"windows": 2, "window_tokens": 9}, "Give either windows or window_tokens"),
        ({"normalize": "max"}, "must be 'sum' or 'mean'"),
        ({"choices_as": "digits"}, "must be 'text' or 'letters'"),
        ({"calibrate_with": (" ",)}, "calibrate_with must be a list"),
    ):
        with pytest.raises(InputError, match=message):
            IclOptions(**options)


def test_more_choices_than_letters_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    row = {"question": "Which?", "choices": [f"c{i}" for i in range(27)], "answer": 0}
    path.write_text(json.dumps(row), encoding="utf-8")
    assert IclTask.open(str(path)).normalize == "mean"
    with pytest.raises(InputError, match="'1' has 27 choices, more than there are letters"):
        IclTask.open(str(path), options=IclOptions(choices_as="letters"))
