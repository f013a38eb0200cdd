"""A whole run on the shipped learner, with pairs of words and labels that it never saw."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rag_windows import PassageCache, WindowedLM
from rag_windows.evaluation.asking import run
from rag_windows.evaluation.icl import IclOptions, IclTask
from rag_windows.evaluation.run import Manifest, RunFolder, RunOptions, arms
from rag_windows.methods import resolve
from training.samples import Demonstrations, draw_demonstrations


def made_up(path: Path) -> Path:
    """A task of 64 demonstrations and 20 texts."""
    recipe = Demonstrations(8, labels=(4, 4), keywords=(1, 3), questions=20)
    sample = draw_demonstrations(np.random.default_rng(7000), recipe, "held-out")
    rows = []
    for line in (line for _, text in sample.passages for line in text.split("\n")):
        text, _, label = line.rpartition(": ")
        rows.append({"text": text, "label": label, "split": "train"})
    for turn in sample.turns:
        text = turn.question.removesuffix(":")
        rows.append({"text": text, "label": turn.answer, "split": "test"})
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_demonstrations_beat_the_blind_reader_by_far(tmp_path: Path) -> None:
    task = IclTask.open(str(made_up(tmp_path / "made-up.jsonl")), options=IclOptions())
    methods = [(name, resolve(name)) for name in ("sequential", "pcw", "ape")]
    compared = arms(methods[:1], [0]) + arms(methods, [64])
    options = RunOptions.of(task)
    with PassageCache("100MB") as cache:
        lm = WindowedLM.from_pretrained("tiny-learner", cache=cache)
        manifest = Manifest.of(lm, task, compared, {"retriever": "given"}, options)
        with RunFolder.begin(tmp_path / "run", manifest) as folder:
            outcome = run(
                lm,
                task,
                compared,
                lambda example: example.passages or (),
                folder,
                answerer=task.answerer(options.prefix),
            )
            assert outcome.failed == ()
            found = {
                one.name: [folder.records(one.name)[example.key] for example in task.examples]
                for one in compared
            }
    accuracy = {name: task.scores(task.examples, rows)[0].value for name, rows in found.items()}
    for name in ("sequential", "pcw", "ape"):
        assert accuracy[f"{name}@64"] >= 95
    assert accuracy["sequential@0"] <= 60
    assert task.baselines["chance"] == pytest.approx(25)
    assert sum(one.windows_encoded for one in found["pcw@64"]) == 8
    assert sum(one.windows_encoded for one in found["ape@64"]) == 0
