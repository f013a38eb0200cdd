"""Answers as data, and what is refused rather than promised."""

from __future__ import annotations

import sys
from typing import Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import HumanMessage
from pydantic import BaseModel

from langchain_rag_windows import ChatRagWindows
from rag_windows import MissingExtraError
from tests.integrations.langchain.drawn import reader
from tests.tool_models import scripted


@pytest.fixture(autouse=True)
def _not_held_to_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra `structured`, so that scripted answers may break their schema."""
    monkeypatch.setitem(sys.modules, "llguidance", None)


class Wall(BaseModel):
    """A wall."""

    colour: str
    metres: int


class Fence(TypedDict):
    """A fence."""

    colour: str


SCHEMA = {
    "title": "gate",
    "description": "A gate.",
    "type": "object",
    "properties": {"colour": {"type": "string"}},
}
REST = ' {"colour": "white", "metres": 3}}\n</tool_call>'
WRITTEN = '{"colour": "white", "metres": 3}'


def chat(answer: str) -> ChatRagWindows:
    return ChatRagWindows(lm=scripted("hermes", answer))


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (Wall, Wall(colour="white", metres=3)),
        (Fence, {"colour": "white", "metres": 3}),
        (SCHEMA, {"colour": "white", "metres": 3}),
    ],
)
def test_a_forced_call_gives_the_data(schema: Any, expected: Any) -> None:
    model = chat(REST)
    assert model.with_structured_output(schema).invoke("Which wall?") == expected
    name = schema["title"] if isinstance(schema, dict) else schema.__name__
    assert model.lm is not None
    query = model.lm.asked[0][0]  # type: ignore[attr-defined]  # a ScriptedLM
    assert query.opening.endswith(f'"{name}", "arguments":')


def test_an_agent_answers_in_the_form_of_a_schema() -> None:
    model = chat(REST)
    agent = create_agent(model, response_format=Wall)
    result = agent.invoke({"messages": [HumanMessage("Which wall?")]})
    assert result["structured_response"] == Wall(colour="white", metres=3)


@pytest.mark.parametrize("fenced", [False, True])
@pytest.mark.parametrize(
    ("schema", "expected"),
    [(Wall, Wall(colour="white", metres=3)), (None, {"colour": "white", "metres": 3})],
)
def test_json_mode_reads_the_text(schema: Any, expected: Any, fenced: bool) -> None:
    text = f"```json\n{WRITTEN}\n```" if fenced else WRITTEN
    model = chat(text).with_structured_output(schema, method="json_mode")
    assert model.invoke("Which wall? As JSON.") == expected


def test_json_mode_needs_no_tools_of_the_template() -> None:
    model = ChatRagWindows(lm=reader(), max_tokens=4)
    raw = model.with_structured_output(Wall, method="json_mode", include_raw=True).invoke("Hello?")
    assert raw["parsed"] is None
    assert isinstance(raw["parsing_error"], OutputParserException)
    with pytest.raises(NotImplementedError, match="does not show the tools"):
        model.with_structured_output(Wall)


def test_with_the_raw_message() -> None:
    good = chat(REST).with_structured_output(Wall, include_raw=True).invoke("Which wall?")
    assert (good["parsed"], good["parsing_error"]) == (Wall(colour="white", metres=3), None)
    assert good["raw"].tool_calls[0]["name"] == "Wall"
    bad = chat(" {}}</tool_call>").with_structured_output(Wall, include_raw=True).invoke("Which?")
    assert bad["parsed"] is None
    assert "colour" in str(bad["parsing_error"])


@pytest.mark.parametrize("answer", [" nonsense</tool_call>", " {"])
def test_a_call_that_can_not_be_read_is_an_error_and_no_none(answer: str) -> None:
    with pytest.raises(OutputParserException, match="no call that can be read"):
        chat(answer).with_structured_output(Wall).invoke("Which wall?")


@pytest.mark.parametrize(("method", "answer"), [("json_mode", WRITTEN), ("function_calling", REST)])
def test_data_that_was_cut_is_an_error_and_never_completed(method: str, answer: str) -> None:
    cut = answer[: answer.index("3")]
    lm = scripted("hermes", cut)
    lm.ends = False
    with pytest.raises(OutputParserException, match="cut at max_tokens"):
        ChatRagWindows(lm=lm).with_structured_output(Wall, method=method).invoke("Which wall?")


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"method": "json_schema"}, MissingExtraError, r"llguidance.*\[structured\]"),
        ({"strict": True}, NotImplementedError, r"\[structured\].*Leave strict out"),
        ({"method": "json_mode", "strict": True}, NotImplementedError, "can't be strict"),
        ({"method": "yaml"}, ValueError, "Unknown method"),
        ({"schema": None}, ValueError, "needs a schema"),
    ],
)
def test_what_can_not_be_promised_is_refused(
    options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        chat("x").with_structured_output(**{"schema": Wall, **options})
