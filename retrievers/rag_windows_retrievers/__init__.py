"""From files to the passages that fit a question: loading, splitting, indexing, ranking.

A package of its own: of `rag_windows` it knows passages, errors and the cutting of
long texts, so it works for any model. Nothing here imports torch before an embedding model is used.
It needs the extra `cli`, or one that brings it, as `retrievers` and `pdf` do.
"""

from rag_windows.errors import require

require("rag_windows_retrievers", "bm25s", extra="cli")

from rag_windows_retrievers.documents import (
    SUFFIXES,
    Document,
    Documents,
    Skipped,
    documents_of,
    load_documents,
)
from rag_windows_retrievers.in_memory import (
    BM25Retriever,
    DenseRetriever,
    Encoder,
    Progress,
    SentenceEncoder,
    progress_bar,
)
from rag_windows_retrievers.index import (
    Changes,
    Index,
    IndexedDocument,
    IndexedFile,
    ingest,
    open_index,
)
from rag_windows_retrievers.retriever import (
    DEFAULT_K,
    ConversationalRetriever,
    HybridRetriever,
    Reranker,
    Retriever,
    ScoredPassage,
    last_turns,
)
from rag_windows_retrievers.splitting import split_document, split_documents

__all__ = [
    "DEFAULT_K",
    "SUFFIXES",
    "BM25Retriever",
    "Changes",
    "ConversationalRetriever",
    "DenseRetriever",
    "Document",
    "Documents",
    "Encoder",
    "HybridRetriever",
    "Index",
    "IndexedDocument",
    "IndexedFile",
    "Progress",
    "Reranker",
    "Retriever",
    "ScoredPassage",
    "SentenceEncoder",
    "Skipped",
    "documents_of",
    "ingest",
    "last_turns",
    "load_documents",
    "open_index",
    "progress_bar",
    "split_document",
    "split_documents",
]
