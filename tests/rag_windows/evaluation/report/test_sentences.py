"""Verdicts and counters in words."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rag_windows.evaluation.report.tables import troubles, verdicts
from rag_windows.evaluation.report.text import heading, metric_name
from rag_windows.evaluation.statistics import Estimate
from rag_windows.evaluation.summary import Against, ArmSummary, Counters, Result, Summary

BASE = Estimate(21.0, 19.0, 23.0)
KEPT = Estimate(98.1, 95.2, 101.3)


def arm(name: str, against: Against | None = None, **counted: int) -> ArmSummary:
    label, _, depth = name.partition("@")
    none = dict.fromkeys(Counters.__dataclass_fields__, 0)
    result = Result("response_f1", 100, BASE, against)
    counts = Counters(**{**none, **counted})
    return ArmSummary(name, label, int(depth), (result,), (), (), counts, None, ())


def summary(*arms: ArmSummary, **other: object) -> Summary:
    made = Summary("t", ("response_f1",), 100, 100, 20, {}, arms, ())
    return replace(made, **other)  # type: ignore[arg-type]  # fields by name


def against(p: float | None, holm: float | None, difference: float = -0.4) -> Against:
    kept = KEPT if difference < 0 else Estimate(110.0, 104.0, 118.0)
    return Against("sequential@20", Estimate(difference, -1.0, 0.3), kept, p, holm)


@pytest.mark.parametrize(
    ("p", "holm", "difference", "tone", "end"),
    [
        (0.41, 0.41, -0.4, "same", "no difference shown, p = 0.41."),
        (0.41, 0.82, -0.4, "same", "no difference shown, p = 0.41 (corrected = 0.82)."),
        (0.003, 0.006, -2.0, "worse", "a loss of 2.0 points is shown, p = 0.003 (corrected"),
        (0.0001, 0.0001, 3.0, "better", "a gain of 3.0 points is shown, p < 0.001."),
        (0.03, 0.09, -2.0, "same", "no difference shown once all arms are tested together"),
        (None, None, -2.0, "same", "the difference was not tested."),
        (math.nan, math.nan, -2.0, "same", "the difference was not tested."),
    ],
)
def test_a_verdict_says_what_the_test_says(
    p: float | None, holm: float | None, difference: float, tone: str, end: str
) -> None:
    found = verdicts(summary(arm("sequential@20"), arm("ape@20", against(p, holm, difference))))
    plain = found[1].text.replace("\u00a0", " ")
    if difference < 0:
        assert plain.startswith("ape@20 keeps 98.1% (95.2 to 101.3) of sequential@20's response F1")
    assert end in plain
    assert (found[0].tone, found[1].tone) == ("base", tone)


def test_nothing_is_kept_of_nothing() -> None:
    none = Against("sequential@20", Estimate(3.0), Estimate(math.nan), 0.2, 0.2)
    text = verdicts(summary(arm("sequential@20"), arm("ape@20", none)))[1].text
    assert "nan" not in text
    assert "sequential@20 has none that could be kept" in text


def test_fewer_passages_stand_behind() -> None:
    found = verdicts(summary(arm("sequential@20"), arm("ape@5", against(0.5, 0.5)), arm("ape@20")))
    assert [one.deepest for one in found] == [True, False, True]


def test_no_verdict_without_answers() -> None:
    assert verdicts(summary(arm("ape@20"), compared=0)) == []


def test_counters_speak_only_when_something_happened() -> None:
    assert troubles(summary(arm("ape@20"))) == []
    loud = arm("ape@20", errors=1, unfinished=2, left_out_passages=7, left_out_questions=3)
    text = " ".join(troubles(summary(loud, compared=98, missing={"ape@20": 2, "pcw@20": 0})))
    for words in (
        "Not finished: answers are missing (ape@20 2). All figures are of the 98 of 100 questions",
        "no answer to 1 question because of an error",
        "2 answers of ape@20 ended at the limit",
        "left out 7 passages in 3 questions",
    ):
        assert words in text
    assert "pcw" not in text


def test_metrics_have_names_for_readers() -> None:
    assert metric_name("response_f1") == "response F1"
    assert heading("bleu") == "BLEU"
    assert heading("answerable_accuracy") == "Answerable accuracy"
