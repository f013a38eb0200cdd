"""Our retrievers in both frameworks, and vector databases of theirs in front of our models."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import faiss
import pytest
from langchain_classic.chains.retrieval import create_retrieval_chain
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.schema import NodeWithScore
from llama_index.vector_stores.faiss import FaissVectorStore
from pydantic import ValidationError

from langchain_rag_windows import create_windows_chain
from langchain_rag_windows.errors import RequestError
from langchain_rag_windows.retrievers import RagWindowsRetriever
from llama_index.llms.rag_windows import WindowSynthesizer, passage_of_node
from llama_index.retrievers.rag_windows import RagWindowsRetriever as LlamaIndexRetriever
from rag_windows import InputError, Passage
from rag_windows_retrievers import BM25Retriever
from tests.integrations.cases import PLACES, Held, case, one_window_each
from tests.integrations.langchain import asking as langchain
from tests.integrations.llama_index import asking as llama_index
from tests.retrievers.small import CORPUS, MADE

QUERY = "the old bridge of Halden and its harbour"


class TestStandard(RetrieversIntegrationTests):
    """LangChain's own tests of a retriever, with one of ours."""

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return RagWindowsRetriever

    @property
    def retriever_query_example(self) -> str:
        return QUERY

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"retriever": BM25Retriever(CORPUS)}


@pytest.mark.parametrize("name", MADE)
def test_documents_and_nodes_are_what_the_retriever_found(name: str, tmp_path: Path) -> None:
    ours = MADE[name](tmp_path, CORPUS)
    found = ours.retrieve(QUERY, 3)
    assert len(found) == 3
    retriever = LlamaIndexRetriever(ours, similarity_top_k=3)
    for nodes in (retriever.retrieve(QUERY), asyncio.run(retriever.aretrieve(QUERY))):
        assert all(type(node) is NodeWithScore for node in nodes)
        for node, passage in zip(nodes, found, strict=True):
            one = passage_of_node(node)
            assert (one.text, one.id, one.title) == (passage.text, passage.id, passage.title)
            assert one.score == pytest.approx(passage.score, abs=1e-5)
            assert passage.metadata.items() <= one.metadata.items()
    documents = RagWindowsRetriever(retriever=ours, k=3).invoke(QUERY)
    cited = langchain.chat().invoke("Who?", documents=documents).response_metadata["citations"]
    for passage, document, entry in zip(found, documents, cited, strict=True):
        assert document.page_content == passage.text
        assert document.metadata["score"] == pytest.approx(passage.score, abs=1e-5)
        assert (entry["id"], entry["title"]) == (passage.id, passage.title)
        assert passage.metadata.items() <= entry["metadata"].items()


def test_passages_without_an_id_or_with_the_same_are_not_lost() -> None:
    (bare,) = RagWindowsRetriever(retriever=BM25Retriever([Passage("bridge")])).invoke("bridge")
    assert (bare.id, [*bare.metadata]) == (None, ["score"])
    corpus = [Passage("old bridge", "x"), Passage("bridge, new", "x"), Passage("a bridge")]
    retriever = LlamaIndexRetriever(BM25Retriever(corpus))
    nodes = retriever.retrieve("bridge")
    assert {node.text for node in nodes} == {one.text for one in corpus}
    ids = [node.node_id for node in nodes]
    assert len(set(ids)) == 3
    assert "x" in ids
    assert [node.node_id for node in retriever.retrieve("bridge")] == ids


def test_bad_input_is_refused_in_the_framework_s_kind_of_error() -> None:
    retriever = RagWindowsRetriever(retriever=BM25Retriever(CORPUS))
    with pytest.raises(RequestError, match="k must be at least 1"):
        retriever.invoke("bridge", k=0)
    with pytest.raises(ValidationError, match="instance of Retriever"):
        RagWindowsRetriever(retriever="bridge")  # type: ignore[arg-type]  # it is what is refused
    with pytest.raises(InputError, match="k must be at least 1"):
        LlamaIndexRetriever(BM25Retriever(CORPUS), similarity_top_k=0)


def test_they_do_not_block_the_event_loop() -> None:
    held = Held()
    documents = asyncio.run(held.beside(lambda: RagWindowsRetriever(retriever=held).ainvoke("q")))
    assert documents[0].id == "late"
    held = Held()
    nodes = asyncio.run(held.beside(lambda: LlamaIndexRetriever(held).aretrieve("q")))
    assert nodes[0].node_id == "late"


def test_what_a_vector_store_of_langchain_finds_becomes_windows() -> None:
    one, told = case(PLACES[0]), langchain.Told()
    documents = langchain.documents_of(one)
    store = InMemoryVectorStore.from_documents(documents, DeterministicFakeEmbedding(size=8))
    prompt = ChatPromptTemplate.from_messages([("human", "{context}\n\n{input}")])
    chain = create_retrieval_chain(
        store.as_retriever(search_kwargs={"k": len(documents)}),
        create_windows_chain(langchain.chat(callbacks=[told]), prompt),
    )
    answer = chain.invoke({"input": one.question})
    texts = [found.page_content for found in answer["context"]]
    assert sorted(texts) == sorted(document.page_content for document in documents)
    assert one_window_each(told.answers[-1]["windows"], texts)
    right = langchain.chat().invoke(one.question, documents=answer["context"])
    assert answer["answer"] == right.text


def test_what_a_vector_store_of_llama_index_finds_becomes_windows() -> None:
    one = case(PLACES[0])
    given: list[Any] = [node.node for node in llama_index.nodes_of(one)]
    vectors = FaissVectorStore(faiss_index=faiss.IndexFlatIP(8))
    context = StorageContext.from_defaults(vector_store=vectors)
    index = VectorStoreIndex(given, storage_context=context, embed_model=MockEmbedding(embed_dim=8))
    llm = llama_index.llm()
    synthesizer = WindowSynthesizer(llm, text_qa_template=llama_index.BARE)
    options = {"similarity_top_k": len(given), "response_synthesizer": synthesizer}
    engine = index.as_query_engine(llm=llm, **options)
    for way in ("sync", "async"):
        with llama_index.told() as seen:
            text, response, _ = llama_index.ask(engine, "query", way, one.question)
        (raw,) = seen.raws()
        assert one_window_each(raw["windows"], [source.text for source in response.source_nodes])
        assert {source.node_id for source in response.source_nodes} == {n.id_ for n in given}
        assert text == llm.complete(one.question, nodes=response.source_nodes).text
