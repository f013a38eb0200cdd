"""LangChain messages as the engine's conversation."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from langchain_rag_windows.documents import conversation
from langchain_rag_windows.errors import RequestError

DOCUMENTS = [Document(page_content="One."), Document(page_content="Two.", id="two")]


def calls(*ids: str) -> list[Any]:
    return [{"name": "search", "args": {"q": id_}, "id": id_, "type": "tool_call"} for id_ in ids]


def found(id_: str) -> ToolMessage:
    return ToolMessage("One.\n\nTwo.", tool_call_id=id_, artifact=DOCUMENTS)


def told(*messages: BaseMessage, tools: bool = False) -> list[tuple[str, str]]:
    read, _ = conversation(list(messages), tools=tools)
    return [(message["role"], message["content"]) for message in read]


def test_roles_and_texts() -> None:
    assert told(
        SystemMessage("Be brief."),
        HumanMessage("Hi."),
        AIMessage([{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo."}]),
        ChatMessage(content="Again.", role="user"),
    ) == [("system", "Be brief."), ("user", "Hi."), ("assistant", "Hello."), ("user", "Again.")]


def test_messages_of_one_role_are_joined() -> None:
    assert told(SystemMessage("A"), SystemMessage("B"), HumanMessage("C"), HumanMessage("D")) == [
        ("system", "A\n\nB"),
        ("user", "C\n\nD"),
    ]


def test_a_call_that_found_documents_is_left_out_with_its_results() -> None:
    messages = [HumanMessage("Who?"), AIMessage("Let me see.", tool_calls=calls("1")), found("1")]
    read, passages = conversation(messages)
    assert read == [{"role": "user", "content": "Who?"}]
    assert [(passage.text, passage.id) for passage in passages] == [
        ("One.", None),
        ("Two.", "two"),
    ]


def test_where_tools_are_bound_the_call_stays_and_the_documents_are_announced() -> None:
    messages = [HumanMessage("Who?"), AIMessage("Let me see.", tool_calls=calls("1")), found("1")]
    read, passages = conversation(messages, tools=True)
    assert [message["role"] for message in read] == ["user", "assistant", "tool"]
    assert read[1]["tool_calls"][0]["function"]["arguments"] == {"q": "1"}
    assert read[2]["content"] == ("2 documents; they stand at the beginning of this conversation.")
    assert len(passages) == 2


def test_a_call_with_other_results_beside_documents_stays() -> None:
    read, _ = conversation(
        [
            HumanMessage("Who?"),
            AIMessage("", tool_calls=calls("1", "2")),
            found("1"),
            ToolMessage("42", tool_call_id="2"),
        ]
    )
    assert [message["role"] for message in read] == ["user", "assistant", "tool", "tool"]
    assert [m["content"] for m in read[2:]] == [
        "2 documents; they stand at the beginning of this conversation.",
        "42",
    ]


def test_documents_of_earlier_turns_stay_with_the_conversation() -> None:
    read, passages = conversation(
        [
            HumanMessage("First?"),
            AIMessage("", tool_calls=calls("1")),
            found("1"),
            AIMessage("The first."),
            HumanMessage("And then?"),
            AIMessage("", tool_calls=calls("2")),
            found("2"),
        ]
    )
    assert [message["role"] for message in read] == ["user", "assistant", "user"]
    assert len(passages) == 4


@pytest.mark.parametrize("artifact", [None, [], "text", ["text"], [1], {"a": DOCUMENTS}])
def test_other_artifacts_are_no_documents(artifact: Any) -> None:
    result = ToolMessage("42", tool_call_id="1", artifact=artifact)
    asked = [HumanMessage("Who?"), AIMessage("", tool_calls=calls("1")), result]
    read, passages = conversation(asked)
    assert passages == []
    assert read[-1]["content"] == "42"


def test_a_plain_text_block_keeps_what_it_says_of_itself() -> None:
    block = {
        "type": "text-plain",
        "text": "Born in Arava.",
        "mime_type": "text/plain",
        "id": "b1",
        "title": "Alra Ashden",
        "context": "register",
        "extras": {"source": "https://example.org"},
    }
    read, passages = conversation([HumanMessage([block, {"type": "text", "text": "Where?"}])])
    (passage,) = passages
    assert (passage.text, passage.id, passage.title) == ("Born in Arava.", "b1", "Alra Ashden")
    assert dict(passage.metadata) == {"source": "https://example.org", "context": "register"}
    assert read == [{"role": "user", "content": "Where?"}]


def test_earlier_answers_lose_their_reasoning_and_citations_only() -> None:
    content: list[Any] = [
        {"type": "reasoning", "reasoning": "Hm."},
        {"type": "text", "text": "Arava", "annotations": [{"type": "citation"}]},
    ]
    assert told(HumanMessage("a"), AIMessage(content), HumanMessage("b"))[1] == (
        "assistant",
        "Arava",
    )


@pytest.mark.parametrize(
    "message",
    [
        HumanMessage([{"type": "image", "url": "https://example.org/a.png"}]),
        HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}]),
        HumanMessage([{"type": "audio", "base64": "", "mime_type": "audio/wav"}]),
        HumanMessage([{"type": "text-plain", "url": "https://example.org/a.txt"}]),
        HumanMessage([{"type": "reasoning", "reasoning": "no user's"}]),
        SystemMessage([{"type": "text-plain", "text": "not a human message"}]),
        ChatMessage(content="x", role="critic"),
        FunctionMessage(content="x", name="f"),
    ],
)
def test_what_can_t_be_read_is_refused(message: BaseMessage) -> None:
    with pytest.raises(RequestError):
        conversation([message, HumanMessage("Who?")])
