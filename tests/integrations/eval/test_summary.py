"""Figures, intervals and tests of a small invented run: three methods at two depths."""

from __future__ import annotations

import json
import math
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rag_windows_eval import run, summary, task
from tests.integrations.eval.invented import Invented

ARMS = tuple(
    run.Condition(label, None, top_k) for top_k in (2, 4) for label in ("sequential", "ape", "pcw")
)
KINDS = ("answer", "clarification")


# Twelve talks of three questions; the last question of a talk names no evidence.
HARBOUR = Invented(
    examples=[
        task.TaskExample(
            key=f"{talk}/{turn}",
            messages=({"role": "user", "content": f"Question {turn}?"},),
            references=(task.Reference("yes", None, (f"p{talk}.{turn}",) if turn < 2 else ()),),
            group=f"talk {talk}",
            kinds=(KINDS[turn % 2],),
        )
        for talk in range(12)
        for turn in range(3)
    ]
)
KEYS = [example.key for example in HARBOUR.examples]


def records_of() -> dict[str, dict[str, task.AnswerRecord]]:
    """Sequential knows most; four passages hold the evidence of every even talk."""
    found: dict[str, dict[str, task.AnswerRecord]] = {}
    chance = {"sequential": 0.9, "ape": 0.7, "pcw": 0.5}
    for arm in ARMS:
        rng = random.Random(arm.name)
        found[arm.name] = {}
        for example in HARBOUR.examples:
            talk, turn = map(int, example.key.split("/"))
            ids = ["a", "b", f"p{talk}.{turn}" if talk % 2 == 0 else "c", "d"][: arm.top_k]
            found[arm.name][example.key] = task.AnswerRecord(
                *(example.key, arm.name, "yes" if rng.random() < chance[arm.label] else "no"),
                finish_reason="length" if turn == 1 else "stop",
                passages=tuple(task.ReadPassage("digest", id=name) for name in ids),
                prompt_tokens=100,
                windows_encoded=3,
                windows_reused=1,
                encode_s=0.1,
                ttft_s=0.25,
                total_s=0.5,
            )
    return found


def summarised(records: dict[str, dict[str, task.AnswerRecord]]) -> summary.Summary:
    """Of a run that kept these."""
    settings = {
        "task": {"name": "harbour"},
        "arms": {one.name: {"top_k": one.top_k} for one in ARMS},
    }
    with tempfile.TemporaryDirectory() as path:
        manifest = run.Manifest(settings=settings, made_with=({},), keys=())
        folder = run.RunFolder(Path(path), manifest)
        folder.add([(one, ()) for found in records.values() for one in found.values()])
        return summary.summarise(HARBOUR, run.RunFolder(Path(path), manifest))


@pytest.fixture(scope="module")
def made() -> summary.Summary:
    return summarised(records_of())


def arm_of(found: summary.Summary, name: str) -> summary.Summary:
    return next(one for one in found["arms"] if one["name"] == name)


def share(name: str, keys: list[str]) -> float:
    found = records_of()[name]
    return float(100 * np.mean([found[key].answer == "yes" for key in keys]))


def test_values_are_those_of_the_task(made: summary.Summary) -> None:
    assert (made["examples"], made["compared"], made["groups"]) == (36, 36, 12)
    for arm in made["arms"]:
        (right,) = arm["results"]
        assert (right["metric"], right["n"]) == ("exact", 36)
        assert right["estimate"].value == pytest.approx(share(arm["name"], KEYS))
        assert right["estimate"].low <= right["estimate"].value <= right["estimate"].high
    assert "NaN" not in json.dumps(summary.as_json(made))


def test_every_arm_is_compared_with_sequential_at_its_depth(made: summary.Summary) -> None:
    assert all(arm_of(made, f"sequential@{n}")["results"][0]["against"] is None for n in (2, 4))
    own, base = share("pcw@4", KEYS), share("sequential@4", KEYS)
    against = arm_of(made, "pcw@4")["results"][0]["against"]
    assert against["base"] == "sequential@4"
    assert against["difference"].value == pytest.approx(own - base)
    assert against["retention"].value == pytest.approx(100 * own / base)
    assert against["difference"].high < 0
    assert against["p"] < 0.05
    assert against["p"] < against["p_holm"]
    arms = [run.Condition("ape", None, 5), *ARMS, run.Condition("pcw")]
    assert [run.base_of(arms, place) for place in range(8)] == [0, 1, 1, 1, 4, 4, 4, 0]


