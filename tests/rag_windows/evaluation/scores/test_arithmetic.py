from __future__ import annotations

import pytest

from rag_windows.evaluation.metrics import holds_result


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        ("It is 25587.0 in all", 25587.0),
        ("It is 25,587 in all", 25587.0),
        ("$25,587 million", 25587.0),
        ("It is 60", 60),
        ("about 0.148", 0.14785),
        ("about 0.14", 0.14173),
        ("a decrease of 10.5 billion", -10.5),
        ("They decreased by 3", -3),
        ("yes, it did", "yes"),
        ("12 - 7 gives it", 99.0),
        ("12 (2017) - 7 (2016)", 99.0),
        ("$12 million - $7   million", 99.0),
        ("12 billion - 7 billion", 99.0),
    ],
)
def test_what_is_right(answer: str, result: float | str) -> None:
    assert holds_result(answer, "How much?", result, "12 - 7")


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        ("", 5.0),
        ("about 0.1", 0.14173),
        ("It is 14.173", 0.14173),
        ("It fell by 10.5", -10.5),
        ("12 (in 2017) - 7", 99.0),
        ("12-7", 99.0),
        ("no", "yes"),
        ("It is 60.5", 61.0),
    ],
)
def test_what_is_wrong(answer: str, result: float | str) -> None:
    assert not holds_result(answer, "How much?", result, "12 - 7")


@pytest.mark.parametrize(
    ("answer", "result"),
    [("14.785", 0.14785), ("14.17%", 0.14173), ("14.2", 0.14173), ("50.0", 0.5)],
)
def test_a_percentage_counts_where_one_is_asked_for(answer: str, result: float) -> None:
    assert holds_result(answer, "By what percentage did it rise?", result, "f")
    assert holds_result(answer, "by what percent?", result, "f")
    assert not holds_result(answer, "By what share did it rise?", result, "f")


def test_a_blank_result_or_formula_is_found_nowhere() -> None:
    assert not holds_result("anything at all", "How much?", "", "")
    assert not holds_result("anything at all", "How much?", " ", "  ")
    assert holds_result("anything at all", "How much?", "all", "")


@pytest.mark.parametrize("result", [10**400, float("inf"), "yes", "1e400", -(10**30)])
def test_odd_results_break_nothing(result: float | str) -> None:
    assert not holds_result("a decrease", "what percent?", result, "f")


def test_numbers_that_came_as_text_count_as_numbers() -> None:
    assert holds_result("It is 80", "How much?", "80.0", "f")
    assert holds_result("a decrease of 7.5", "How much?", "-7.5", "f")
