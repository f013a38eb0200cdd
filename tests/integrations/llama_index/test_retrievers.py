"""Our retrievers in LlamaIndex, and a vector database of LlamaIndex's in front of our model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.schema import NodeWithScore
from llama_index.vector_stores.faiss import FaissVectorStore

from llama_index.llms.rag_windows import WindowSynthesizer, passage_of_node
from llama_index.retrievers.rag_windows import RagWindowsRetriever
from rag_windows import InputError, Passage
from rag_windows_retrievers import (
    BM25Retriever,
    ConversationalRetriever,
    DenseRetriever,
    HybridRetriever,
    Reranker,
    Retriever,
)
from tests.integrations.cases import PLACES, Held, case, one_window_each
from tests.integrations.llama_index.asking import BARE, ask, llm, nodes_of, told
from tests.retrievers.small import CORPUS, WordEncoder, save_cross_encoder

QUERY = "the old bridge of Halden and its harbour"

MADE: dict[str, Callable[[Path], Retriever]] = {
    "bm25": lambda _: BM25Retriever(CORPUS),
    "dense": lambda _: DenseRetriever(CORPUS, WordEncoder()),
    "hybrid": lambda _: HybridRetriever([BM25Retriever(CORPUS)]),
    "conversational": lambda _: ConversationalRetriever(BM25Retriever(CORPUS)),
    "reranker": lambda folder: Reranker(
        BM25Retriever(CORPUS), save_cross_encoder(folder), device="cpu"
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_nodes_are_what_the_retriever_found(name: str, tmp_path: Path) -> None:
    ours = MADE[name](tmp_path)
    found = ours.retrieve(QUERY, 3)
    assert len(found) == 3
    retriever = RagWindowsRetriever(ours, similarity_top_k=3)
    for nodes in (retriever.retrieve(QUERY), asyncio.run(retriever.aretrieve(QUERY))):
        assert all(type(node) is NodeWithScore for node in nodes)
        for node, passage in zip(nodes, found, strict=True):
            one = passage_of_node(node)
            assert (one.text, one.id, one.title) == (passage.text, passage.id, passage.title)
            assert one.score == pytest.approx(passage.score, abs=1e-5)
            assert passage.metadata.items() <= one.metadata.items()


def test_nothing_is_lost_to_equal_ids() -> None:
    corpus = [Passage("old bridge", "x"), Passage("bridge, new", "x"), Passage("a bridge")]
    retriever = RagWindowsRetriever(BM25Retriever(corpus))
    nodes = retriever.retrieve("bridge")
    assert {node.text for node in nodes} == {one.text for one in corpus}
    ids = [node.node_id for node in nodes]
    assert len(set(ids)) == 3
    assert "x" in ids
    assert [node.node_id for node in retriever.retrieve("bridge")] == ids


def test_events_come_once_and_bad_numbers_are_refused() -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    manager = CallbackManager([debug])
    RagWindowsRetriever(BM25Retriever(CORPUS), callback_manager=manager).retrieve(QUERY)
    assert len(debug.get_event_pairs(CBEventType.RETRIEVE)) == 1
    with pytest.raises(InputError, match="k must be at least 1"):
        RagWindowsRetriever(BM25Retriever(CORPUS), similarity_top_k=0)


def test_it_does_not_block_the_event_loop() -> None:
    held = Held()
    retriever = RagWindowsRetriever(held)
    assert asyncio.run(held.beside(lambda: retriever.aretrieve("q")))[0].node_id == "late"


class WordEmbedding(BaseEmbedding):
    """Vectors out of words: no model, and good enough to find a name."""

    def _get_text_embedding(self, text: str) -> list[float]:
        found: list[float] = WordEncoder().embed([text], query=False)[0].tolist()
        return found

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)


def test_what_a_vector_store_finds_becomes_windows() -> None:
    one = case(PLACES[0])
    given: list[Any] = [node.node for node in nodes_of(one)]
    vectors = FaissVectorStore(faiss_index=faiss.IndexFlatIP(WordEncoder().dimension))
    context = StorageContext.from_defaults(vector_store=vectors)
    index = VectorStoreIndex(given, storage_context=context, embed_model=WordEmbedding())
    synthesizer = WindowSynthesizer(llm(), text_qa_template=BARE)
    engine = index.as_query_engine(
        llm=llm(), similarity_top_k=len(given), response_synthesizer=synthesizer
    )
    for way in ("sync", "async"):
        with told() as seen:
            text, response, _ = ask(engine, "query", way, one.question)
        (raw,) = seen.raws()
        assert one_window_each(raw["windows"], [source.text for source in response.source_nodes])
        assert {source.node_id for source in response.source_nodes} == {n.id_ for n in given}
        right = llm().complete(one.question, nodes=response.source_nodes).text
        assert text == right
