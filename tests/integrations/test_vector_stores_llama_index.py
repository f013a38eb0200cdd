"""A vector database of LlamaIndex's in front of our model: FAISS, in this process."""

from __future__ import annotations

import asyncio

import faiss
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import BaseNode, NodeWithScore
from llama_index.vector_stores.faiss import FaissVectorStore

from llama_index.llms.rag_windows import RagWindowsLLM, WindowSynthesizer, passage_of_node
from tests.integrations.llama_index.cases import Asked, draw, reader
from tests.retrievers.small import WordEncoder

K = 8


class WordEmbedding(BaseEmbedding):
    """Vectors out of words: no model, and good enough to find a name."""

    _encoder: WordEncoder = PrivateAttr(default_factory=WordEncoder)

    def _get_text_embedding(self, text: str) -> list[float]:
        found: list[float] = self._encoder.embed([text], query=False)[0].tolist()
        return found

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)


def stored(asked: Asked) -> BaseRetriever:
    nodes: list[BaseNode] = [one.node for one in asked.nodes]
    vectors = FaissVectorStore(faiss_index=faiss.IndexFlatIP(WordEncoder().dimension))
    index = VectorStoreIndex(
        nodes,
        storage_context=StorageContext.from_defaults(vector_store=vectors),
        embed_model=WordEmbedding(),
    )
    return index.as_retriever(similarity_top_k=K)


def answerable() -> tuple[Asked, BaseRetriever, list[NodeWithScore]]:
    """A question that the reader answers right over what the store finds, in its order."""
    for seed in range(32):
        asked = draw(9000 + seed, seed % 16)
        retriever = stored(asked)
        found = retriever.retrieve(asked.question)
        passages = [passage_of_node(node) for node in found]
        right = reader().generate(asked.question, passages, max_new_tokens=16)
        if right.text == asked.answer:
            return asked, retriever, found
    raise RuntimeError("The embedded reader answered none of 32 questions over the store's hits.")


def test_what_the_store_finds_becomes_windows() -> None:
    asked, retriever, found = answerable()
    assert len(found) == K
    assert {one.node_id for one in found} <= {one.node_id for one in asked.nodes}
    engine = RetrieverQueryEngine(
        retriever,
        response_synthesizer=WindowSynthesizer(RagWindowsLLM(lm=reader(), max_new_tokens=16)),
    )
    for response in (engine.query(asked.question), asyncio.run(engine.aquery(asked.question))):
        assert str(response) == asked.answer
        spans = [(w.passage, w.parts, w.start, w.end) for w in reader().generations[-1].windows]
        assert spans == [(i, 1, 0, len(node.text)) for i, node in enumerate(found)]
        assert [one.node_id for one in response.source_nodes] == [one.node_id for one in found]
