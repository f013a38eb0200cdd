"""Every way by which documents come to the model: each is one window, and the answer is right."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import Any, cast

import pytest
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.messages import content as types
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tools import create_retriever_tool

from langchain_rag_windows import ChatRagWindows, RagWindows, WindowDocumentPrompt
from langchain_rag_windows.errors import RequestError
from tests.integrations.langchain.drawn import (
    Drawn,
    N,
    answered,
    one_window_each,
    reader,
    retriever,
    texts_of,
)
from tests.integrations.places import places

STUFFED = ChatPromptTemplate.from_messages([("human", "{context}\n\n{input}")])


def llm(**arguments: Any) -> ChatRagWindows:
    return ChatRagWindows(lm=reader(), max_tokens=16, **arguments)


def blocks(drawn: Drawn) -> HumanMessage:
    made: list[Any] = [
        types.create_plaintext_block(
            text=document.page_content,
            id=document.id,
            title=document.metadata["title"],
            row=document.metadata["row"],
        )
        for document in drawn.documents
    ]
    return HumanMessage(content_blocks=[*made, types.create_text_block(drawn.question)])


def fetched(drawn: Drawn, **result: Any) -> list[BaseMessage]:
    call = {"name": "search", "args": {"query": "?"}, "id": "call-1", "type": "tool_call"}
    return [
        HumanMessage(drawn.question),
        AIMessage("I look it up.", tool_calls=[call]),
        ToolMessage(tool_call_id="call-1", **result),
    ]


def keyword(drawn: Drawn) -> AIMessage:
    return llm().invoke(drawn.question, documents=drawn.documents)


def bound(drawn: Drawn) -> Any:
    return llm().bind(documents=drawn.documents).invoke(drawn.question)


def plain_text_blocks(drawn: Drawn) -> AIMessage:
    return llm().invoke([blocks(drawn)])


def artifact(drawn: Drawn) -> AIMessage:
    glued = "\n\n".join(texts_of(drawn.documents))
    return llm().invoke(fetched(drawn, content=glued, artifact=drawn.documents))


def retriever_tool(drawn: Drawn) -> AIMessage:
    tool = create_retriever_tool(
        retriever(drawn), "search", "Finds.", response_format="content_and_artifact"
    )
    call = {"name": "search", "args": {"query": "?"}, "id": "call-1", "type": "tool_call"}
    message = tool.invoke(call)
    return llm().invoke([HumanMessage(drawn.question), AIMessage("", tool_calls=[call]), message])


def marked_tool(drawn: Drawn) -> AIMessage:
    prompt = WindowDocumentPrompt("title", "row")
    tool = create_retriever_tool(retriever(drawn), "search", "Finds.", document_prompt=prompt)
    return llm().invoke(fetched(drawn, content=tool.invoke({"query": "?"})))


def stuff_chain(drawn: Drawn) -> Any:
    chain = create_stuff_documents_chain(
        llm(),
        STUFFED,
        document_prompt=WindowDocumentPrompt("title", "row"),
        output_parser=cast(Any, RunnablePassthrough()),
    )
    return chain.invoke({"context": drawn.documents, "input": drawn.question})


def text_model(drawn: Drawn) -> AIMessage:
    model = RagWindows(lm=reader(), max_tokens=16)
    (made,) = model.generate([drawn.question], documents=drawn.documents).generations[0]
    return AIMessage(made.text, response_metadata=made.generation_info or {})


def text_stuff_chain(drawn: Drawn) -> Any:
    chain = create_stuff_documents_chain(
        RagWindows(lm=reader(), max_tokens=16),
        PromptTemplate.from_template("{context}\n\n{input}"),
        document_prompt=WindowDocumentPrompt("title", "row"),
    )
    return AIMessage(chain.invoke({"context": drawn.documents, "input": drawn.question}))


ROUTES: list[Callable[[Drawn], AIMessage]] = [
    keyword,
    bound,
    plain_text_blocks,
    artifact,
    retriever_tool,
    marked_tool,
    stuff_chain,
    text_model,
    text_stuff_chain,
]
OWN_IDS = (keyword, bound, plain_text_blocks, artifact, retriever_tool, text_model)


@pytest.mark.parametrize("route", ROUTES)
def test_each_document_is_a_window_and_the_answer_is_right_wherever_the_fact_is(
    route: Callable[[Drawn], AIMessage],
) -> None:
    for place in places(ROUTES.index(route), N):
        drawn = answered(place)
        answer = route(drawn)
        assert answer.text == drawn.answer
        record = reader().generations[-1]
        assert one_window_each(record, texts_of(drawn.documents))
        if not answer.response_metadata:
            continue
        citations = answer.response_metadata["citations"]
        assert [entry["metadata"]["row"] for entry in citations] == list(range(N))
        assert [entry["title"] for entry in citations] == [
            document.metadata["title"] for document in drawn.documents
        ]
        if route in OWN_IDS:
            assert [entry["id"] for entry in citations] == [d.id for d in drawn.documents]
        windows = answer.response_metadata["windows"]
        assert [window["passage"] for window in windows] == list(range(N))


@pytest.mark.parametrize("route", [plain_text_blocks, artifact, stuff_chain])
def test_two_routes_at_once_are_an_error(route: Callable[[Drawn], AIMessage]) -> None:
    drawn = answered(0)
    ways: dict[Callable[[Drawn], AIMessage], Any] = {
        plain_text_blocks: [blocks(drawn)],
        artifact: fetched(drawn, content="", artifact=drawn.documents),
        stuff_chain: STUFFED.format_messages(
            context=WindowDocumentPrompt().format(page_content="A text."), input="?"
        ),
    }
    messages = ways[route]
    with pytest.raises(RequestError, match=r"several ways at once: documents= \(1\) and "):
        llm().invoke(messages, documents=["another one"])
    # No documents are no way: a chain whose retriever found nothing must not fail.
    assert llm().invoke(messages, documents=[]).text is not None


def test_without_documents_it_is_an_ordinary_chat_model() -> None:
    messages = [("system", "Be brief."), ("human", "Where was Alra Ashden born?")]
    options: dict[str, Any] = {"min_new_tokens": 5, "max_tokens": 8}
    answer = llm().invoke(messages, **options)
    lm = reader()
    tokenizer: Any = lm.tokenizer
    ids = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Where was Alra Ashden born?"},
        ],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    plain: Any = lm.model
    made = plain.generate(**ids, min_new_tokens=5, max_new_tokens=8)
    expected = tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer.text == expected
    assert answer.response_metadata["windows"] == []
    assert answer.response_metadata["citations"] == []
    assert answer.content_blocks == [{"type": "text", "text": expected}]


def test_documents_may_be_strings_mappings_and_passages() -> None:
    drawn = answered(2)
    first, second, *others = drawn.documents
    mixed = [
        first.page_content,
        {"text": second.page_content, "title": second.metadata["title"], "id": "two"},
        *others,
    ]
    answer = llm().invoke(drawn.question, documents=mixed)
    assert answer.text == drawn.answer
    assert answer.response_metadata["citations"][1]["id"] == "two"


@pytest.mark.parametrize(
    "documents", ["one string", {"text": "one mapping"}, 3, [3], [{"txt": "a typo"}], [None]]
)
def test_what_is_no_list_of_documents_is_refused(documents: Any) -> None:
    with pytest.raises(RequestError):
        llm().invoke("Who?", documents=documents)


def test_a_document_keeps_its_metadata() -> None:
    metadata = {"title": 7, "when": date(2020, 5, 6), "nested": {"a": [1]}, "relevance_score": 0.5}
    answer = llm().invoke("Who?", documents=[Document(page_content="Text.", metadata=metadata)])
    (entry,) = answer.response_metadata["citations"]
    assert entry["metadata"] == {**metadata, "when": "2020-05-06"}
    assert entry["title"] == "7"
