"""Answers have the properties that a schema names, unless several schemas describe one object."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from rag_windows import InputError, WindowedLM
from rag_windows.prompt.answer_form import _laid_out
from tests import tool_models

pytest.importorskip("llguidance")

A: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
}
B: dict[str, Any] = {**A, "properties": {"b": {"enum": ["x", "y"]}}, "required": ["b"]}
CLOSED: dict[str, tuple[dict[str, Any], list[set[str]]]] = {
    "allOf of one": ({"allOf": [A]}, [{"a"}]),
    "anyOf": ({"anyOf": [A, B]}, [{"a"}, {"b"}]),
    "$ref": ({"$ref": "#/$defs/B", "$defs": {"B": B}}, [{"b"}]),
    "within": ({**A, "properties": {"a": B}}, [{"a"}]),
}
COMPOSED = [
    {**A, "allOf": [B]},
    {"allOf": [A, B]},
    {**A, "anyOf": [B]},
    {**A, "$ref": "#/$defs/B", "$defs": {"B": B}},
    {**A, "properties": {"a": {**A, "oneOf": [B]}}},
]


@cache
def answers() -> WindowedLM:
    """A model whose answers may have a form."""
    return WindowedLM(tool_models.model(), tool_models.tokenizer("hermes"))


@pytest.mark.parametrize("case", CLOSED)
def test_answers_have_no_properties_that_the_schema_does_not_name(case: str) -> None:
    schema, names = CLOSED[case]
    given = json.dumps(schema)
    for seed in range(3):
        made = answers().generate("Which?", json_schema=schema, do_sample=True, seed=seed)
        assert set(json.loads(made.text)) in names
    assert json.dumps(schema) == given


@pytest.mark.parametrize("schema", COMPOSED)
def test_schemas_that_describe_one_object_together_stay_as_they_are(schema: dict[str, Any]) -> None:
    made = _laid_out(schema)
    made.pop("x-guidance")
    assert made == schema
    assert answers().generate("Which?", json_schema=schema, max_new_tokens=1).token_ids


def test_what_can_be_kept_by_no_answer_is_refused() -> None:
    never = {**B, "additionalProperties": False}
    with pytest.raises(InputError, match="can't be used for an answer"):
        answers().generate(
            "Which?", json_schema={**A, "additionalProperties": False, "allOf": [never]}
        )
