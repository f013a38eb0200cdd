"""How demonstrations are written, which labels they leave, and how they fill windows."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from rag_windows import Demonstration, InputError, LimitError
from rag_windows.icl import demonstrations
from tests.rag_windows import small


@pytest.mark.parametrize(
    ("given", "shown", "query", "gap"),
    [
        (None, "a: x", "a:", " "),
        (
            "Review: {text}\nSentiment: {label}",
            "Review: a\nSentiment: x",
            "Review: a\nSentiment:",
            " ",
        ),
        ("{text} ->\n{label}.", "a ->\nx.", "a ->", "\n"),
        (("{label}: {text}", "{text}: "), "x: a", "a: ", ""),
        (demonstrations.Template("{text}: {label}", "{text} :"), "a: x", "a :", " "),
    ],
)
def test_a_template_writes_both_forms(given: Any, shown: str, query: str, gap: str) -> None:
    form = demonstrations.Template.of(given)
    assert (form.show(Demonstration("a", "x")), form.ask("a"), form.gap) == (shown, query, gap)


def test_braces_of_texts_and_forms_are_data() -> None:
    shown = demonstrations.Template("{0} {{text}} {text} {label}").show(
        Demonstration("{label} {0} {", "{text}")
    )
    assert shown == "{0} {{label} {0} {} {label} {0} { {text}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{label}", r"lacks \{text\}"),
        ("{text}", r"lacks \{label\}"),
        ("{label}: {text}", "must hold {text} and no {label}"),
        (("{text}: {label}", "Which?"), "must hold {text}"),
        (("{text}: {label}", "{text}: {label}"), "and no {label}"),
        ((1, "{text}"), "parts must be strings"),
        (("a", "b", "c"), "a string or a pair"),
        (5, "must be a Template"),
    ],
)
def test_forms_that_cannot_work_are_refused(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        demonstrations.Template.of(given)
    with pytest.raises(InputError, match="separator is empty"):
        demonstrations.Template(separator="")


def test_demonstrations_come_as_pairs_mappings_or_objects() -> None:
    lm = small.lm()
    given: list[Any] = [["a", "x"], {"label": "y", "text": "b"}, Demonstration("c", "y")]
    found = lm.classify("d", given)
    assert found == lm.classify("d", [("a", "x"), ("b", "y"), ("c", "y")])
    assert list(found.scores) == ["x", "y"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([("a", "x"), ("b",)], "Demonstration 1 must be a"),
        (["ab"], "Demonstration 0 must be a"),
        ([{"text": "a", "tag": "x"}], "Demonstration 0 must be a"),
        ([("a", 1)], "label must be a string that is not blank, not 1"),
        ([(" ", "x")], "text must be a string that is not blank"),
        (("a: x"), "must be a list"),
        ({"text": "a", "label": "x"}, "must be a list"),
    ],
)
def test_demonstrations_that_cannot_be_read_are_named(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        small.lm().classify("a", given, ["x", "y"])


def encode(label: str) -> list[int]:
    return [ord(letter) for letter in label.lower() if letter != "?"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["x"], r"At least two labels are needed to choose from, not \['x'\]"),
        (["x", "y", "x"], "'x' is given twice"),
        (["x", " "], "not blank, not ' '"),
        (["x", 3], "not blank, not 3"),
        ("xy", "must be a list of strings"),
        (["Yes", "yes"], "'yes' .* has the same tokens"),
        (["x", "?"], "'[?]' .* none"),
        (["x", "z"], "Demonstration 0 has the label 'y', which is none of"),
    ],
)
def test_labels_that_leave_no_choice_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        demonstrations.Labels.of(names, [Demonstration("a", "y")] if "z" in names else [], encode)


def test_a_longer_label_takes_its_share_from_the_one_it_begins_with() -> None:
    labels = demonstrations.Labels.of(["art", "article", "articles", "artist", "x"], [], encode)
    sums = [math.log(share) for share in (0.5, 0.2, 0.05, 0.1, 0.4)]
    found = labels.scores(sums, "sum")
    assert list(map(math.exp, found)) == pytest.approx([0.5 - 0.2 - 0.1, 0.15, 0.05, 0.1, 0.4])
    means = [value / len(name) for value, name in zip(found, labels.names, strict=True)]
    assert labels.scores(sums, "mean") == means
    assert (
        -40 < demonstrations.Labels.of(["a", "ab"], [], encode).scores([-1.0, -1.0], "sum")[0] < -10
    )


def test_room_is_the_models_in_eighths_so_that_like_texts_share_windows() -> None:
    sizes, fixed = demonstrations.Sizes(), demonstrations.Sizes(window_tokens=300)
    assert sizes.room(1000, 1024) == sizes.room(900, 1024) == 896
    assert sizes.room(100, 1024) == 100
    assert sizes.room(None, None) == demonstrations.UNLIMITED_ROOM
    assert fixed.room(1000, 1024) == fixed.room(None, None) == 300


@pytest.mark.parametrize("given", [{"windows": 2.0}, {"windows": True}, {"window_tokens": 0}])
def test_sizes_that_mean_nothing_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"must be a whole number|at least 1"):
        demonstrations.Sizes(**given)


def size_of(text: str) -> int:
    return len(text) + 2


def test_windows_hold_whole_demonstrations_in_order() -> None:
    shown = [f"line {number}" for number in range(100)]
    texts = demonstrations.fill(shown, "\n", size_of, 60)
    assert "\n".join(texts).split("\n") == shown
    assert max(map(size_of, texts)) <= 60
    assert len(demonstrations.fill(shown, "\n", size_of, 60, windows=40)) == 40
    # One that fits by a hair is taken.
    assert demonstrations.fill(["x" * 38, "y" * 38], "\n", size_of, 40) == ["x" * 38, "y" * 38]


def test_texts_that_make_more_tokens_together_are_packed_more_loosely() -> None:
    def denser(text: str) -> int:
        return size_of(text) + 3 * text.count("\n")

    texts = demonstrations.fill(["abcd"] * 30, "\n", denser, 40)
    assert max(map(denser, texts)) <= 40
    assert "\n".join(texts).split("\n") == ["abcd"] * 30


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
            windows = demonstrations.pack(sizes, room, count)
            assert len(windows) == (count or least)
            assert [index for window in windows for index in window] == list(range(40))
            assert all(0 < sum(sizes[i] for i in window) <= room for window in windows)


def test_windows_are_about_as_full() -> None:
    assert [len(window) for window in demonstrations.pack([1] * 10, 4)] == [3, 4, 3]
    assert [len(window) for window in demonstrations.pack([5] * 101, 500)] == [51, 50]
    assert {len(window) for window in demonstrations.pack([3] * 500, 100, 32)} == {15, 16}
    assert demonstrations.pack([], 10) == []
    with pytest.raises(LimitError, match="windows=2 are too few, 3 would hold them"):
        demonstrations.pack([4, 4, 4], 5, 2)
