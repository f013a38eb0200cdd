"""Any of our retrievers as LangChain's."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import run_in_executor
from pydantic import Field

from langchain_rag_windows.errors import in_langchain_terms
from rag_windows.integration import chunk_metadata
from rag_windows_retrievers import Retriever
from rag_windows_retrievers.retriever import DEFAULT_K


class RagWindowsRetriever(BaseRetriever):
    """A retriever of `rag_windows_retrievers` in chains and agents.

    A document keeps its passage's id and metadata; its title and score stand in
    ``metadata["title"]`` and ``metadata["score"]``, where `ChatRagWindows` looks for them.

    Attributes:
        retriever: a `BM25Retriever`, `DenseRetriever`, `HybridRetriever`, `Reranker`,
            `ConversationalRetriever`, or anything else with their ``retrieve``.
        k: how many documents at most, unless the call says otherwise:
            ``retriever.invoke(query, k=3)``.
    """

    retriever: Retriever
    k: int = Field(default=DEFAULT_K, ge=1)

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun | None = None,
        k: int | None = None,
    ) -> list[Document]:
        with in_langchain_terms():
            found = self.retriever.retrieve(query, self.k if k is None else k)
        documents = []
        for passage in found:
            own = {"title": passage.title, "score": passage.score}
            known = {k: v for k, v in own.items() if v is not None}
            metadata = {**passage.metadata, **known, **chunk_metadata(passage)}
            documents.append(Document(passage.text, id=passage.id, metadata=metadata))
        return documents

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        return await run_in_executor(None, self._get_relevant_documents, query, **options)
