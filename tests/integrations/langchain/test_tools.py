"""Tools, agents and answers as data, from a model whose answers are written beforehand."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import JsonOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langchain_core.tools import create_retriever_tool, tool
from pydantic import BaseModel

import langchain_rag_windows
from langchain_rag_windows import ChatRagWindows, RagWindowsMiddleware, create_windows_chain
from langchain_rag_windows.middleware import last_question
from rag_windows import MissingExtraError, RagWindowsError
from tests.integrations.langchain.asking import WAYS, ListRetriever, chat
from tests.tool_models import SEARCH, ScriptedLM, scripted

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
LOOK_UP = '<tool_call>\n{"name": "look_up", "arguments": {"query": "wall"}}\n</tool_call>'
DOCUMENTS = [Document("One is white.", id="w1"), Document("Two is red.", id="w2")]
TEXTS = [document.page_content for document in DOCUMENTS]
PROMPT = ChatPromptTemplate.from_messages([("human", "{context}{input}")])


@pytest.fixture(autouse=True)
def _not_held_to_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra `structured`, so that scripted answers may break their schema."""
    monkeypatch.setitem(sys.modules, "llguidance", None)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def finds() -> ListRetriever:
    return ListRetriever(documents=DOCUMENTS, asked=[])


def look_up() -> Any:
    options: Any = {"response_format": "content_and_artifact"}
    return create_retriever_tool(finds(), "look_up", "Look it up.", **options)


def model(*answers: str, kind: str = "hermes") -> tuple[ChatRagWindows, ScriptedLM]:
    lm = scripted(kind, *answers)
    return ChatRagWindows(lm=lm), lm


def read(lm: ScriptedLM) -> list[list[str]]:
    """The windows of each call."""
    return [[passage.text for passage in passages] for _, passages in lm.asked]


def shown(lm: ScriptedLM) -> str:
    """The texts of all messages."""
    return "".join(turn.content for query, _ in lm.asked for turn in query.turns)


@pytest.mark.parametrize("way", WAYS)
def test_a_call_comes_back_whole(way: str) -> None:
    llm, lm = model(f"So.\n{CALL}")
    bound = llm.bind_tools([add], documents=[Document("Two and three.")])
    message = WAYS[way](bound, "2 + 3?")
    assert message.content == "So."
    (call,) = message.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 2, "b": 3})
    assert call["id"]
    assert message.response_metadata["finish_reason"] == "tool_calls"
    assert read(lm) == [["Two and three."]]


def test_text_streams_before_a_call_and_without_reasoning() -> None:
    chunks = list(model(f"So.\n{CALL}")[0].bind_tools([add]).stream("2 + 3?"))
    assert [chunk.content for chunk in chunks[:2]] == ["S", "o"]
    for way in ("invoke", "stream"):
        llm, _ = model("Two and three.</think>Five.", kind="thinking")
        message = WAYS[way](llm.bind_tools([add]), "2 + 3?")
        assert message.content == "Five."
        assert message.additional_kwargs["reasoning_content"] == "Two and three."
    message = model("<tool_call>{</tool_call>")[0].bind_tools([add]).invoke("2 + 3?")
    assert message.tool_calls == []
    (broken,) = message.invalid_tool_calls
    assert broken["args"] == "{"
    assert "not valid JSON" in str(broken["error"])
    llm, lm = model("Five.")
    llm.bind_tools([add], tool_choice="none").invoke("2 + 3?")
    assert lm.asked[0][0].tools == ()


def test_what_can_not_be_kept_is_refused_at_once() -> None:
    refused: list[tuple[str, dict[str, Any], type[Exception], str]] = [
        ("hermes", {"strict": True}, NotImplementedError, "needs a forced call"),
        ("hermes", {"tool_choice": "divide"}, ValueError, "names no known tool"),
        ("thinking", {"tool_choice": "any"}, NotImplementedError, "can't be forced"),
    ]
    for kind, options, error, match in refused:
        with pytest.raises(error, match=match):
            model(kind=kind)[0].bind_tools([add], **options)
    with pytest.raises(NotImplementedError, match="pass the documents without tools"):
        chat().bind_tools([add])
    with pytest.raises(RagWindowsError, match="does not show"):
        chat().invoke("Hello?", tools=[SEARCH])


# Agents


def test_what_a_retriever_finds_for_an_agent_becomes_windows_not_text() -> None:
    llm, lm = model(LOOK_UP, "White.")
    agent: Any = create_agent(llm, tools=[look_up()])
    answer = agent.invoke({"messages": [HumanMessage("Which colour?")]})["messages"][-1]
    assert answer.content == "White."
    assert read(lm)[1] == TEXTS
    assert "is white" not in shown(lm)
    # By the middleware once a turn, for every call of the model.
    llm, lm = model(CALL, "White.", "Red.")
    found = finds()
    messages: list[Any] = []
    agent = create_agent(llm, tools=[add], middleware=[RagWindowsMiddleware(found)])
    for question in ("Which is one?", "And two?"):
        messages = agent.invoke({"messages": [*messages, HumanMessage(question)]})["messages"]
    assert found.asked == ["Which is one?", "And two?"]
    assert read(lm) == [TEXTS] * 3
    assert "is white" not in shown(lm)
    (*_, call, result) = lm.asked[1][0].turns
    (called,) = call.calls
    assert (called.name, called.arguments) == ("add", {"a": 2, "b": 3})
    assert (result.content, result.call_id) == ("5", called.id)
    assert last_question([SystemMessage("Be brief."), AIMessage("Hello.")]) == ""


