"""From a run's folder to its report."""

from __future__ import annotations

from pathlib import Path

from rag_windows.evaluation.files import write_whole
from rag_windows.evaluation.report import reported
from rag_windows.evaluation.run import Manifest, RunFolder
from rag_windows.evaluation.summary import summarise
from tests.rag_windows.evaluation.report import invented


def test_a_folder_is_read(tmp_path: Path) -> None:
    task = invented.Asked(tuple(invented.example(place) for place in range(4)))
    compared = invented.arms(("sequential", "ape"), (2,))
    settings = {
        "task": {"name": "invented"},
        "model": {"name": "m"},
        "arms": {arm.name: {"method": {}, "top_k": arm.top_k} for arm in compared},
    }
    keys = tuple(one.key for one in task.examples)
    manifest = Manifest(settings=settings, keys=keys, made_with=({"machine": "one core"},))
    texts: dict[str, str] = {}
    with RunFolder.begin(tmp_path / "run", manifest) as folder:
        for arm in compared:
            made = [
                invented.record(one, place, arm, texts, 2)
                for place, one in enumerate(task.examples[:3])
            ]
            folder.add(made, texts.values())
    write_whole(tmp_path / "run" / "other.txt", "not of the run")
    opened = RunFolder.open(tmp_path / "run")
    found = reported(task, opened, summarise(task, opened), command="again")
    assert (found.title, found.command) == ("run", "again")
    assert found.summary.compared == 3
    assert found.summary.missing == {"sequential@2": 1, "ape@2": 1}
    assert len(found.records) == 6
    assert found.metric == "response_f1"
    assert len(found.values) == 6
    assert dict(found.texts) == texts
    assert found.date.endswith("UTC")


def test_the_first_metric_of_single_answers_counts() -> None:
    run = invented.run(methods=("ape",), depths=(2,), questions=2, passages=2, timed=False)
    assert run.metric == "response_f1"
    value = run.values["ape@2", run.examples[0].key]
    assert value == 100 * float(run.records["ape@2", run.examples[0].key].answer.split()[-1])
