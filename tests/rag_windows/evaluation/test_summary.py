from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_windows.evaluation.record import ReadPassage, digest_of
from rag_windows.evaluation.run import Arm, Manifest, RunFolder, base_of
from rag_windows.evaluation.summary import ArmSummary, Result, Summary, summarise, summarise_records
from rag_windows.evaluation.task import Reference
from tests.rag_windows.evaluation.summaries import (
    ARMS,
    HarbourTask,
    records_of,
    speeds_of,
)

TASK = HarbourTask()


@pytest.fixture(scope="module")
def summary() -> Summary:
    return summarise_records(TASK, ARMS, records_of(TASK), speeds_of())


def arm_of(summary: Summary, name: str) -> ArmSummary:
    return next(one for one in summary.arms if one.name == name)


def result(summary: Summary, name: str, metric: int = 0) -> Result:
    return arm_of(summary, name).results[metric]


def share(name: str, keys: list[str]) -> float:
    found = records_of(TASK)[name]
    return float(100 * np.mean([found[key].answer == "yes" for key in keys]))


KEYS = [example.key for example in TASK.examples]


def test_the_frame(summary: Summary) -> None:
    assert (summary.task, summary.metrics) == ("harbour", ("right", "length"))
    assert (summary.examples, summary.compared, summary.groups) == (36, 36, 12)
    assert set(summary.missing.values()) == {0}
    assert [one.name for one in summary.arms] == [one.name for one in ARMS]


def test_values_are_those_of_the_task(summary: Summary) -> None:
    for arm in summary.arms:
        right = arm.results[0]
        assert right.n == 36
        assert right.estimate.value == pytest.approx(share(arm.name, KEYS))
        assert right.estimate.low <= right.estimate.value <= right.estimate.high


def test_every_arm_is_compared_with_sequential_at_its_depth(summary: Summary) -> None:
    assert result(summary, "sequential@2").against is None
    assert result(summary, "sequential@4").against is None
    own, base = share("pcw@4", KEYS), share("sequential@4", KEYS)
    against = result(summary, "pcw@4").against
    assert against is not None
    assert against.base == "sequential@4"
    assert against.difference.value == pytest.approx(own - base)
    assert against.retention.value == pytest.approx(100 * own / base)
    assert against.difference.high < 0
    assert against.p is not None
    assert against.p_holm is not None
    assert against.p < 0.05
    assert against.p < against.p_holm


def test_a_metric_from_sums_has_intervals(summary: Summary) -> None:
    length = result(summary, "ape@2", 1)
    assert length.estimate.bounded
    assert length.against is not None
    assert length.against.p is not None


def test_results_by_kind(summary: Summary) -> None:
    answers = [key for key in KEYS if not key.endswith("/1")]
    kind, other = arm_of(summary, "ape@4").kinds
    assert (kind.label, kind.examples, other.label, other.examples) == (
        "answer",
        24,
        "clarification",
        12,
    )
    right = kind.results[0]
    assert right.n == 24
    assert right.estimate.value == pytest.approx(share("ape@4", answers))
    assert right.against is not None
    kept = 100 * share("ape@4", answers) / share("sequential@4", answers)
    assert right.against.retention.value == pytest.approx(kept)
    assert right.against.p is None


def test_retrieval_beside_quality(summary: Summary) -> None:
    shallow, deep = summary.retrieval
    # Evidence stands third, or second where the ranking is turned round: with two passages it is
    # never read, and with four in every even talk.
    assert (shallow.top_k, shallow.n, shallow.hit.value) == (2, 24, 0)
    assert (deep.top_k, deep.n, deep.hit.value, deep.recall.value) == (4, 24, 50, 50)
    assert deep.hit.bounded
    found, missed = arm_of(summary, "ape@4").retrieval
    assert (found.label, found.examples, missed.label, missed.examples) == (
        "found",
        12,
        "missed",
        12,
    )
    even = [k for k in KEYS if int(k.split("/")[0]) % 2 == 0 and not k.endswith("/2")]
    assert found.results[0].estimate.value == pytest.approx(share("ape@4", even))
    nothing, all_of_them = arm_of(summary, "ape@2").retrieval
    assert (nothing.examples, all_of_them.examples) == (0, 24)
    assert math.isnan(nothing.results[0].estimate.value)


def test_what_an_arm_left_out_is_no_fault_of_the_retriever() -> None:
    records = records_of(TASK)
    for name in ("sequential@4", "pcw@4"):
        for key, one in records[name].items():
            records[name][key] = replace(one, passages=one.passages[:1], left_out=3)
    made = summarise_records(TASK, ARMS, records)
    assert made.retrieval[1].hit.value == 50
    assert arm_of(made, "pcw@4").counters.left_out_passages == 3 * 36
    assert arm_of(made, "pcw@4").counters.left_out_questions == 36
    assert arm_of(made, "ape@4").counters.left_out_passages == 0


def test_counters_times_and_speed(summary: Summary) -> None:
    arm = arm_of(summary, "pcw@2")
    found = arm.counters
    assert (found.windows_encoded, found.windows_reused) == (3 * 36, 36)
    assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (3600, 1440, 72)
    assert (found.errors, found.unfinished) == (0, 12)
    assert arm.times is not None
    assert (arm.times.encode_s, arm.times.ttft_s, arm.times.total_s) == (0.1, 0.25, 0.5)
    bins = [(one.above, one.up_to, one.n, one.tokens) for one in arm.speed]
    assert bins == [(0, 256, 2, 178), (256, 512, 1, 257), (1024, 2048, 1, 2000)]
    # The rounds' medians: 1, 2.56, 2.57 and 20 seconds.
    assert [one.cold_s for one in arm.speed] == pytest.approx([1.78, 2.57, 20])
    assert arm.cold_s == pytest.approx(2.565)
    assert arm.warm_s == arm.speed[0].warm_s == pytest.approx(0.2)


