"""Row: kill -9 while an evaluation writes.

Must show: at most one answer is asked again, and the run ends as one that nobody disturbed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rag_windows import PassageCache
from rag_windows_eval import run, task
from tests.integrations.eval.invented import arms_of, given, go, invented
from tests.rag_windows import small
from tests.rag_windows.cache.disk_cases import end_of, in_child

TASK, ARMS = invented(2), arms_of("pcw", "ape")
RECORDS = len(TASK.examples) * len(ARMS)
TEXTS = {one.text for example in TASK.examples for one in given(example)}

Found = dict[str, list[task.AnswerRecord]]
Evaluate = Callable[[Path], list[task.AnswerRecord]]


@pytest.fixture(scope="module")
def evaluate() -> Evaluate:
    """Runs the evaluation in a folder, with an empty cache."""
    lm = small.lm()
    return lambda folder: go(folder, lm.with_cache(PassageCache(memory="64MB")), TASK, ARMS)


@pytest.fixture(scope="module")
def undisturbed(evaluate: Evaluate, tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    evaluate(folder)
    return found(folder)


def dying(evaluate: Evaluate, folder: Path, at: int, share: float) -> Callable[[], Any]:
    """The evaluation, until SIGKILL in its so-manieth addition to a file of lines, from 1.

    So much of the last line is on the disk by then, from 0 to 1.
    """
    real, count = os.fsync, 0

    def called(fd: Any) -> None:
        nonlocal count
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path.endswith(".jsonl"):
            count += 1
            if count == at:
                whole = Path(path).read_bytes()
                start = whole[:-1].rfind(b"\n") + 1
                os.ftruncate(fd, start + int(share * (len(whole) - start)))
                os.kill(os.getpid(), signal.SIGKILL)
        real(fd)

    def work() -> None:
        os.fsync = called
        evaluate(folder)

    return work


def found(folder: Path) -> Found:
    """What a run answered, without what differs from run to run.

    That is seconds, what a cache that died with the process can't give the next one, and the last
    bits of attention: windows are encoded with others beside them than before.
    """
    kept = run.RunFolder.open(folder)
    names = ("encode_s", "ttft_s", "total_s", "windows_encoded", "windows_reused", "cached_tokens")
    nothing: dict[str, Any] = dict.fromkeys(names, 0)

    def plain(one: task.AnswerRecord) -> task.AnswerRecord:
        passages = tuple(replace(read, mass=round(read.mass or 0, 4)) for read in one.passages)
        masses: dict[str, Any] = {
            name: round(getattr(one, name) or 0, 4) for name in ("prefix_mass", "query_mass")
        }
        return replace(one, passages=passages, **nothing, **masses)

    return {arm.name: [plain(one) for one in kept.records[arm.name].values()] for arm in ARMS}


def lines(folder: Path) -> int:
    path = folder / "records.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def check_after(evaluate: Evaluate, folder: Path, undisturbed: Found) -> None:
    """Whole lines are kept, and the next run adds the rest and nothing else."""
    assert evaluate(folder) == []
    assert lines(folder) == RECORDS, "nothing was asked twice"
    assert found(folder) == undisturbed
    kept = run.RunFolder.open(folder)
    for arm in ARMS:
        for example in TASK.examples:
            read = kept.records[arm.name][example.key].passages
            assert [kept.texts[one.text] for one in read] == [one.text for one in given(example)]
    assert len((folder / "passages.jsonl").read_bytes().splitlines()) == len(TEXTS)


@pytest.mark.parametrize(
    ("at", "share", "kept"),
    # The first answer to an example adds its passages, then itself; the second only itself.
    [(1, 0.5, 0), (6, 0.5, 3), (9, 1.0, 6)],
)
def test_killed_while_it_writes(
    tmp_path: Path, evaluate: Evaluate, undisturbed: Found, at: int, share: float, kept: int
) -> None:
    folder = tmp_path / "run"
    child = in_child(dying(evaluate, folder, at, share))
    assert end_of(child) == -signal.SIGKILL
    assert lines(folder) == kept
    check_after(evaluate, folder, undisturbed)
