"""Passages with the attention that they got."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rag_windows.evaluation.record import ReadPassage, Record
from rag_windows.evaluation.report.questions import MOST, passage_list, segments
from rag_windows.evaluation.report.text import TEXT, Shown, shown

TEXTS = {"a": "First passage.", "b": "Second passage.", "c": "x" * (1 << 20)}


def record(arm: str, *masses: float | None, names: str = "abc") -> Record:
    read = tuple(
        ReadPassage(text=name, id=name.upper(), title=f"T{name}", mass=mass, spans=((0, 5),))
        for name, mass in zip(names, masses, strict=False)
    )
    return Record("k", arm, "answer", passages=read)


def test_bars_are_of_the_widest() -> None:
    found, notes = passage_list(
        [record("ape", 0.1, 0.4), record("pcw", 0.2)], frozenset({"B", "Z"}), TEXTS
    )
    first, second = found
    assert list(first.bars) == [
        ("ape", 25.0, "10.0%"),
        ("pcw", 50.0, "20.0%"),
    ]
    assert second.bars[1] == ("pcw", 0.0, "not read")
    assert first.tint == pytest.approx(0.375)
    assert (first.evidence, second.evidence) == (False, True)
    assert "read by ape" in second.note
    assert notes == ("Not among the passages, though a right answer rests on it: Z.",)


def test_what_was_not_measured_is_said() -> None:
    found, notes = passage_list([record("sequential", None, None)], frozenset(), TEXTS)
    assert all(one.bars == () and one.tint == 0.0 for one in found)
    assert notes[0].startswith("Attention was not measured for sequential")


def test_a_large_passage_is_cut_and_says_so() -> None:
    found = passage_list([record("ape", 0.5, names="c")], frozenset(), TEXTS)[0][0]
    text = "".join(one.text for one in (*found.lead, *found.rest))
    assert len(text) == TEXT
    assert found.note == "shown: the first 2,000 of 1,048,576 characters"


def test_a_text_that_is_lost_is_said() -> None:
    found = passage_list([record("ape", 0.5, names="q")], frozenset(), TEXTS)[0][0]
    assert found.lead == ()
    assert "not in the run folder" in found.note


def test_a_long_list_is_folded_then_shortened() -> None:
    one = ReadPassage(text="a", mass=0.01)
    read = tuple(replace(one, id=str(place)) for place in range(100))
    found, notes = passage_list([Record("k", "ape", "", passages=read)], frozenset({"77"}), TEXTS)
    assert len(found) == MOST + 1
    assert (found[-1].rank, found[-1].evidence) == (78, True)
    assert f"{MOST + 1} of 100 passages are shown" in notes[0]


def test_segments_follow_the_windows() -> None:
    text = "abcdefghij"
    found = segments(text, ((0, 4), (3, 8)), 0, 10)
    assert [(one.text, one.window, one.begins) for one in found] == [
        ("abc", 1, True),
        ("d", 1, False),
        ("efgh", 2, True),
        ("ij", None, False),
    ]
    assert "".join(one.text for one in segments(text, ((0, 99), (50, 60)), 2, 99)) == text[2:]
    assert segments(text, (), 0, 0) == ()


def test_control_characters_are_spelled_out() -> None:
    assert shown("a\u202eb\x1b\x00").text == "a\\u202eb\\x1b\\x00"
    assert shown("\ud800\ufffe").text == "\\ud800\ufffd"
    assert shown("abc", 2) == Shown("ab", "shown: the first 2 of 3 characters")
