from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rag_windows import DataError, InputError
from rag_windows.evaluation.chatrag import read_answerable
from rag_windows.evaluation.metrics import (
    REFUSING,
    SORRY,
    chatrag_metrics,
    chatrag_scores,
    one_line,
    refuses,
    settled,
)
from tests.rag_windows.evaluation.scores.made import example, values


def one(dataset: str, answer: str, *references: str) -> dict[str, float]:
    return values(chatrag_scores(dataset, [example(*references)], [answer]))


def test_f1_by_hand() -> None:
    # "well known red boat" against "red boat s": two of four and of three.
    assert one("doc2dial", "A well-known red boat", "The red boat's")["f1"] == pytest.approx(
        400 / 7
    )


def test_the_best_reference_counts_and_empty_ones_do_not() -> None:
    assert one("coqa", "red", "", "green", "red boat")["f1"] == pytest.approx(200 / 3)
    scores = chatrag_scores("coqa", [example("", "  "), example("red")], ["red", "green"])
    assert scores[0].values == (None, 0)
    assert scores[0].value == 0


@pytest.mark.parametrize(
    ("answer", "f1"),
    [
        ("red</s>", 100),
        ("  red  ", 100),
        ("r</s>ed", 100),
        ("", 0),
        ("?", 0),
        ("a", 0),
        ("</s>", 0),
    ],
)
def test_what_the_answer_loses_before_it_is_compared(answer: str, f1: float) -> None:
    assert one("qrecc", answer, "red")["f1"] == f1


def test_a_reference_of_marks_alone_is_met_by_nothing() -> None:
    assert one("qrecc", "?", "?")["f1"] == 0


def test_inscits_additional_answer_is_no_reference() -> None:
    assert one("inscit", SORRY, "red boat", SORRY)["f1"] == 0
    assert one("topiocqa", SORRY, "red boat", SORRY)["f1"] == 100
    assert math.isnan(one("inscit", SORRY, SORRY)["f1"])


def test_a_refusal_in_other_words_counts_as_the_expected_one() -> None:
    for dataset in REFUSING:
        assert one(dataset, "The text doesn't mention it", SORRY)["f1"] == 100
    assert one("doc2dial", "The text doesn't mention it", SORRY)["f1"] < 30


@pytest.mark.parametrize(
    "phrase",
    """cannot find|can't find|not able to|unable to|does not provide|cannot provide|cannot answer
    couldnot answer|can't answer|couldn't answer|cannot be found|cannot be determined|do not have
    couldn't find|no information|does not mention|doesn't mention|not explicitly mentioned
    not explicitly explain|can not find|could not find|does not specify|doesn't provide
    doesn't specify|there is no|not mentioned|don't have|don't know|does not include
    doesn't include|does not contain|doesn't contain|not provided|does not indicate
    doesn't indicate|does not disclose|doesn't disclose""".replace("\n    ", "|").split("|"),
)
def test_each_phrase_of_the_benchmark_is_a_refusal(phrase: str) -> None:
    assert settled(f"Well, {phrase.upper()} that.") == SORRY
    assert refuses(settled(phrase))


@pytest.mark.parametrize(
    "answer", ["It is red.", "cannot  find", "does not", "it is provided", "cant find", ""]
)
def test_other_words_are_none(answer: str) -> None:
    assert settled(answer) == answer.lower()
    assert not refuses(settled(answer))


def test_a_refusal_needs_both_parts() -> None:
    assert refuses("I am SORRY, but I cannot find the answer.")
    assert not refuses("Sorry.")
    assert not refuses("I cannot find the answer.")


ASKED = [
    example(SORRY, key="q0"),
    example("red boat", key="q1"),
    example(SORRY, "red", key="q2"),
    example("green boat", key="q3"),
    example("blue", SORRY, key="q4"),
]
SAID = ["Unable to say", "Red boat", "green", "There is no boat", "BLUE"]


