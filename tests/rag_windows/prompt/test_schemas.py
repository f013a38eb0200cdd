"""Schemas that put several descriptions of one object together."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from rag_windows import InputError, WindowedLM
from tests import tool_models

pytest.importorskip("llguidance")

A: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
}
B: dict[str, Any] = {**A, "properties": {"b": {"enum": ["x", "y"]}}, "required": ["b"]}
C: dict[str, Any] = {**A, "properties": {"c": {"enum": [True, None]}}, "required": ["c"]}
REFERRED = {"$defs": {"B": B, "C": C}}
CASES: dict[str, tuple[dict[str, Any], list[set[str]]]] = {
    "allOf": ({**A, "allOf": [B]}, [{"a", "b"}]),
    "allOf alone": ({"allOf": [A, B, C]}, [{"a", "b", "c"}]),
    "allOf of one": ({"allOf": [A]}, [{"a"}]),
    "without a type": (
        {**A, "allOf": [{"properties": B["properties"], "required": ["b"]}]},
        [{"a", "b"}],
    ),
    "anyOf": ({**A, "anyOf": [B, C]}, [{"a", "b"}, {"a", "c"}, {"a", "b", "c"}]),
    "anyOf alone": ({"anyOf": [A, B]}, [{"a"}, {"b"}]),
    "oneOf": ({**A, "oneOf": [B]}, [{"a", "b"}]),
    "$ref": ({**A, "$ref": "#/$defs/B", **REFERRED}, [{"a", "b"}]),
    "$ref alone": ({"$ref": "#/$defs/B", **REFERRED}, [{"b"}]),
    "a chain of them": (
        {
            **A,
            "$ref": "#/$defs/D",
            "$defs": {**REFERRED["$defs"], "D": {"allOf": [{"$ref": "#/$defs/B"}, C]}},
        },
        [{"a", "b", "c"}],
    ),
    "within": (
        {"type": "object", "properties": {"o": {**A, "allOf": [B]}}, "required": ["o"]},
        [{"o"}],
    ),
}


@cache
def answers() -> WindowedLM:
    """A model whose answers may have a form."""
    return WindowedLM(tool_models.model(), tool_models.tokenizer("hermes"))


@pytest.mark.parametrize("case", CASES)
def test_answers_fit_schemas_that_are_put_together(case: str) -> None:
    schema, names = CASES[case]
    given = json.dumps(schema)
    made = [
        json.loads(answers().generate("Which?", json_schema=schema, do_sample=True, seed=seed).text)
        for seed in range(3)
    ]
    for answer in made:
        assert set(answer) in names
        assert answer.get("a", 1) in (1, 2)
        assert answer.get("o", {"a": 1, "b": "x"}).keys() == {"a", "b"}
    assert json.dumps(schema) == given


def test_a_definition_that_refers_to_itself_can_be_a_part() -> None:
    node = {**B, "properties": {**B["properties"], "next": {"$ref": "#/$defs/N"}}}
    for part in ({"$ref": "#/$defs/N"}, {"allOf": [{"$ref": "#/$defs/N"}]}):
        schema = {**A, **part, "$defs": {"N": node}}
        assert answers().generate("Which?", json_schema=schema, max_new_tokens=1).token_ids


def test_what_can_be_kept_by_no_answer_is_still_refused() -> None:
    never = {**B, "additionalProperties": False}
    with pytest.raises(InputError, match="can't be used for an answer"):
        answers().generate(
            "Which?", json_schema={**A, "additionalProperties": False, "allOf": [never]}
        )