def test_results_by_kind_and_by_retrieval(made: summary.Summary) -> None:
    answer, other = arm_of(made, "ape@4")["kinds"]
    assert [(one["label"], one["examples"]) for one in (answer, other)] == [
        *(("answer", 24), ("clarification", 12)),
    ]
    keys = [key for key in KEYS if not key.endswith("/1")]
    right = answer["results"][0]
    assert right["n"] == 24
    assert right["estimate"].value == pytest.approx(share("ape@4", keys))
    kept = 100 * share("ape@4", keys) / share("sequential@4", keys)
    assert right["against"]["retention"].value == pytest.approx(kept)
    assert math.isnan(right["against"]["p"])
    shallow, deep = made["retrieval"]
    # Evidence stands third, in every even talk.
    assert (shallow["top_k"], shallow["n"], shallow["hit"].value) == (2, 24, 0)
    assert (deep["top_k"], deep["n"], deep["hit"].value, deep["recall"].value) == (4, 24, 50, 50)
    found, missed = arm_of(made, "ape@4")["retrieval"]
    assert [(one["label"], one["examples"]) for one in (found, missed)] == [
        *(("found", 12), ("missed", 12)),
    ]
    even = [k for k in KEYS if int(k.split("/")[0]) % 2 == 0 and not k.endswith("/2")]
    assert found["results"][0]["estimate"].value == pytest.approx(share("ape@4", even))
    nothing, _ = arm_of(made, "ape@2")["retrieval"]
    assert (nothing["examples"], math.isnan(nothing["results"][0]["estimate"].value)) == (0, True)


def test_counters_and_times(made: summary.Summary) -> None:
    arm = arm_of(made, "pcw@2")
    found = arm["counters"]
    assert (found["windows_encoded"], found["windows_reused"]) == (108, 36)
    assert (found["prompt_tokens"], found["errors"], found["unfinished"]) == (3600, 0, 12)
    assert arm["times"] == {"encode_s": 0.1, "ttft_s": 0.25, "total_s": 0.5}
    assert math.isnan(arm["cold_s"])
    records = records_of()
    for place, key in enumerate(KEYS[:4]):
        encoded, reused = ((3, 0), (0, 3))[place % 2]
        one = replace(records["pcw@2"][key], windows_encoded=encoded, windows_reused=reused)
        records["pcw@2"][key] = replace(one, ttft_s=float(place))
    arm = arm_of(summarised(records), "pcw@2")
    assert (arm["cold_s"], arm["warm_s"]) == (1, 2)


def test_an_unfinished_run_is_compared_on_what_all_arms_have() -> None:
    records = records_of()
    for key in KEYS[30:]:
        del records["pcw@4"][key]
    del records["ape@2"]["0/0"]
    made = summarised(records)
    assert made["missing"] == {one.name: {"pcw@4": 6, "ape@2": 1}.get(one.name, 0) for one in ARMS}
    assert (made["examples"], made["compared"], made["groups"]) == (36, 29, 10)
    right = arm_of(made, "sequential@2")["results"][0]
    assert right["n"] == 29
    assert right["estimate"].value == pytest.approx(share("sequential@2", KEYS[1:30]))
    nothing = summarised({})
    assert (nothing["compared"], nothing["retrieval"], nothing["arms"][0]["results"]) == (0, [], [])
    assert nothing["arms"][0]["times"] is None


def test_errors_count_as_wrong_and_what_was_left_out_is_no_fault_of_the_retriever() -> None:
    records = records_of()
    for arm in ARMS:
        one = records[arm.name]["0/0"]
        records[arm.name]["0/0"] = replace(one, answer="", error="no", passages=())
    one = records["ape@2"]["1/0"]
    records["ape@2"]["1/0"] = replace(one, answer="", error="no", passages=(), total_s=99.0)
    for name in ("sequential@4", "pcw@4"):
        for key, one in records[name].items():
            records[name][key] = replace(one, passages=one.passages[:1], left_out=3)
    made = summarised(records)
    # No arm could read the first question; another arm of that depth could read the other one.
    assert [found["n"] for found in made["retrieval"]] == [23, 23]
    assert made["retrieval"][1]["hit"].value == pytest.approx(100 * 11 / 23)
    assert arm_of(made, "ape@2")["counters"]["errors"] == 2
    assert arm_of(made, "ape@2")["times"] == arm_of(made, "pcw@2")["times"]
    counters = arm_of(made, "pcw@4")["counters"]
    assert (counters["left_out_passages"], counters["left_out_questions"]) == (3 * 36, 36)


