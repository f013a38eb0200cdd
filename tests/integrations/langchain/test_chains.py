"""The twin of the stuff chain: every document a window, in every composition that it is used in."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import JsonOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import RunnableLambda

from langchain_rag_windows import ChatRagWindows, RagWindows
from langchain_rag_windows.chains import create_windows_chain
from rag_windows import RagWindowsError
from tests.integrations.langchain.drawn import (
    N,
    answered,
    one_window_each,
    reader,
    retriever,
    texts_of,
)
from tests.tool_models import scripted

PROMPT = ChatPromptTemplate.from_messages([("human", "{context}{input}")])


def llm() -> ChatRagWindows:
    return ChatRagWindows(lm=reader(), max_tokens=16)


def test_it_has_the_signature_of_its_twin() -> None:
    ours = inspect.signature(create_windows_chain).parameters
    stock = inspect.signature(create_stuff_documents_chain).parameters
    assert list(ours) == list(stock)
    for name, parameter in stock.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)


@pytest.mark.parametrize("place", range(N))
def test_each_document_is_a_window_and_the_answer_is_right_wherever_the_fact_is(place: int) -> None:
    drawn = answered(place)
    chain = create_windows_chain(llm(), PROMPT)
    assert chain.invoke({"context": drawn.documents, "input": drawn.question}) == drawn.answer
    assert one_window_each(reader().generations[-1], texts_of(drawn.documents))


def test_with_a_retrieval_chain_it_answers_in_every_way_of_asking() -> None:
    drawn = answered(3)
    chain = create_retrieval_chain(retriever(drawn), create_windows_chain(llm(), PROMPT))

    async def streamed() -> str:
        return "".join(
            [c.get("answer", "") async for c in chain.astream({"input": drawn.question})]
        )

    asked = {"input": drawn.question}
    results = [
        chain.invoke(asked)["answer"],
        *(result["answer"] for result in chain.batch([asked, asked])),
        "".join(chunk.get("answer", "") for chunk in chain.stream(asked)),
        asyncio.run(chain.ainvoke(asked))["answer"],
        asyncio.run(streamed()),
    ]
    assert results == [drawn.answer] * 6
    for generation in reader().generations[-6:]:
        assert one_window_each(generation, texts_of(drawn.documents))
    assert chain.invoke(asked)["context"] == drawn.documents


def test_answers_stream_piece_by_piece() -> None:
    text = "One word after the other."
    chain = create_windows_chain(ChatRagWindows(lm=scripted("hermes", text)), PROMPT)
    pieces = list(chain.stream({"context": [Document("Words.")], "input": "What?"}))
    assert "".join(pieces) == text
    assert len(pieces) > 5


def test_history_aware_retrieval_condenses_and_then_answers_over_windows() -> None:
    drawn = answered(5)
    found = retriever(drawn)
    condense = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("chat_history"), ("human", "{input}")]
    )
    condenser = ChatRagWindows(lm=scripted("hermes", drawn.question))
    chain = create_retrieval_chain(
        create_history_aware_retriever(condenser, found, condense),
        create_windows_chain(llm(), PROMPT),
    )
    history = [HumanMessage("Hello."), AIMessage("Yes?")]
    result = chain.invoke({"input": drawn.question, "chat_history": history})
    assert found.asked == [drawn.question]
    assert result["answer"] == drawn.answer
    assert one_window_each(reader().generations[-1], texts_of(drawn.documents))
    first = chain.invoke({"input": drawn.question, "chat_history": []})
    assert first["answer"] == drawn.answer


def test_the_text_model_serves_too() -> None:
    drawn = answered(2)
    prompt = PromptTemplate.from_template("{context}{input}")
    chain = create_windows_chain(RagWindows(lm=reader(), max_tokens=16), prompt)
    assert chain.invoke({"context": drawn.documents, "input": drawn.question}) == drawn.answer
    assert one_window_each(reader().generations[-1], texts_of(drawn.documents))


def test_a_document_prompt_makes_the_whole_window() -> None:
    lm = scripted("hermes", "Yes.")
    chain = create_windows_chain(
        ChatRagWindows(lm=lm),
        PROMPT,
        document_prompt=PromptTemplate.from_template("[{row}] {page_content}"),
        document_separator="-----",
    )
    documents = [
        Document(page_content=text, id=text, metadata={"title": "T", "row": i})
        for i, text in enumerate(("One.", "Two."))
    ]
    chain.invoke({"context": documents, "input": "What?"})
    ((query, passages),) = lm.asked
    assert [(p.text, p.title, p.id) for p in passages] == [
        ("[0] One.", None, "One."),
        ("[1] Two.", None, "Two."),
    ]
    assert passages[0].metadata == {"title": "T", "row": 0}
    assert query.turns[-1].content == "What?"


def test_parsers_variable_names_and_bound_models_are_used() -> None:
    lm = scripted("hermes", '{"a": 1}')
    bound = ChatRagWindows(lm=lm).bind(seed=1).with_fallbacks([ChatRagWindows(lm=lm)])
    prompt = ChatPromptTemplate.from_messages([("system", "Be brief.{docs}"), ("human", "{q}")])
    chain = create_windows_chain(
        bound, prompt, output_parser=JsonOutputParser(), document_variable_name="docs"
    )
    assert chain.invoke({"docs": ["One.", {"text": "Two."}], "q": "What?"}) == {"a": 1}
    ((query, passages),) = lm.asked
    assert query.system == "Be brief."
    assert [p.text for p in passages] == ["One.", "Two."]


def test_without_documents_it_is_an_ordinary_chat() -> None:
    lm = scripted("hermes", "Hello.")
    chain = create_windows_chain(ChatRagWindows(lm=lm), PROMPT)
    assert chain.invoke({"context": [], "input": "Hi."}) == "Hello."
    assert lm.asked[0][1] == []


def test_documents_by_two_ways_are_an_error() -> None:
    human = HumanMessage(
        content_blocks=[{"type": "text-plain", "text": "Here.", "mime_type": "text/plain"}]
    )
    prompt = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("given"), ("human", "{context}{input}")]
    )
    chain = create_windows_chain(llm(), prompt)
    with pytest.raises(RagWindowsError, match="several ways at once"):
        chain.invoke({"context": [Document("There.")], "given": [human], "input": "Where?"})


@pytest.mark.parametrize(
    ("model", "prompt", "match"),
    [
        (FakeListChatModel(responses=["x"]), PROMPT, "FakeListChatModel would not get"),
        (FakeListChatModel(responses=["x"]).bind(stop=["x"]), PROMPT, "would not get"),
        (None, ChatPromptTemplate.from_messages([("human", "{input}")]), "must have 'context'"),
    ],
)
def test_what_would_lose_documents_is_refused(model: Any, prompt: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        create_windows_chain(model or llm(), prompt)


def test_one_document_is_no_list() -> None:
    chain = create_windows_chain(llm(), PROMPT)
    with pytest.raises(ValueError, match="must be a list"):
        chain.invoke({"context": "Just text.", "input": "What?"})


def test_what_it_cannot_see_into_is_taken() -> None:
    lm = scripted("hermes", "Yes.")
    model = ChatRagWindows(lm=lm)
    hidden: RunnableLambda[Any, Any] = RunnableLambda(
        lambda value, **kwargs: model.invoke(value, **kwargs)
    )
    chain = create_windows_chain(hidden, PROMPT)
    assert chain.invoke({"context": [Document("One.")], "input": "What?"}) == "Yes."
    assert [p.text for p in lm.asked[0][1]] == ["One."]
