"""Agents whose documents come from the middleware: as windows, once a turn, however asked."""

from __future__ import annotations

import asyncio
import importlib
import sys
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import create_retriever_tool

from langchain_rag_windows import ChatRagWindows
from langchain_rag_windows.middleware import RagWindowsMiddleware, last_question
from rag_windows import MissingExtraError
from tests.integrations.langchain.drawn import (
    ListRetriever,
    N,
    answered,
    one_window_each,
    reader,
    retriever,
    texts_of,
)
from tests.tool_models import scripted

LOOK_UP = '<tool_call>\n{"name": "look_up", "arguments": {"query": "wall"}}\n</tool_call>'
DOCUMENTS = [Document("One is white."), Document("Two is red.")]


def agent(place: int) -> Any:
    llm = ChatRagWindows(lm=reader(), max_tokens=16)
    return create_agent(llm, middleware=[RagWindowsMiddleware(retriever(answered(place)))])


@pytest.mark.parametrize("place", [0, 7, N - 1])
def test_each_document_is_a_window_and_the_answer_is_right(place: int) -> None:
    drawn = answered(place)
    result = agent(place).invoke({"messages": [HumanMessage(drawn.question)]})
    assert result["messages"][-1].content == drawn.answer
    assert len(result["messages"]) == 2
    assert result["retrieved_documents"] == drawn.documents
    assert one_window_each(reader().generations[-1], texts_of(drawn.documents))


def test_asynchronously_and_streamed() -> None:
    drawn = answered(4)
    asked = {"messages": [HumanMessage(drawn.question)]}

    async def streamed() -> str:
        found = agent(4).astream(asked, stream_mode="messages")
        return "".join([str(message.content) async for message, _ in found])

    assert asyncio.run(agent(4).ainvoke(asked))["messages"][-1].content == drawn.answer
    assert asyncio.run(streamed()) == drawn.answer
    pieces = [message.content for message, _ in agent(4).stream(asked, stream_mode="messages")]
    assert "".join(pieces) == drawn.answer
    for generation in reader().generations[-3:]:
        assert one_window_each(generation, texts_of(drawn.documents))


def test_in_a_conversation_it_retrieves_for_the_last_turn_once() -> None:
    lm = scripted("hermes", "White.", "Red.")
    found = ListRetriever(documents=DOCUMENTS, asked=[])
    asker = create_agent(ChatRagWindows(lm=lm), middleware=[RagWindowsMiddleware(found)])
    messages: list[Any] = []
    for question in ("Which is one?", "And two?"):
        messages = asker.invoke({"messages": [*messages, HumanMessage(question)]})["messages"]
    assert found.asked == ["Which is one?", "And two?"]
    query, passages = lm.asked[1]
    assert [p.text for p in passages] == texts_of(DOCUMENTS)
    assert [turn.content for turn in query.turns] == ["Which is one?", "White.", "And two?"]


def test_in_a_loop_with_tools_every_call_of_the_model_gets_the_documents() -> None:
    def look_up(query: str) -> str:
        """Look it up."""
        return f"nothing about {query}"

    lm = scripted("hermes", LOOK_UP, "White.")
    found = ListRetriever(documents=DOCUMENTS, asked=[])
    asker = create_agent(
        ChatRagWindows(lm=lm), tools=[look_up], middleware=[RagWindowsMiddleware(found)]
    )
    result = asker.invoke({"messages": [HumanMessage("Which is one?")]})
    assert result["messages"][-1].content == "White."
    assert found.asked == ["Which is one?"]
    for query, passages in lm.asked:
        assert [p.text for p in passages] == texts_of(DOCUMENTS)
        assert "is white" not in "".join(turn.content for turn in query.turns)


def test_documents_of_the_middleware_and_of_a_tool_are_an_error() -> None:
    found = ListRetriever(documents=DOCUMENTS, asked=[])
    look_up = create_retriever_tool(
        found, "look_up", "Look it up.", response_format="content_and_artifact"
    )
    asker = create_agent(
        ChatRagWindows(lm=scripted("hermes", LOOK_UP, "White.")),
        tools=[look_up],
        middleware=[RagWindowsMiddleware(found)],
    )
    with pytest.raises(ValueError, match="several ways at once"):
        asker.invoke({"messages": [HumanMessage("Which is one?")]})


def test_another_model_would_lose_the_documents() -> None:
    other = create_agent(
        FakeListChatModel(responses=["x"]),
        middleware=[RagWindowsMiddleware(ListRetriever(documents=DOCUMENTS, asked=[]))],
    )
    with pytest.raises(ValueError, match="FakeListChatModel would not get"):
        other.invoke({"messages": [HumanMessage("Which is one?")]})


def test_without_a_question_nothing_is_retrieved() -> None:
    assert last_question([SystemMessage("Be brief."), AIMessage("Hello.")]) == ""
    assert last_question([HumanMessage("One?"), AIMessage("x"), HumanMessage(" Two? ")]) == "Two?"


def test_without_langchain_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langchain.agents", None)
    monkeypatch.delitem(sys.modules, "langchain_rag_windows.middleware")
    with pytest.raises(
        MissingExtraError, match=r"langchain, which is not installed; run: pip install"
    ):
        importlib.import_module("langchain_rag_windows.middleware")
