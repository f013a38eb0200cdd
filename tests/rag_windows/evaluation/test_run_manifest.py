"""A run goes on with the same settings only, and says what differs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rag_windows import APE, DataError, InputError, WindowedLM
from rag_windows.evaluation import machine
from rag_windows.evaluation.files import read
from rag_windows.evaluation.run import Arm, Manifest, RunFolder, RunOptions
from tests.rag_windows import small
from tests.rag_windows.evaluation.invented import arms_of, begin, invented

TASK = invented()
ARMS = arms_of("sequential", "ape", depths=(2,))
OTHER = WindowedLM.from_pretrained(small.model(1), tokenizer=small.tokenizer(), header="none")


def test_the_same_settings_go_on(tmp_path: Path) -> None:
    begin(tmp_path, small.lm(), TASK, ARMS).close()
    before = (tmp_path / "manifest.json").read_bytes()
    begin(tmp_path, small.lm(), invented(), ARMS).close()
    assert (tmp_path / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"lm": OTHER}, ["model.sha256 is", "model.header is 'title' there and 'none' now"]),
        ({"task": replace(TASK, settings={"seed": 2})}, ["task.seed is 1 there and 2 now"]),
        ({"task": invented(2)}, ["examples.count is 6 there and 3 now"]),
        (
            {"compared": (ARMS[0], Arm("ape", APE(scale=0.7), 2))},
            ["arms.ape@2.method.scale is 0.9 there and 0.7 now"],
        ),
        ({"compared": ARMS[:1]}, ["arms.ape@2.top_k is 2 there and not set now"]),
        ({"retriever": {"kind": "bm25"}}, ["retriever.kind is 'given' there and 'bm25' now"]),
        (
            {"options": RunOptions("Say it.", 9, seed=3)},
            [
                "prefix is 'Answer.' there and 'Say it.' now",
                "max_new_tokens is 4 there and 9 now",
                "seed is 0 there and 3 now",
            ],
        ),
    ],
)
def test_other_settings_are_refused(
    tmp_path: Path, changed: dict[str, Any], told: list[str]
) -> None:
    plain: dict[str, Any] = {"lm": small.lm(), "task": TASK, "compared": ARMS}
    begin(tmp_path, **plain).close()
    with pytest.raises(InputError) as raised:
        begin(tmp_path, **{**plain, **changed})
    assert all(one in str(raised.value) for one in told)
    assert "--fresh" in str(raised.value)
    assert "--out" in str(raised.value)
    begin(tmp_path, **{**plain, **changed}, fresh=True).close()
    begin(tmp_path, **{**plain, **changed}).close()


def test_another_version_is_told_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = machine.surroundings()
    before = now["transformers"]
    later = {**now, "transformers": "9.9.9"}
    begin(tmp_path, small.lm(), TASK, ARMS).close()
    monkeypatch.setattr("rag_windows.evaluation.run.surroundings", lambda: later)
    with begin(tmp_path, small.lm(), TASK, ARMS) as folder:
        assert folder.notes == (
            f"{tmp_path}: earlier answers were made with transformers {before}, now 9.9.9.",
        )
    with begin(tmp_path, small.lm(), TASK, ARMS) as folder:
        assert folder.notes == ()
    made = RunFolder.open(tmp_path).manifest.made_with
    assert [one["transformers"] for one in made] == [before, "9.9.9"]
    assert made[0]["torch"] == str(torch.__version__)


def test_it_reads_what_it_wrote(tmp_path: Path) -> None:
    made = Manifest.of(small.lm(), TASK, ARMS, {}, RunOptions.of(TASK))
    made.write(tmp_path / "manifest.json")
    found = read(tmp_path / "manifest.json").json(Manifest)
    assert found == made
    assert (found.task, [one.name for one in found.arms]) == ("invented", ["sequential@2", "ape@2"])
    assert found.keys == tuple(example.key for example in TASK.examples)


@pytest.mark.parametrize(
    ("entry", "value", "told"),
    [
        ("format", "x", "format: Input should be 'rag-windows evaluation run'"),
        ("version", 2, "version: Input should be 1"),
        ("settings", [], "settings: Input should be an object"),
        ("settings", {"task": {}}, 'settings: "task" must be an object with a "name"'),
        ("settings", {"task": {"name": "x"}}, 'settings: "arms" must be an object'),
        ("keys", [1], "keys 1: Input should be a valid string"),
    ],
)
def test_damage_is_named(tmp_path: Path, entry: str, value: object, told: str) -> None:
    path = tmp_path / "manifest.json"
    made = Manifest.of(small.lm(), TASK, ARMS, {}, RunOptions.of(TASK))
    path.write_text(json.dumps({**made.model_dump(), entry: value}))
    with pytest.raises(DataError, match=told) as raised:
        RunFolder.open(tmp_path)
    assert str(path) in str(raised.value)


def test_options_are_the_tasks_own_but_for_what_is_given() -> None:
    assert RunOptions.of(TASK) == RunOptions("Answer.", 4)
    assert RunOptions.of(TASK, prefix="", max_new_tokens=7) == RunOptions(None, 7)
    with pytest.raises(InputError, match="at least 1"):
        RunOptions.of(TASK, max_new_tokens=0)
