"""Any of our retrievers as LlamaIndex's, and the index as a vector store."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index.retrievers.rag_windows.nodes import node_of
from llama_index.retrievers.rag_windows.store import RagWindowsVectorStore
from rag_windows_retrievers import Retriever
from rag_windows_retrievers.retriever import DEFAULT_K, check_k

__all__ = ["RagWindowsRetriever", "RagWindowsVectorStore"]


class RagWindowsRetriever(BaseRetriever):
    """A retriever of `rag_windows_retrievers` in query engines and chat engines.

    A node keeps its passage's id, score and metadata; the title stands in ``metadata["title"]``,
    the one entry that a model is shown in addition to the text.

    Args:
        retriever: a `BM25Retriever`, `DenseRetriever`, `HybridRetriever`, `Reranker`, or anything
            else with their ``retrieve``. Chat engines condense the conversation themselves.
        similarity_top_k: how many nodes at most, at least 1.
        options: for LlamaIndex's ``BaseRetriever``: callback_manager, object_map, objects, verbose.

    Raises:
        InputError: `similarity_top_k` is below 1.
    """

    def __init__(
        self, retriever: Retriever, similarity_top_k: int = DEFAULT_K, **options: Any
    ) -> None:
        check_k(similarity_top_k)
        self._retriever = retriever
        self.similarity_top_k = similarity_top_k
        super().__init__(**options)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes: dict[str, NodeWithScore] = {}
        for passage in self._retriever.retrieve(query_bundle.query_str, self.similarity_top_k):
            name = passage.id
            if name is None or name in nodes:
                # One from its text: LlamaIndex drops a second node of one id.
                text = f"{passage.id}\n{passage.title}\n{passage.text}"
                name = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
            node = node_of(passage, name)
            nodes.setdefault(name, NodeWithScore(node=node, score=passage.score))
        return list(nodes.values())

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)
