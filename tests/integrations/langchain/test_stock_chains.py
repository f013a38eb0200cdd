"""LangChain's own chains: which of them keep documents apart, as docs/frameworks.md says."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_classic.chains import RetrievalQA
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.question_answering import load_qa_chain
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, ToolCall
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.tools import create_retriever_tool

from langchain_rag_windows import ChatRagWindows, WindowDocumentPrompt
from tests.integrations.langchain.drawn import ListRetriever
from tests.tool_models import ScriptedLM, scripted

DOCUMENTS = [
    Document("One is white.", metadata={"title": "One"}),
    Document("Two is red.", metadata={"title": "Two"}),
]
TEXTS = [document.page_content for document in DOCUMENTS]
PROMPT = PromptTemplate.from_template("{context}\n\n{question}")
APART = {"document_prompt": WindowDocumentPrompt("title")}


def model(*answers: str) -> tuple[ChatRagWindows, ScriptedLM]:
    lm = scripted("hermes", *answers)
    return ChatRagWindows(lm=lm), lm


def read(lm: ScriptedLM) -> list[list[str]]:
    """The windows of each call."""
    return [[passage.text for passage in passages] for _, passages in lm.asked]


def shown(lm: ScriptedLM) -> str:
    """The text of all prompts."""
    return "".join(turn.content for query, _ in lm.asked for turn in query.turns)


@pytest.mark.parametrize(("options", "apart"), [({}, False), (APART, True)])
def test_the_stuff_chain_keeps_documents_apart_with_our_document_prompt(
    options: dict[str, Any], apart: bool
) -> None:
    llm, lm = model("White.")
    prompt = ChatPromptTemplate.from_messages([("human", "{context}\n\n{question}")])
    chain = create_stuff_documents_chain(llm, prompt, **options)
    chain.invoke({"context": DOCUMENTS, "question": "Which is one?"})
    assert read(lm) == [TEXTS if apart else []]
    assert ("One is white." in shown(lm)) is not apart


@pytest.mark.parametrize(("options", "apart"), [({}, False), (APART, True)])
def test_retrieval_qa_does_so_too(options: dict[str, Any], apart: bool) -> None:
    llm, lm = model("White.")
    chain = RetrievalQA.from_chain_type(
        llm,
        retriever=ListRetriever(documents=DOCUMENTS, asked=[]),
        chain_type_kwargs={"prompt": PROMPT, **options},
    )
    assert chain.invoke({"query": "Which is one?"})["result"] == "White."
    assert read(lm) == [TEXTS if apart else []]


def test_map_reduce_and_refine_show_one_document_at_a_time_as_text() -> None:
    llm, lm = model("White.", "Nothing.", "White.")
    asked = {"input_documents": DOCUMENTS, "question": "Which is one?"}
    load_qa_chain(llm, chain_type="map_reduce", token_max=10_000).invoke(asked)
    assert read(lm) == [[], [], []]
    llm, lm = model("White.", "White.")
    load_qa_chain(llm, chain_type="refine").invoke(asked)
    assert read(lm) == [[], []]


@pytest.mark.parametrize(("options", "apart"), [({}, False), (APART, True)])
def test_a_retriever_tool_with_text_alone_keeps_them_apart_with_our_document_prompt(
    options: dict[str, Any], apart: bool
) -> None:
    found = ListRetriever(documents=DOCUMENTS, asked=[])
    tool = create_retriever_tool(found, "look_up", "Look it up.", **options)
    llm, lm = model("White.")
    call = ToolCall(name="look_up", args={"query": "one"}, id="a1", type="tool_call")
    result = tool.invoke(call)
    llm.bind_tools([tool]).invoke(
        [HumanMessage("Which is one?"), AIMessage("", tool_calls=[call]), result]
    )
    assert read(lm) == [TEXTS if apart else []]
    assert ("One is white." in shown(lm)) is not apart


@pytest.mark.parametrize(("extra", "apart"), [({}, False), ({"mime_type": "text/plain"}, True)])
def test_a_document_block_in_a_template_stays_one_only_with_its_mime_type(
    extra: dict[str, str], apart: bool
) -> None:
    block = {"type": "text-plain", "text": "{document}", **extra}
    question = {"type": "text", "text": "{question}"}
    prompt = ChatPromptTemplate.from_messages([("human", [block, question])])
    llm, lm = model("White.")
    (prompt | llm).invoke({"document": TEXTS[0], "question": "Which is one?"})
    assert read(lm) == [TEXTS[:1] if apart else []]
    assert (TEXTS[0] in shown(lm)) is not apart