# Intervals and tests.


def means(*arms: task.Array) -> task.Array:
    """(groups, arms, 2) of one value a group, or of groups' mean values."""
    values = np.stack([arm.reshape(len(arm), -1).sum(axis=1) for arm in arms], axis=1)
    return np.stack([values, np.full_like(values, arms[0][0].size)], axis=2)


def of(sums: task.Array, arm: int = 0) -> summary.Estimate:
    values, drawn = summary.bootstrap(sums, task.ratio)
    return summary.estimate(values[arm], drawn[arm])


def kept(sums: task.Array) -> summary.Estimate:
    """The second arm in percent of the first."""
    values, drawn = summary.bootstrap(sums, task.ratio)
    shares = summary.percent(drawn[1], drawn[0])
    return summary.estimate(summary.percent(values[1], values[0]), shares)


def p_of(sums: task.Array, formula: task.Formula = task.ratio) -> list[float]:
    """Of all arms but the first, against the first."""
    base, *others = np.moveaxis(sums, 1, 0)
    return [summary.p_value(own, base, formula) for own in others]


def test_intervals_hold_the_truth_about_as_often_as_they_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(summary, "RESAMPLES", 400)
    rng = np.random.default_rng(7)
    runs, inside, alone = 200, 0, 0
    for _ in range(runs):
        # Each group has a level of its own, so that its four values go together.
        values = 50 + 10 * rng.normal(size=(40, 1)) + 5 * rng.normal(size=(40, 4))
        found, ungrouped = of(means(values)), of(means(values.reshape(-1, 1)))
        inside += found.low <= 50 <= found.high
        alone += ungrouped.low <= 50 <= ungrouped.high
    assert 0.89 <= inside / runs <= 0.99
    # What the groups are for: single values drawn apart would promise too much.
    assert alone / runs < 0.8


def test_draws_are_shared_so_that_differences_are_paired() -> None:
    base = 100 * np.random.default_rng(1).random((60, 3))
    values, drawn = summary.bootstrap(means(base, base + 2), task.ratio)
    gain = summary.estimate(values[1] - values[0], drawn[1] - drawn[0])
    assert (gain.value, gain.low, gain.high) == pytest.approx((2, 2, 2))
    same, quarter = kept(means(base, base)), kept(means(base, base / 4))
    assert (same.value, same.low, same.high) == (100, 100, 100)
    assert (quarter.value, quarter.low, quarter.high) == pytest.approx((25, 25, 25))


def test_where_there_is_no_interval() -> None:
    base = np.zeros((20, 1))
    assert math.isnan(kept(means(base, base + 3)).value)
    base[0] = 100
    # Many draws have no base.
    found = kept(means(base, base + 3))
    assert found.value == pytest.approx(160)
    assert not found.bounded
    assert not of(means(np.array([[30.0, 50.0]]))).bounded
    assert of(np.array([[[300.0, 3.0]], [[0.0, 1.0]]])).value == 75, "groups count by their size"


def test_p_where_it_is_known() -> None:
    rng = np.random.default_rng(8)
    base, same = rng.random(60), np.arange(5.0)
    assert p_of(means(base, base + 0.2 + 0.01 * rng.random(60))) == [1 / 10_000], "never 0"
    assert p_of(means(same, same, same[::-1])) == [1.0, 1.0]
    assert p_of(means(np.array([1.0]), np.array([90.0]))) == [1.0]
    # Eight answers that all gained; in two groups they say no more than two answers would.
    assert p_of(means(np.zeros(8), np.ones(8))) == [2 / 2**8]
    assert p_of(np.array([[[0.0, 4.0], [4.0, 4.0]]] * 2)) == [0.5]
    unknown = means(np.ones(4), np.ones(4))
    unknown[:, 1] = 0
    assert np.isnan(p_of(unknown)).all()


def test_holm() -> None:
    found = summary.holm(np.array([math.nan, 0.01, 0.04, 0.03, 0.005]))
    assert found == pytest.approx([math.nan, 0.03, 0.06, 0.06, 0.02], nan_ok=True)
    assert summary.holm(np.array([0.6, 0.9])) == [1.0, 1.0]
