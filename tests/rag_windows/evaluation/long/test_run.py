"""A sweep on the shipped reader: found among eight passages, and read from one encoding."""

from __future__ import annotations

from pathlib import Path

from rag_windows import PassageCache, WindowedLM
from rag_windows.evaluation.asking import Generating, run
from rag_windows.evaluation.long import LongOptions, LongTask
from rag_windows.evaluation.run import Manifest, RunFolder, RunOptions, arms
from rag_windows.methods import resolve


def test_the_reader_finds_needles_among_eight_passages(tmp_path: Path) -> None:
    options = LongOptions(sizes=(1, 8), depths=(0.0, 0.5, 1.0), questions=5)
    task = LongTask.open(options=options)
    assert len(task.examples) == 5 * 4
    assert len({one.key for one in task.examples}) == 20
    compared = arms([(name, resolve(name)) for name in ("pcw", "ape")], [None])
    asked = RunOptions.of(task)
    with PassageCache("100MB") as cache:
        lm = WindowedLM.from_pretrained("tiny-reader", cache=cache)
        manifest = Manifest.of(lm, task, compared, {"retriever": "given"}, asked)
        with RunFolder.begin(tmp_path / "run", manifest) as folder:
            outcome = run(
                lm,
                task,
                compared,
                lambda one: one.passages or (),
                folder,
                answerer=Generating(asked),
            )
            assert outcome.failed == ()
            pcw, ape = (
                [folder.records(one.name)[example.key] for example in task.examples]
                for one in compared
            )
    contained, exact, most_read = task.scores(task.examples, pcw)
    assert (contained.name, exact.name, most_read.name) == task.metrics
    assert exact.value >= 90
    assert contained.value >= exact.value
    assert most_read.value >= 90
    assert [one.details["size"] for one in task.examples[:4]] == [1, 8, 8, 8]
    # A window is the same wherever it stands: 5 needles with 7 others, some of them in common.
    assert sum(one.windows_encoded for one in pcw) <= 5 * 8
    assert sum(one.windows_reused for one in pcw) >= 5 * (3 * 8 + 1) - 5 * 8
    assert sum(one.windows_encoded for one in ape) == 0
    # And so is the answer, with equal positions for all windows.
    for start in range(0, 20, 4):
        assert len({one.answer for one in pcw[start + 1 : start + 4]}) == 1