def test_accuracies_by_hand() -> None:
    scores = chatrag_scores("quac", ASKED, SAID)
    found = values(scores)
    assert tuple(found) == chatrag_metrics("quac")
    # q0 is refused and q2 is not; q1 and q4 are answered, q3 is not.
    assert found["unanswerable_accuracy"] == 50
    assert found["answerable_accuracy"] == pytest.approx(200 / 3)
    assert found["mean_accuracy"] == pytest.approx((50 + 200 / 3) / 2)
    # q0 and q1 and q4 are met; q2 and q3 (now a refusal) share no word with their references.
    assert found["f1"] == pytest.approx(60)
    assert found["answerable_f1"] == pytest.approx(200 / 3)
    assert scores[2].values == (100, None, 0, None, None)
    assert scores[3].values == (None, 100, None, 0, 100)
    assert scores[4].formula(scores[4].rows.sum(0)) == pytest.approx(found["mean_accuracy"])


def test_the_answerable_that_count_may_be_listed() -> None:
    found = values(chatrag_scores("quac", ASKED, SAID, {"q3", "q4"}))
    assert found["f1"] == pytest.approx(60)
    assert found["unanswerable_accuracy"] == 50
    assert found["answerable_accuracy"] == 50
    assert found["answerable_f1"] == 50


def test_the_list_counts_answerable_questions_alone(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text("[0, 2, 2]")
    assert read_answerable(path, ASKED) == {"q1", "q4"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[0, 3]", r"list.json: 3 is in the list, but the 3 answerable questions are counted fr"),
        ("[-1]", "-1 is in the list"),
        ("[1.0]", "list.json, entry 1: Input should be a valid integer"),
        ("[true]", "list.json, entry 1: Input should be a valid integer"),
        ("{}", "list.json: Input should be a valid array"),
        ("[0, 1", "list.json: not valid JSON"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_answerable(path, ASKED)


def test_without_one_sort_of_question_there_is_no_mean() -> None:
    found = values(chatrag_scores("doqa_movies", [example("red")], ["red"]))
    assert found["answerable_accuracy"] == 100
    assert math.isnan(found["unanswerable_accuracy"])
    assert math.isnan(found["mean_accuracy"])


def test_answers_are_scored_as_they_stand_in_a_file() -> None:
    assert one_line(" no\r\nbreak\nin\rit\n") == "no break in it"
    found = values(
        chatrag_scores("quac", [example(SORRY)], ["I am un\nable to. I cannot\nfind it"])
    )
    assert found["unanswerable_accuracy"] == 100


def test_convfinqa_has_accuracy_alone() -> None:
    asked = [
        example("206588 - 181001", key=key, details={"exe_answer": 25587.0}) for key in ("a", "b")
    ]
    scores = chatrag_scores("convfinqa", asked, ["It rose by $25,587 million.", "No idea."])
    assert [score.name for score in scores] == list(chatrag_metrics("convfinqa")) == ["accuracy"]
    assert scores[0].values == (100, 0)
    with pytest.raises(InputError, match="talk/1 has no exe_answer"):
        chatrag_scores("convfinqa", [example("1 + 1")], ["2"])
    with pytest.raises(InputError, match="1 answers for 2 examples"):
        chatrag_scores("convfinqa", asked, ["2"])


def test_a_question_put_in_other_words_is_judged_by_its_own() -> None:
    bare = [{"role": "user", "content": "By how much did it rise?"}]
    details = {"exe_answer": 0.24, "conversation": bare}
    asked = example("12 / 50", question="Tell the percentage: how much?", details=details)
    assert chatrag_scores("convfinqa", [asked], ["24.0"])[0].value == 0


@pytest.mark.parametrize("dataset", ["convfinqa", "inscit", "quac", "doqa_travel", "sqa"])
def test_metrics_are_those_that_are_given(dataset: str) -> None:
    asked = example("1", details={"exe_answer": 1})
    scores = chatrag_scores(dataset, [asked], [json.dumps(1)])
    assert tuple(score.name for score in scores) == chatrag_metrics(dataset)
