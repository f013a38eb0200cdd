"""From files to the passages that fit a question: loading, splitting, indexing, ranking.

A folder of its own beside the engine: of `rag_windows` it knows passages, errors and the cutting of
long texts, so it works for any model. Nothing here imports torch before an embedding model is used.
"""

from rag_windows_retrievers.bm25 import BM25Retriever
from rag_windows_retrievers.conversational import (
    ConversationalRetriever,
    last_turns,
    rewritten_by,
)
from rag_windows_retrievers.dense import DenseRetriever
from rag_windows_retrievers.documents import (
    SUFFIXES,
    Document,
    Documents,
    Skipped,
    load_documents,
)
from rag_windows_retrievers.encoder import Encoder, Progress, SentenceEncoder, progress_bar
from rag_windows_retrievers.ingest import Index, ingest, open_index
from rag_windows_retrievers.reranker import Reranker
from rag_windows_retrievers.retriever import (
    DEFAULT_K,
    HybridRetriever,
    Retriever,
    ScoredPassage,
)
from rag_windows_retrievers.splitting import TokenBudget, split_document, split_documents

__all__ = [
    "DEFAULT_K",
    "SUFFIXES",
    "BM25Retriever",
    "ConversationalRetriever",
    "DenseRetriever",
    "Document",
    "Documents",
    "Encoder",
    "HybridRetriever",
    "Index",
    "Progress",
    "Reranker",
    "Retriever",
    "ScoredPassage",
    "SentenceEncoder",
    "Skipped",
    "TokenBudget",
    "ingest",
    "last_turns",
    "load_documents",
    "open_index",
    "progress_bar",
    "rewritten_by",
    "split_document",
    "split_documents",
]
