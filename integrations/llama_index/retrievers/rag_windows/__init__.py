"""rag-windows' retrievers for LlamaIndex."""

from rag_windows.errors import missing

try:
    from llama_index.retrievers.rag_windows.retriever import RagWindowsRetriever
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("llama_index"):
        raise
    needs = missing("The LlamaIndex adapter", "llama-index-core", "llama-index")
    raise ModuleNotFoundError(needs, name=error.name) from None

__all__ = ["RagWindowsRetriever"]
