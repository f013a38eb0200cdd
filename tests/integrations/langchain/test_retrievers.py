"""Our retrievers in LangChain, and a vector database of LangChain's in front of our model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromadb
import pytest
from chromadb.config import Settings
from langchain_chroma import Chroma
from langchain_classic.chains.retrieval import create_retrieval_chain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.embeddings import Embeddings
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_tests.integration_tests import RetrieversIntegrationTests
from pydantic import ValidationError

from langchain_rag_windows import create_windows_chain
from langchain_rag_windows.errors import RequestError
from langchain_rag_windows.retrievers import RagWindowsRetriever
from rag_windows import Passage
from rag_windows_retrievers import (
    BM25Retriever,
    ConversationalRetriever,
    DenseRetriever,
    HybridRetriever,
    Reranker,
    Retriever,
    last_turns,
)
from tests.integrations.cases import PLACES, Held, case, one_window_each
from tests.integrations.langchain.asking import Told, chat, documents_of
from tests.retrievers.small import CORPUS, WordEncoder, save_cross_encoder

QUERY = "the old bridge of Halden and its harbour"


class Standard(RetrieversIntegrationTests):
    """LangChain's own tests of a retriever."""

    __test__ = False
    made: Retriever

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return RagWindowsRetriever

    @property
    def retriever_query_example(self) -> str:
        return QUERY

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"retriever": self.made}


class TestBM25(Standard):
    __test__ = True
    made = BM25Retriever(CORPUS)


class TestDense(Standard):
    __test__ = True
    made = DenseRetriever(CORPUS, WordEncoder())


class TestHybrid(Standard):
    __test__ = True
    made = HybridRetriever([BM25Retriever(CORPUS), DenseRetriever(CORPUS, WordEncoder())])


class TestConversational(Standard):
    __test__ = True
    made = ConversationalRetriever(BM25Retriever(CORPUS))


class TestReranker(Standard):
    __test__ = True

    @pytest.fixture(autouse=True)
    def model(self, tmp_path: Path) -> None:
        self.made = Reranker(BM25Retriever(CORPUS), save_cross_encoder(tmp_path), device="cpu")


def test_documents_become_the_same_passages_again() -> None:
    found = BM25Retriever(CORPUS).retrieve(QUERY)
    documents = RagWindowsRetriever(retriever=BM25Retriever(CORPUS)).invoke(QUERY)
    cited = chat().invoke("Who?", documents=documents).response_metadata["citations"]
    for passage, document, entry in zip(found, documents, cited, strict=True):
        assert document.page_content == passage.text
        assert document.metadata["score"] == passage.score
        assert (entry["id"], entry["title"]) == (passage.id, passage.title)
        assert passage.metadata.items() <= entry["metadata"].items()
    (bare,) = RagWindowsRetriever(retriever=BM25Retriever([Passage("bridge")])).invoke("bridge")
    assert (bare.id, [*bare.metadata]) == (None, ["score"])


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
    for found in (
        retriever.invoke("How old are they?", chat_history=history),
        asyncio.run(retriever.ainvoke("How old are they?", chat_history=history)),
    ):
        assert found[0].id == "arches"


def test_bad_input_is_langchain_s_kind_of_error() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        RagWindowsRetriever(retriever=BM25Retriever(CORPUS), k=0)
    retriever = RagWindowsRetriever(retriever=BM25Retriever(CORPUS))
    with pytest.raises(RequestError, match="k must be at least 1"):
        retriever.invoke("bridge", k=0)
    with pytest.raises(RequestError, match="needs a retriever that reads conversations"):
        retriever.invoke("bridge", chat_history=[HumanMessage("x")])
    with pytest.raises(ValidationError, match="instance of Retriever"):
        RagWindowsRetriever(retriever="bridge")  # type: ignore[arg-type]  # it is what is refused


def test_it_does_not_block_the_event_loop() -> None:
    held = Held()
    retriever = RagWindowsRetriever(retriever=held)
    assert asyncio.run(held.beside(lambda: retriever.ainvoke("q")))[0].id == "late"


class WordEmbeddings(Embeddings):
    """Vectors out of words: no model, and good enough to find a name."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        found: list[list[float]] = WordEncoder().embed(texts, query=False).tolist()
        return found

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


@pytest.fixture
def store() -> Iterator[Chroma]:
    settings = Settings(anonymized_telemetry=False)
    made = Chroma("passages", WordEmbeddings(), client=chromadb.EphemeralClient(settings))
    yield made
    made.delete_collection()


def test_what_a_vector_store_finds_becomes_windows(store: Chroma) -> None:
    one, told = case(PLACES[0]), Told()
    documents = documents_of(one)
    store.add_documents(documents, ids=[str(document.id) for document in documents])
    prompt = ChatPromptTemplate.from_messages([("human", "{context}\n\n{input}")])
    chain = create_retrieval_chain(
        store.as_retriever(search_kwargs={"k": len(documents)}),
        create_windows_chain(chat(callbacks=[told]), prompt),
    )
    answer = chain.invoke({"input": one.question})
    assert sorted(answer["context"], key=lambda found: found.metadata["row"]) == documents
    texts = [found.page_content for found in answer["context"]]
    assert one_window_each(told.answers[-1]["windows"], texts)
    assert answer["answer"] == chat().invoke(one.question, documents=answer["context"]).text