def test_where_the_middleware_can_not_be_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    middleware = [RagWindowsMiddleware(finds())]
    asked: Any = {"messages": [HumanMessage("Which is one?")]}
    both = create_agent(model(LOOK_UP, "White.")[0], tools=[look_up()], middleware=middleware)
    with pytest.raises(ValueError, match="several ways at once"):
        both.invoke(asked)
    other = create_agent(FakeListChatModel(responses=["x"]), middleware=middleware)
    with pytest.raises(ValueError, match="FakeListChatModel would not get"):
        other.invoke(asked)
    monkeypatch.setitem(sys.modules, "langchain", None)
    with pytest.raises(MissingExtraError, match="langchain, which is not installed; run: pip"):
        langchain_rag_windows.RagWindowsMiddleware  # noqa: B018 - it is looked up


# The twin of the stuff chain


def test_it_has_the_signature_of_its_twin_and_streams() -> None:
    ours = inspect.signature(create_windows_chain).parameters
    stock = inspect.signature(create_stuff_documents_chain).parameters
    told = [[(one.name, one.kind, one.default) for one in each.values()] for each in (ours, stock)]
    assert told[0] == told[1]
    chain = create_windows_chain(model("One word after the other.")[0], PROMPT)
    pieces = list(chain.stream({"context": DOCUMENTS, "input": "?"}))
    assert "".join(pieces) == "One word after the other."
    assert len(pieces) > 5


def test_document_prompts_parsers_variable_names_and_bound_models_are_used() -> None:
    llm, lm = model("Yes.", '{"a": 1}', "Yes.")
    shape = PromptTemplate.from_template("[{row}] {page_content}")
    chain = create_windows_chain(llm, PROMPT, document_prompt=shape, document_separator="-----")
    documents = [Document("One.", id="One.", metadata={"title": "T", "row": 0})]
    chain.invoke({"context": documents, "input": "What?"})
    ((query, (passage,)),) = lm.asked
    assert (passage.text, passage.title, passage.id) == ("[0] One.", None, "One.")
    assert passage.metadata == {"title": "T", "row": 0}
    assert query.turns[-1].content == "What?"
    chain = create_windows_chain(
        llm.bind(seed=1).with_fallbacks([llm]),
        ChatPromptTemplate.from_messages([("system", "Be brief.{docs}"), ("human", "{q}")]),
        output_parser=JsonOutputParser(),
        document_variable_name="docs",
    )
    assert chain.invoke({"docs": ["One.", {"text": "Two."}], "q": "What?"}) == {"a": 1}
    assert lm.asked[1][0].system == "Be brief."
    # What it can't see into is taken.
    hidden: Any = RunnableLambda(lambda value, **kwargs: llm.invoke(value, **kwargs))
    chain = create_windows_chain(hidden, PROMPT)
    assert chain.invoke({"context": ["One."], "input": "What?"}) == "Yes."
    assert read(lm)[1:] == [["One.", "Two."], ["One."]]
    other = FakeListChatModel(responses=["x"])
    for losing in (other, other.bind(stop=["x"])):
        with pytest.raises(ValueError, match="FakeListChatModel would not get"):
            create_windows_chain(losing, PROMPT)
    hiding: list[Any] = [RunnableParallel(raw=llm), PROMPT | llm]
    for blind in hiding:
        with pytest.raises(ValueError, match="would not get the documents"):
            create_windows_chain(blind, PROMPT)
    with pytest.raises(ValueError, match="has no variable 'context'"):
        create_windows_chain(llm, ChatPromptTemplate.from_messages([("human", "{input}")]))


# Answers as data


class Wall(BaseModel):
    """A wall."""

    colour: str
    metres: int


WRITTEN = '{"colour": "white", "metres": 3}'


def test_json_mode_reads_the_text() -> None:
    for text in (WRITTEN, f"```json\n{WRITTEN}\n```"):
        structured = model(text)[0].with_structured_output(Wall, method="json_mode")
        assert structured.invoke("Which wall?") == Wall(colour="white", metres=3)


@pytest.mark.parametrize(
    ("method", "answer", "ends", "match"),
    [
        ("function_calling", " nonsense</tool_call>", True, "no tool call that can be read"),
        ("function_calling", WRITTEN[:-2], False, "cut at max_tokens"),
        ("json_mode", WRITTEN[:-2], False, "cut at max_tokens"),
    ],
)
def test_data_that_is_broken_or_cut_is_an_error_and_never_completed(
    method: str, answer: str, ends: bool, match: str
) -> None:
    llm, lm = model(answer)
    lm.ends = ends
    with pytest.raises(OutputParserException, match=match):
        llm.with_structured_output(Wall, method=method).invoke("Which wall?")


def test_what_can_not_be_promised_is_refused() -> None:
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"method": "json_schema"}, MissingExtraError, r"llguidance.*run: pip .*\[structured\]"),
        ({"strict": True}, NotImplementedError, r"\[structured\].*Leave strict out"),
        ({"method": "json_mode", "strict": True}, NotImplementedError, "can't be strict"),
        ({"method": "yaml"}, ValueError, "Unknown method"),
        ({"schema": None}, ValueError, "needs a schema"),
    ]
    for options, error, match in refused:
        with pytest.raises(error, match=match):
            model("x")[0].with_structured_output(**{"schema": Wall, **options})
