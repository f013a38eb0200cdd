from __future__ import annotations

import pytest

from rag_windows import InputError
from rag_windows.evaluation.metrics import accuracy, contained, exact_match
from tests.rag_windows.evaluation.scores.made import example

CASES = [
    # answer, references, letter by letter, exact, contained
    ("positive", ["positive"], 1, 1, 1),
    ("Positive", ["positive"], 0, 1, 1),
    ("The red boat.", ["red boat"], 0, 1, 1),
    ("It is the red boat.", ["red boat"], 0, 0, 1),
    ("It is a red, small boat.", ["red boat"], 0, 0, 0),
    ("48213", ["4821"], 0, 0, 0),
    ("boat", ["red boat", "boat"], 1, 1, 1),
    ("", ["boat"], 0, 0, 0),
    ("", [""], 1, 1, 0),
    ("What?!", ["?!"], 0, 0, 1),
    ("What?", ["?!"], 0, 0, 0),
    ("boat", [], 0, 0, 0),
]


@pytest.mark.parametrize(("answer", "references", "same", "exact", "within"), CASES)
def test_by_hand(answer: str, references: list[str], same: int, exact: int, within: int) -> None:
    asked = [example(*references)]
    assert accuracy(asked, [answer]).values == (100 * same,)
    assert exact_match(asked, [answer]).values == (100 * exact,)
    assert contained(asked, [answer]).values == (100 * within,)


def test_the_score_is_the_share() -> None:
    asked = [example("x"), example("y"), example("z"), example("u")]
    for measure, name in (
        (accuracy, "accuracy"),
        (exact_match, "exact_match"),
        (contained, "contained"),
    ):
        score = measure(asked, ["x", "y", "z", "no"])
        assert (score.name, score.value) == (name, 75)
        with pytest.raises(InputError, match="1 answers for 4 examples"):
            measure(asked, ["x"])
