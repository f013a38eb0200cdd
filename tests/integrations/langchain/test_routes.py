"""Every way by which documents come to the model: each is one window, and the answer is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_classic.chains import RetrievalQA, create_history_aware_retriever
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.retrieval import create_retrieval_chain
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolCall, ToolMessage
from langchain_core.messages import content as types
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.tools import create_retriever_tool

from langchain_rag_windows import (
    ChatRagWindows,
    RagWindowsMiddleware,
    WindowDocumentPrompt,
    create_windows_chain,
)
from langchain_rag_windows.errors import RequestError
from tests.integrations.cases import PLACES, Case, case, one_window_each, reader
from tests.integrations.langchain.asking import (
    WAYS,
    ListRetriever,
    Told,
    chat,
    documents_of,
    retriever,
    text_model,
    text_of,
)
from tests.tool_models import scripted

PROMPT = ChatPromptTemplate.from_messages([("human", "{context}\n\n{input}")])
MARKED = WindowDocumentPrompt("id", "title", "row")
CALL = ToolCall(name="search", args={"query": "?"}, id="call-1", type="tool_call")


def marked_documents(one: Case) -> list[Document]:
    """With their ids among the metadata, the only ones that LangChain shows a document prompt."""
    return [
        document.model_copy(update={"metadata": {**document.metadata, "id": document.id}})
        for document in documents_of(one)
    ]


def blocks(one: Case) -> HumanMessage:
    made: list[Any] = [
        types.create_plaintext_block(
            text=passage.text, id=passage.id, title=passage.title, row=passage.metadata["row"]
        )
        for passage in one.passages
    ]
    return HumanMessage([*made, {"type": "text", "text": one.question}])


def fetched(one: Case, result: ToolMessage) -> list[BaseMessage]:
    return [HumanMessage(one.question), AIMessage("I look it up.", tool_calls=[CALL]), result]


def bound(one: Case, told: Told) -> tuple[Any, Any]:
    _, second, *others = documents_of(one)
    mapping = {"text": second.page_content, "id": second.id, "metadata": second.metadata}
    given = [one.passages[0], mapping, *others]
    return chat(callbacks=[told]).bind(documents=given), one.question


def plain_text_blocks(one: Case, told: Told) -> tuple[Any, Any]:
    return chat(callbacks=[told]), [blocks(one)]


def artifact(one: Case, told: Told) -> tuple[Any, Any]:
    tool = create_retriever_tool(
        retriever(one), "search", "Finds.", response_format="content_and_artifact"
    )
    return chat(callbacks=[told]), fetched(one, tool.invoke(CALL))


def marked_tool(one: Case, told: Told) -> tuple[Any, Any]:
    found = ListRetriever(documents=marked_documents(one), asked=[])
    tool = create_retriever_tool(found, "search", "Finds.", document_prompt=MARKED)
    result = ToolMessage(tool.invoke({"query": "?"}), tool_call_id="call-1")
    return chat(callbacks=[told]), fetched(one, result)


def stuff_chain(one: Case, told: Told) -> tuple[Any, Any]:
    chain = create_stuff_documents_chain(chat(callbacks=[told]), PROMPT, document_prompt=MARKED)
    return chain, {"context": marked_documents(one), "input": one.question}


def history_aware(one: Case, told: Told) -> tuple[Any, Any]:
    condense = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("chat_history"), ("human", "{input}")]
    )
    condenser = ChatRagWindows(lm=scripted("hermes", one.question))
    found = create_history_aware_retriever(condenser, retriever(one), condense)
    chain = create_windows_chain(chat(callbacks=[told]), PROMPT)
    history = [HumanMessage("Hello."), AIMessage("Yes?")]
    asked = {"input": one.question, "chat_history": history}
    return create_retrieval_chain(found, chain), asked


def text(one: Case, told: Told) -> tuple[Any, Any]:
    return text_model(callbacks=[told]).bind(documents=documents_of(one)), one.question


def text_stuff_chain(one: Case, told: Told) -> tuple[Any, Any]:
    prompt = PromptTemplate.from_template("{context}\n\n{input}")
    llm = text_model(callbacks=[told])
    chain = create_stuff_documents_chain(llm, prompt, document_prompt=MARKED)
    return chain, {"context": marked_documents(one), "input": one.question}


def middleware(one: Case, told: Told) -> tuple[Any, Any]:
    agent = create_agent(chat(), middleware=[RagWindowsMiddleware(retriever(one))])
    asked = {"messages": [HumanMessage(one.question)]}
    return agent.with_config({"callbacks": [told]}), asked


Route = Callable[[Case, Told], tuple[Any, Any]]
ROUTES: list[Route] = [
    *(bound, plain_text_blocks, artifact, marked_tool, stuff_chain),
    *(history_aware, text, text_stuff_chain, middleware),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("route", ROUTES)
def test_each_document_is_a_window_and_the_answer_is_right(route: Route, way: str) -> None:
    turn = ROUTES.index(route) + list(WAYS).index(way)
    told, one = Told(), case(PLACES[turn % len(PLACES)])
    runnable, asked = route(one, told)
    if route is middleware and "stream" in way:  # a graph streams its states
        *_, answer = runnable.stream(asked, stream_mode="values")
    else:
        answer = WAYS[way](runnable, asked)
    assert text_of(answer) == one.answer
    metadata = told.answers[-1]
    assert one_window_each(metadata["windows"], [passage.text for passage in one.passages])
    citations = metadata["citations"]
    assert [entry["metadata"]["row"] for entry in citations] == list(range(len(one.passages)))
    assert [entry["title"] for entry in citations] == [p.title for p in one.passages]
    assert [entry["id"] for entry in citations] == [p.id for p in one.passages]
    if route is history_aware or route is middleware:
        found = answer["context" if route is history_aware else "retrieved_documents"]
        assert found == documents_of(one)


@pytest.mark.parametrize("route", [plain_text_blocks, artifact, marked_tool])
def test_two_routes_at_once_are_an_error(route: Route) -> None:
    llm, messages = route(case(0), Told())
    with pytest.raises(RequestError, match=r"several ways at once: documents= \(1\) and "):
        llm.invoke(messages, documents=["another one"])
    # No documents are no way: a chain whose retriever found nothing must not fail.
    assert llm.invoke(messages, documents=[]).text is not None


@pytest.mark.parametrize("documents", ["one string", {"text": "one mapping"}, 3, [3], [{"txt": 1}]])
def test_what_is_no_list_of_documents_is_refused(documents: Any) -> None:
    with pytest.raises(RequestError):
        chat().invoke("Who?", documents=documents)
    with pytest.raises(RequestError):
        create_windows_chain(chat(), PROMPT).invoke({"context": documents, "input": "What?"})


def test_without_documents_it_is_an_ordinary_chat_model() -> None:
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where was Alra Ashden born?"},
    ]
    answer = chat().invoke(said, min_new_tokens=5, max_tokens=8)
    assert answer.text == reader().generate(said, min_new_tokens=5, max_new_tokens=8).text
    assert answer.response_metadata["windows"] == answer.response_metadata["citations"] == []
    assert answer.content_blocks == [{"type": "text", "text": answer.text}]


# What LangChain's own parts do with documents, as docs/langchain.md says.

DOCUMENTS = [
    Document("One is white.", metadata={"title": "One"}),
    Document("Two is red.", metadata={"title": "Two"}),
]
TEXTS = [document.page_content for document in DOCUMENTS]
FOUND = ListRetriever(documents=DOCUMENTS, asked=[])
APART = {"document_prompt": WindowDocumentPrompt("title")}
QUESTION = "Which is one?"


def asked_by_retrieval_qa(llm: Any, **options: Any) -> None:
    prompt = PromptTemplate.from_template("{context}\n\n{question}")
    kwargs = {"prompt": prompt, **options}
    chain = RetrievalQA.from_chain_type(llm, retriever=FOUND, chain_type_kwargs=kwargs)
    chain.invoke({"query": QUESTION})


def fetched_by_a_tool(llm: Any, **options: Any) -> None:
    tool = create_retriever_tool(FOUND, "search", "Look it up.", **options)
    asked = [HumanMessage(QUESTION), AIMessage("", tool_calls=[CALL]), tool.invoke(CALL)]
    llm.bind_tools([tool]).invoke(asked)


def in_a_block(llm: Any, **options: Any) -> None:
    mime = {"mime_type": "text/plain"} if options else {}
    block = {"type": "text-plain", "text": "{document}", **mime}
    prompt = ChatPromptTemplate.from_messages([("human", [block, {"type": "text", "text": "?"}])])
    (prompt | llm).invoke({"document": TEXTS[0]})


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("ask", [asked_by_retrieval_qa, fetched_by_a_tool, in_a_block])
def test_stock_parts_keep_documents_apart_with_what_the_docs_name(
    ask: Callable[..., None], apart: bool
) -> None:
    lm = scripted("hermes", "White.")
    ask(
        ChatRagWindows(lm=lm),
        **({"document_prompt": WindowDocumentPrompt("title")} if apart else {}),
    )
    ((query, passages),) = lm.asked
    own = TEXTS[:1] if ask is in_a_block else TEXTS
    assert [passage.text for passage in passages] == (own if apart else [])
    assert (TEXTS[0] in "".join(turn.content for turn in query.turns)) is not apart
