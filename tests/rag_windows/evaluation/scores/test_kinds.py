from __future__ import annotations

import pytest

from rag_windows.errors import InputError
from rag_windows.evaluation.scores.inscit import inscit_scores
from rag_windows.evaluation.scores.kinds import by_kind
from tests.rag_windows.evaluation.scores.made import example, values

ASKED = [
    example("one two three four five", kinds=("direct",)),
    example("six seven eight nine", kinds=("open", "direct")),
    example("ten", kinds=("open", "open")),
    example("eleven"),
]
SAID = ["one two three four", "six seven eight nine", "no", "eleven"]


def test_each_kind_is_scored_with_its_examples_alone() -> None:
    found = by_kind(ASKED, SAID, lambda some, said: inscit_scores(some, said, [()] * len(said)))
    assert list(found) == ["direct", "open"]
    direct = inscit_scores(ASKED[:2], SAID[:2], [()] * 2)
    assert values(found["direct"]) == values(direct)
    # BLEU of the two together is not the mean of both.
    each = [inscit_scores([ASKED[i]], [SAID[i]], [()])[1].value for i in (0, 1)]
    assert values(found["direct"])["bleu"] != pytest.approx(sum(each) / 2)
    assert len(found["open"][0].values) == 2


def test_examples_without_kinds_give_none() -> None:
    assert by_kind([ASKED[3]], ["x"], lambda some, said: []) == {}


def test_items_must_match() -> None:
    with pytest.raises(InputError, match="1 items for 4 examples"):
        by_kind(ASKED, ["x"], lambda some, said: [])
