from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from rag_windows import InputError
from rag_windows.icl import Demonstration
from rag_windows.icl.classifier import content_free, scores_of, softmax
from rag_windows.icl.demonstrations import Labels


def encode(label: str) -> list[int]:
    return [ord(letter) for letter in label.lower()]


def labels(*names: str, shown: Sequence[Demonstration] = ()) -> Labels:
    return Labels.of(names, shown, encode)


def logs(*shares: float) -> list[float]:
    return [math.log(share) for share in shares]


def test_labels_come_from_the_demonstrations_unless_given() -> None:
    shown = [Demonstration("a", "y"), Demonstration("b", "x"), Demonstration("c", "y")]
    assert Labels.of(None, shown, encode).names == ("y", "x")
    assert labels("x", "y", "z", shown=shown).ids == ((120,), (121,), (122,))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["x"], r"At least two labels are needed to choose from, not \['x'\]"),
        ([], "At least two labels"),
        (["x", "y", "x"], "'x' is given twice"),
        (["x", " "], "not blank, not ' '"),
        (["x", 3], "not blank, not 3"),
        ("xy", "must be a list of strings"),
        (["Yes", "yes"], "'Yes' and 'yes' are the same tokens"),
        (["x", "z"], "Demonstration 0 has the label 'y', which is none of"),
    ],
)
def test_labels_that_leave_no_choice_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Labels.of(names, [Demonstration("a", "y")] if "z" in names else [], encode)


def test_a_label_without_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="no tokens for the label 'y'"):
        Labels.of(["x", "y"], [], lambda label: [] if label == "y" else [1])


def test_a_longer_label_takes_its_share_from_the_one_it_begins_with() -> None:
    one = labels("art", "article", "articles", "artist", "x")
    shares = [math.exp(value) for value in one.apart(logs(0.5, 0.2, 0.05, 0.1, 0.4))]
    assert shares == pytest.approx([0.5 - 0.2 - 0.1, 0.15, 0.05, 0.1, 0.4])


def test_a_label_that_is_never_the_end_stays_finite() -> None:
    assert -40 < labels("a", "ab").apart([-1.0, -1.0])[0] < -10


def test_scores_are_sums_or_means() -> None:
    one = labels("xyz", "a")
    assert scores_of(one, [-3.0, -2.0], "sum") == [-3.0, -2.0]
    assert scores_of(one, [-3.0, -2.0], "mean") == [-1.0, -2.0]


def test_content_free_inputs_divide_the_probabilities() -> None:
    bias = content_free([logs(0.6, 0.3), logs(0.1, 0.1)])
    # By hand: the first is (2/3, 1/3), the second (1/2, 1/2), their mean (7/12, 5/12).
    assert [math.exp(value) for value in bias] == pytest.approx([7 / 12, 5 / 12])
    row = [a - b for a, b in zip(logs(0.55, 0.45), bias, strict=True)]
    weights = [0.55 / (7 / 12), 0.45 / (5 / 12)]
    assert softmax(row) == pytest.approx([weight / sum(weights) for weight in weights])


def test_a_softmax_of_far_scores_is_finite() -> None:
    assert softmax([-2000.0, -1000.0]) == pytest.approx([0.0, 1.0])
