"""rag-windows' retrievers for LlamaIndex."""

from llama_index.retrievers.rag_windows.base import RagWindowsRetriever

__all__ = ["RagWindowsRetriever"]
