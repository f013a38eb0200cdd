"""rag-windows for LangChain: each retrieved document in an attention window of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rag_windows.errors import missing

try:
    import langchain_core  # noqa: F401 - only whether it is there
except ImportError as error:
    raise ImportError(missing("The LangChain adapter", "langchain-core", "langchain")) from error

from langchain_rag_windows.messages import WindowDocumentPrompt
from langchain_rag_windows.models import ChatRagWindows, RagWindows, create_windows_chain

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
    # Only the middleware needs the package langchain; the rest works with langchain-core alone.
    if name == "RagWindowsMiddleware":
        from langchain_rag_windows.middleware import RagWindowsMiddleware

        return RagWindowsMiddleware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
