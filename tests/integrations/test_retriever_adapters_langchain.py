"""Our retrievers in LangChain."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_tests.integration_tests import RetrieversIntegrationTests
from pydantic import ValidationError

from langchain_rag_windows.errors import RequestError
from langchain_rag_windows.retrievers import RagWindowsRetriever
from rag_windows import Passage
from rag_windows.integration import passage_of as as_passage
from rag_windows_retrievers import (
    BM25Retriever,
    ConversationalRetriever,
    DenseRetriever,
    HybridRetriever,
    Reranker,
    Retriever,
    last_turns,
)
from tests.integrations.slow_retriever import Slow, longest_gap
from tests.retrievers.small import CORPUS, WordEncoder, save_cross_encoder

QUERY = "the old bridge of Halden and its harbour"


class Standard(RetrieversIntegrationTests):
    """LangChain's own tests of a retriever."""

    __test__ = False

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return RagWindowsRetriever

    @property
    def retriever_query_example(self) -> str:
        return QUERY

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"retriever": self.made()}

    def made(self) -> Retriever:
        raise NotImplementedError


class TestBM25(Standard):
    __test__ = True

    def made(self) -> Retriever:
        return BM25Retriever(CORPUS)


class TestDense(Standard):
    __test__ = True

    def made(self) -> Retriever:
        return DenseRetriever(CORPUS, WordEncoder())


class TestHybrid(Standard):
    __test__ = True

    def made(self) -> Retriever:
        return HybridRetriever([BM25Retriever(CORPUS), DenseRetriever(CORPUS, WordEncoder())])


class TestConversational(Standard):
    __test__ = True

    def made(self) -> Retriever:
        return ConversationalRetriever(BM25Retriever(CORPUS))


class TestReranker(Standard):
    __test__ = True
    folder: Path

    @pytest.fixture(autouse=True)
    def model(self, tmp_path: Path) -> None:
        self.folder = save_cross_encoder(tmp_path)

    def made(self) -> Retriever:
        return Reranker(BM25Retriever(CORPUS), self.folder, device="cpu")


def test_documents_become_the_same_passages_again() -> None:
    found = BM25Retriever(CORPUS).retrieve(QUERY)
    documents = RagWindowsRetriever(retriever=BM25Retriever(CORPUS)).invoke(QUERY)
    assert [type(one) for one in documents] == [Document] * len(found)
    for passage, document in zip(found, documents, strict=True):
        again = as_passage(document)
        assert (again.text, again.id, again.title, again.score) == (
            passage.text,
            passage.id,
            passage.title,
            passage.score,
        )
        assert passage.metadata.items() <= again.metadata.items()


def test_a_passage_without_id_and_title_is_a_plain_document() -> None:
    retriever = RagWindowsRetriever(retriever=BM25Retriever([Passage("bridge")]))
    (document,) = retriever.invoke("bridge")
    assert document.id is None
    assert document.metadata.keys() == {"score"}


def test_it_composes_and_is_seen_by_callbacks() -> None:
    class Seen(BaseCallbackHandler):
        def __init__(self) -> None:
            self.queries: list[str] = []

        def on_retriever_start(self, serialized: Any, query: str, **kwargs: Any) -> None:
            self.queries.append(query)

    seen = Seen()
    retriever = RagWindowsRetriever(retriever=BM25Retriever(CORPUS), k=1)
    chain = retriever | RunnableLambda(lambda documents: documents[0].id)
    assert chain.batch(["lakes", "bread"], {"callbacks": [seen]}) == ["lakes", "bread"]
    assert sorted(seen.queries) == ["bread", "lakes"]


def test_a_conversation_is_condensed() -> None:
    condensed = ConversationalRetriever(BM25Retriever(CORPUS), last_turns(1, weight=1))
    retriever = RagWindowsRetriever(retriever=condensed, k=1)
    history = [HumanMessage("Tell me about the arches of stone."), AIMessage("There are five.")]
    assert retriever.invoke("How old are they?", chat_history=history)[0].id == "arches"
    found = asyncio.run(retriever.ainvoke("How old are they?", chat_history=history))
    assert found[0].id == "arches"


def test_bad_input_is_langchains_kind_of_error() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        RagWindowsRetriever(retriever=BM25Retriever(CORPUS), k=0)
    retriever = RagWindowsRetriever(retriever=BM25Retriever(CORPUS))
    with pytest.raises(RequestError, match="k must be at least 1"):
        retriever.invoke("bridge", k=0)
    with pytest.raises(RequestError, match="needs a retriever that reads conversations"):
        retriever.invoke("bridge", chat_history=[HumanMessage("x")])
    with pytest.raises(ValidationError, match="instance of Retriever"):
        RagWindowsRetriever(retriever="bridge")  # type: ignore[arg-type] # it is what is refused


def test_it_does_not_block_the_event_loop() -> None:
    retriever = RagWindowsRetriever(retriever=Slow())
    assert asyncio.run(longest_gap(lambda: retriever.ainvoke("q"))) < 0.5
