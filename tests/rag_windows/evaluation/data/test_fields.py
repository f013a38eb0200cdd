from __future__ import annotations

from typing import Any

import pytest

from rag_windows.errors import DataError
from rag_windows.evaluation.data.fields import (
    Place,
    entries,
    field,
    optional,
    several,
    shown,
    strings,
)

HERE = Place("dev.json").at("conversation 'a'").at("turn 3")


@pytest.mark.parametrize(
    ("record", "name", "kind", "message"),
    [
        ({}, "labels", list, '"labels" is missing; it must be a list.'),
        ({"labels": None}, "labels", list, '"labels" must be a list, not null.'),
        ({"labels": "x"}, "labels", list, '"labels" must be a list, not a string.'),
        ({"n": True}, "n", int, '"n" must be a whole number, not true or false.'),
        ({"n": 1.5}, "n", int, '"n" must be a whole number, not a number.'),
        ({"n": False}, "n", float, '"n" must be a number, not true or false.'),
        ([], "n", str, "this must be an object, not a list."),
        ("x", "n", dict, "this must be an object, not a string."),
    ],
)
def test_wrong_fields_are_named(record: Any, name: str, kind: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        field(record, name, kind, HERE)
    assert str(caught.value) == f"dev.json, conversation 'a', turn 3: {message}"


def test_right_fields_are_given() -> None:
    assert field({"n": 2}, "n", float, HERE) == 2
    assert optional({"n": None}, "n", str, HERE) is None
    assert optional({}, "n", str, HERE) is None
    assert optional({"n": "x"}, "n", str, HERE) == "x"
    assert strings({"n": ["a", "b"]}, "n", HERE) == ["a", "b"]
    places = [place.record for place, _ in entries({"n": [1, 2]}, "n", "label", Place("f"))]
    assert places == ["label 1", "label 2"]


def test_an_optional_field_of_a_wrong_kind_is_an_error() -> None:
    with pytest.raises(DataError, match='"n" must be a string, not a whole number'):
        optional({"n": 3}, "n", str, HERE)


def test_entries_that_are_no_strings_are_numbered() -> None:
    with pytest.raises(DataError, match='entry 2 of "context" must be a string, not null'):
        strings({"context": ["a", None]}, "context", HERE)


def test_values_of_others_are_harmless_and_short() -> None:
    assert shown("a\x1b[31m\n") == r"'a\x1b[31m\n'"
    assert len(shown("x" * 10**6)) == 80
    assert len(shown(list(range(1000)))) == 80


def test_several_tells_how_many_more() -> None:
    assert several(["a", "b"]) == "a, b"
    assert several(list("abcde")) == "a, b, c and 2 more"