def test_an_unfinished_run_is_compared_on_what_all_arms_have() -> None:
    records = records_of(TASK)
    for key in KEYS[30:]:
        del records["pcw@4"][key]
    del records["ape@2"]["0/0"]
    made = summarise_records(TASK, ARMS, records)
    assert made.missing == {one.name: {"pcw@4": 6, "ape@2": 1}.get(one.name, 0) for one in ARMS}
    assert (made.examples, made.compared, made.groups) == (36, 29, 10)
    right = result(made, "sequential@2")
    assert right.n == 29
    assert right.estimate.value == pytest.approx(share("sequential@2", KEYS[1:30]))
    assert arm_of(made, "sequential@2").counters.windows_encoded == 3 * 29
    assert made.arms[0].speed == ()
    assert math.isnan(made.arms[0].cold_s)


def test_nothing_answered_yet() -> None:
    made = summarise_records(TASK, ARMS, {})
    assert (made.compared, made.groups, made.retrieval) == (0, 0, ())
    first = made.arms[0]
    assert [first.results, first.kinds, first.retrieval] == [()] * 3
    assert made.arms[0].times is None
    assert made.missing["ape@2"] == 36


def test_errors_count_as_wrong_and_tell_nothing_of_retrieval() -> None:
    records = records_of(TASK)
    for arm in ARMS:
        broken = replace(records[arm.name]["0/0"], answer="", error="no", passages=())
        records[arm.name]["0/0"] = broken
    one = records["ape@2"]["1/0"]
    records["ape@2"]["1/0"] = replace(one, answer="", error="no", passages=(), total_s=99.0)
    made = summarise_records(TASK, ARMS, records)
    assert made.compared == 36
    assert arm_of(made, "ape@2").counters.errors == 2
    # No arm could read the first question; another arm of that depth could read the other one.
    assert [found.n for found in made.retrieval] == [23, 23]
    assert arm_of(made, "ape@2").times == arm_of(made, "pcw@2").times


def test_one_conversation_has_values_and_no_intervals() -> None:
    task = HarbourTask(talks=1)
    made = summarise_records(task, ARMS, records_of(task))
    right = result(made, "ape@4")
    assert not right.estimate.bounded
    assert right.against is not None
    assert right.against.p == 1
    assert not right.against.retention.bounded


def test_a_task_without_kinds_and_evidence() -> None:
    task = HarbourTask(talks=4)
    task.examples = [
        replace(one, kinds=(), references=(Reference("yes"),)) for one in task.examples
    ]
    made = summarise_records(task, ARMS, records_of(task))
    assert made.retrieval == ()
    for arm in made.arms:
        assert arm.kinds == ()
        assert arm.retrieval == ()
        assert arm.results[0].estimate.bounded


def test_passages_without_names_tell_nothing() -> None:
    records = records_of(TASK)
    for found in records.values():
        for key, one in found.items():
            found[key] = replace(one, passages=(ReadPassage("digest"),))
    made = summarise_records(TASK, ARMS, records)
    assert [one.hit.value for one in made.retrieval] == [0, 0]


def test_bases() -> None:
    arms = [
        Arm("ape", top_k=5),
        Arm("sequential", top_k=20),
        Arm("ape", top_k=20),
        Arm("pcw"),
    ]
    assert [base_of(arms, place) for place in range(4)] == [0, 1, 1, 0]


def manifest(arms: dict[str, Any]) -> Manifest:
    return Manifest(
        settings={"task": {"name": TASK.name}, "arms": arms}, made_with=({},), keys=tuple(KEYS)
    )


def test_arms_of_a_manifest() -> None:
    first, second = manifest({"deep@2+ape@20": {"top_k": 20}, "pcw": {"top_k": None}}).arms
    assert (first.name, first.label, first.top_k) == ("deep@2+ape@20", "deep@2+ape", 20)
    assert (second.name, second.label, second.top_k) == ("pcw", "pcw", None)


def test_a_folder_of_a_run(tmp_path: Path) -> None:
    records, speeds = records_of(TASK), speeds_of()
    known = manifest({one.name: {"method": {}, "top_k": one.top_k} for one in ARMS})
    with RunFolder.begin(tmp_path, known) as folder:
        read = (ReadPassage(digest_of("A quay."), id="p0.0"),)
        for arm in ARMS:
            found = records[arm.name]
            for key in KEYS:
                found[key] = replace(found[key], passages=read)
            folder.add([found[key] for key in KEYS[:-1]], ["A quay."])
            folder.add(speeds[arm.name])
    made = summarise(TASK, RunFolder.open(tmp_path))
    assert (made.examples, made.compared) == (len(KEYS), len(KEYS) - 1)
    assert set(made.missing.values()) == {1}
    assert [len(arm.speed) for arm in made.arms] == [3] * 6
    kept = {name: {key: found[key] for key in KEYS[:-1]} for name, found in records.items()}
    assert made.dump() == summarise_records(TASK, ARMS, kept, speeds).dump()
    assert "NaN" not in made.dump()
