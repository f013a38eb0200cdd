"""Row: kill -9 while an evaluation writes, and between two answers.

Must show: at most one answer is asked again, and the run ends as one that nobody disturbed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_windows import Passage, PassageCache, WindowedLM
from rag_windows.evaluation import run, task
from tests.rag_windows.cache.disk_cases import FULL, end_of, in_child
from tests.rag_windows.evaluation.invented import Invented, arms_of, given, go, untimed
from training.tasks import draw_case

QUESTIONS = 4
ARMS = arms_of("pcw", "ape")
RECORDS = QUESTIONS * len(ARMS)
MOMENTS = 60 if FULL else 3

Found = dict[str, list[task.Record]]
Evaluate = Callable[[Path], list[task.Record]]


def invented() -> Invented:
    """Questions about names that the embedded reader has never seen."""
    rng = np.random.default_rng(7)
    made = []
    for number in range(QUESTIONS):
        case = draw_case(rng, "single", 2)
        passages = tuple(
            Passage(text, f"p{number}-{place}", title)
            for place, (title, text) in enumerate(case.passages)
        )
        reference = (task.Reference(case.answer),)
        made.append(task.Example(f"q{number}", case.messages, reference, "g", passages=passages))
    return Invented(made, prefix=None, max_new_tokens=8)


TASK = invented()


@pytest.fixture(scope="module")
def evaluate() -> Evaluate:
    """Runs the evaluation in a folder, with an empty cache."""
    lm = WindowedLM.from_pretrained("tiny-reader")
    return lambda folder: go(folder, lm.with_cache(PassageCache(memory="64MB")), TASK, ARMS)


@pytest.fixture(scope="module")
def undisturbed(evaluate: Evaluate, tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    evaluate(folder)
    answers = found(folder)
    references = [one.references[0].text for one in TASK.examples]
    assert [one.answer for one in answers["ape"]] == references, "the reader reads"
    return answers


def dying(evaluate: Evaluate, folder: Path, call: str, at: int, half: bool) -> Callable[[], Any]:
    """The evaluation, until SIGKILL at a call of the operating system on one of its files.

    Args:
        evaluate: runs it.
        folder: to run in.
        call: "write" or "fsync".
        at: which of them, from 1.
        half: whether a half of what is to be written is written before.
    """
    real: Callable[..., Any] = getattr(os, call)
    count = 0

    def called(descriptor: int, *data: memoryview) -> Any:
        nonlocal count
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".jsonl"):
            count += 1
            if count == at:
                if half:
                    real(descriptor, data[0][: len(data[0]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
        return real(descriptor, *data)

    def work() -> None:
        setattr(os, call, called)
        evaluate(folder)

    return work


def found(folder: Path) -> Found:
    """What a run answered, without what differs from run to run.

    That is seconds, and what a cache that died with the process can't give the next one.
    """
    kept = run.RunFolder.open(folder)
    return {
        arm.name: [
            replace(untimed(record), windows_encoded=0, windows_reused=0, cached_tokens=0)
            for record in kept.records(arm.name).values()
        ]
        for arm in ARMS
    }


def lines(folder: Path) -> int:
    path = folder / "records.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def check_after(evaluate: Evaluate, folder: Path, undisturbed: Found) -> None:
    """Whole lines are kept, and the next run adds the rest and nothing else."""
    assert evaluate(folder) == []
    assert lines(folder) == RECORDS, "nothing was asked twice"
    assert found(folder) == undisturbed
    kept = run.RunFolder.open(folder)
    assert not kept.notes
    for arm in ARMS:
        for example in TASK.examples:
            read = kept.records(arm.name)[example.key].passages
            assert [kept.texts[one.text] for one in read] == [one.text for one in given(example)]
    assert len((folder / "passages.jsonl").read_bytes().splitlines()) == 2 * QUESTIONS


@pytest.mark.parametrize(
    ("call", "at", "half", "kept"),
    [
        # The first answer to an example writes its passages, then itself; the second only itself.
        ("write", 1, True, 0),
        ("write", 2, False, 0),
        ("write", 2, True, 0),
        ("fsync", 2, False, 1),
        ("write", 6, True, 3),
        ("fsync", 12, False, 8),
    ],
)
def test_killed_while_it_writes(
    tmp_path: Path,
    evaluate: Evaluate,
    undisturbed: Found,
    call: str,
    at: int,
    half: bool,
    kept: int,
) -> None:
    folder = tmp_path / "run"
    child = in_child(dying(evaluate, folder, call, at, half))
    assert end_of(child) == -signal.SIGKILL
    assert lines(folder) == kept
    check_after(evaluate, folder, undisturbed)


def test_killed_at_any_moment(tmp_path: Path, evaluate: Evaluate, undisturbed: Found) -> None:
    draw = random.Random(3)
    for number in range(MOMENTS):
        folder = tmp_path / str(number)
        child = in_child(lambda folder=folder: evaluate(folder))  # type: ignore[misc] # a default binds the loop's variable
        wanted = draw.randrange(1, RECORDS - 2)
        deadline = time.monotonic() + 120
        while lines(folder) < wanted and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        assert end_of(child) in (-signal.SIGKILL, 0)
        assert wanted <= lines(folder)
        check_after(evaluate, folder, undisturbed)


def test_killed_again_and_again(tmp_path: Path, evaluate: Evaluate, undisturbed: Found) -> None:
    folder = tmp_path / "run"
    for before in range(3):
        # The third write of each attempt is cut in half, so each adds one answer at least.
        child = in_child(dying(evaluate, folder, "write", 3, True))
        assert end_of(child) == -signal.SIGKILL
        assert lines(folder) > before
    check_after(evaluate, folder, undisturbed)
