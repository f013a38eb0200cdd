"""From files to the passages that fit a question: loading, splitting, ranking.

A folder of its own beside the engine: it knows `rag_windows.passage` and `rag_windows.errors` and
nothing else of it, so it works for any model and without torch.
"""

from rag_windows_retrievers.bm25 import BM25Retriever
from rag_windows_retrievers.documents import Document, Documents, load_documents
from rag_windows_retrievers.files import Skipped
from rag_windows_retrievers.splitting import split_document, split_documents

__all__ = [
    "BM25Retriever",
    "Document",
    "Documents",
    "Skipped",
    "load_documents",
    "split_document",
    "split_documents",
]
