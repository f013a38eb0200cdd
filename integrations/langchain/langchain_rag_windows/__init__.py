"""rag-windows for LangChain: each retrieved document in an attention window of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_rag_windows.messages import WindowDocumentPrompt
from langchain_rag_windows.models import ChatRagWindows, RagWindows, create_windows_chain
from rag_windows.errors import require

if TYPE_CHECKING:
    from langchain_rag_windows.middleware import RagWindowsMiddleware

__all__ = [
    "ChatRagWindows",
    "RagWindows",
    "RagWindowsMiddleware",
    "WindowDocumentPrompt",
    "create_windows_chain",
]


def __getattr__(name: str) -> Any:
    # Only the middleware needs the package langchain; the rest needs only langchain-core.
    if name == "RagWindowsMiddleware":
        require(name, "langchain", extra="langchain")
        from langchain_rag_windows.middleware import RagWindowsMiddleware

        return RagWindowsMiddleware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
