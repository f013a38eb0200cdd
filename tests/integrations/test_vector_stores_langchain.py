"""A vector database of LangChain's in front of our model: Chroma, in this process."""

from __future__ import annotations

from collections.abc import Iterator

import chromadb
import pytest
from chromadb.config import Settings
from langchain_chroma import Chroma
from langchain_classic.chains.retrieval import create_retrieval_chain
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import VectorStoreRetriever

from langchain_rag_windows import ChatRagWindows, create_windows_chain
from rag_windows.integration import passage_list
from tests.integrations.langchain.drawn import Drawn, answered, one_window_each, reader, texts_of
from tests.retrievers.small import WordEncoder

K = 8


class WordEmbeddings(Embeddings):
    """Vectors out of words: no model, and good enough to find a name."""

    def __init__(self) -> None:
        self.encoder = WordEncoder()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        found: list[list[float]] = self.encoder.embed(texts, query=False).tolist()
        return found

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


@pytest.fixture
def store() -> Iterator[Chroma]:
    settings = Settings(anonymized_telemetry=False)
    made = Chroma("passages", WordEmbeddings(), client=chromadb.EphemeralClient(settings))
    yield made
    made.delete_collection()


def stored(store: Chroma, drawn: Drawn) -> VectorStoreRetriever:
    store.reset_collection()
    store.add_documents(drawn.documents, ids=[str(one.id) for one in drawn.documents])
    return store.as_retriever(search_kwargs={"k": K})


def answerable(store: Chroma) -> tuple[Drawn, VectorStoreRetriever, list[Document]]:
    """A question that the reader answers right over what the store finds, in its order."""
    for place in range(16):
        drawn = answered(place)
        retriever = stored(store, drawn)
        found = retriever.invoke(drawn.question)
        passages = passage_list("found", found)
        right = reader().generate(drawn.question, passages, max_new_tokens=16).text
        if right == drawn.answer:
            return drawn, retriever, found
    raise RuntimeError("The embedded reader answered none of 16 questions over the store's hits.")


def test_what_the_store_finds_becomes_windows(store: Chroma) -> None:
    drawn, retriever, found = answerable(store)
    given = {one.id: one for one in drawn.documents}
    assert len(found) == K
    for one in found:
        assert (one.page_content, one.metadata) == (
            given[one.id].page_content,
            given[one.id].metadata,
        )
    llm = ChatRagWindows(lm=reader(), max_tokens=16)
    prompt = ChatPromptTemplate.from_messages([("human", "{context}\n\n{input}")])
    chain = create_retrieval_chain(retriever, create_windows_chain(llm, prompt))
    answer = chain.invoke({"input": drawn.question})
    assert answer["answer"] == drawn.answer
    assert one_window_each(reader().generations[-1], texts_of(found))
    assert answer["context"] == found
