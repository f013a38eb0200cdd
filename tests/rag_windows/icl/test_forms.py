"""How demonstrations are written, which labels they leave, and how they fill windows."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from rag_windows import Demonstration, InputError, LimitError
from rag_windows.icl import classifier
from tests.rag_windows import small


@pytest.mark.parametrize(
    ("given", "shown", "query", "gap"),
    [
        (None, "a: x", "a:", " "),
        ("{text} ->\n{label}.", "a ->\nx.", "a ->", "\n"),
        (("{label}: {text}", "{text}: "), "x: a", "a: ", ""),
        (classifier.Template("{text}: {label}", "{text} :"), "a: x", "a :", " "),
        ("{0} {{text}} {text} {label}", "{0} {a} a x", "{0} {a} a", " "),
    ],
)
def test_a_template_writes_both_forms(given: Any, shown: str, query: str, gap: str) -> None:
    form = classifier.Template.of(given)
    assert (form.show(Demonstration("a", "x")), form.ask("a"), form.gap) == (shown, query, gap)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "{label}"}, r"has no \{text\}"),
        ({"template": ("{text}: {label}", "Which?")}, "must hold {text}"),
        ({"template": (1, "{text}")}, "parts must be strings"),
        ({"template": 5}, "must be a Template"),
        ({"demonstrations": [("a", "x"), ("b",)]}, "Demonstration 1 must be a"),
        ({"demonstrations": [{"text": "a", "tag": "x"}]}, "Demonstration 0 must be a"),
        ({"demonstrations": [("a", 1)]}, "label must be a string that is not blank, not 1"),
        ({"labels": ["x"]}, r"must be at least two, not \['x'\]"),
        ({"demonstrations": "a: x"}, "must be a list"),
        ({"labels": ["x", "y", "x"]}, "The label 'x' .* is given twice"),
        ({"labels": "xy"}, "must be a list of strings"),
        ({"labels": ["x", "z"]}, "Demonstration 1 has the label 'y', which is not one of"),
    ],
)
def test_forms_demonstrations_and_labels_that_can_not_work(
    options: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"demonstrations": [("a", "x"), ("b", "y")], "labels": None}
    with pytest.raises(InputError, match=message):
        small.lm().classify("a", **{**given, **options})


def test_demonstrations_come_as_pairs_mappings_or_objects() -> None:
    lm = small.lm()
    given: list[Any] = [["a", "x"], {"label": "y", "text": "b"}, Demonstration("c", "y")]
    found = lm.classify("d", given)
    assert found == lm.classify("d", [("a", "x"), ("b", "y"), ("c", "y")])
    assert list(found.scores) == ["x", "y"]


def test_a_longer_label_takes_its_share_from_the_one_it_begins_with() -> None:
    def found(names: Sequence[str], sums: Sequence[float], how: Any = "sum") -> list[float]:
        return classifier.label_scores([tuple(map(ord, name)) for name in names], sums, how)

    names = ["art", "article", "articles", "artist", "x"]
    sums = [math.log(share) for share in (0.5, 0.2, 0.05, 0.1, 0.4)]
    scores = found(names, sums)
    assert list(map(math.exp, scores)) == pytest.approx([0.5 - 0.2 - 0.1, 0.15, 0.05, 0.1, 0.4])
    means = [value / len(name) for value, name in zip(scores, names, strict=True)]
    assert found(names, sums, "mean") == means
    assert -40 < found(["a", "ab"], [-1.0, -1.0])[0] < -10


def fewest(sizes: list[int], room: int) -> int:
    count, used = 1, 0
    for size in sizes:
        if used + size > room:
            count, used = count + 1, 0
        used += size
    return count


def test_any_sizes_are_covered_in_order_by_as_many_windows_as_asked_for() -> None:
    drawn = random.Random(3)
    for _ in range(300):
        room = drawn.randint(5, 60)
        sizes = [drawn.randint(1, min(room, drawn.choice([3, 20, room]))) for _ in range(40)]
        least = fewest(sizes, room)
        for count in (None, drawn.randint(least, 40)):
            windows = classifier.pack(sizes, room, count)
            assert len(windows) == (count or least)
            assert [index for window in windows for index in window] == list(range(40))
            assert all(0 < sum(sizes[i] for i in window) <= room for window in windows)


def test_windows_are_about_as_full() -> None:
    assert [len(window) for window in classifier.pack([1] * 10, 4)] == [3, 4, 3]
    assert [len(window) for window in classifier.pack([5] * 101, 500)] == [51, 50]
    assert {len(window) for window in classifier.pack([3] * 500, 100, 32)} == {15, 16}
    with pytest.raises(LimitError, match=r"do not fit windows=2, .* Use windows=3 or more"):
        classifier.pack([4, 4, 4], 5, 2)
