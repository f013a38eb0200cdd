"""rag-windows for LlamaIndex: an LLM that reads each retrieved node in a window of its own."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rag_windows.errors import missing

try:
    from llama_index.llms.rag_windows.llm import RagWindowsLLM
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("llama_index"):
        raise
    needs = missing("The LlamaIndex adapter", "llama-index-core", "llama-index")
    raise ModuleNotFoundError(needs, name=error.name) from None

if TYPE_CHECKING:
    from llama_index.llms.rag_windows.chat_engines import (
        WindowCondensePlusContextChatEngine,
        WindowContextChatEngine,
    )
    from llama_index.llms.rag_windows.messages import passage_of_node
    from llama_index.llms.rag_windows.postprocessor import WindowOrderPostprocessor
    from llama_index.llms.rag_windows.prompt_helper import WindowPromptHelper
    from llama_index.llms.rag_windows.source_nodes import ATTENTION_MASS, SourceNode
    from llama_index.llms.rag_windows.synthesizer import WindowSynthesizer
    from llama_index.llms.rag_windows.templates import Parts

__all__ = [
    "ATTENTION_MASS",
    "Parts",
    "RagWindowsLLM",
    "SourceNode",
    "WindowCondensePlusContextChatEngine",
    "WindowContextChatEngine",
    "WindowOrderPostprocessor",
    "WindowPromptHelper",
    "WindowSynthesizer",
    "passage_of_node",
]

# Imported on first use: they bring LlamaIndex's engines, which an LLM alone does not need.
_HOMES = {
    "chat_engines": ("WindowCondensePlusContextChatEngine", "WindowContextChatEngine"),
    "messages": ("passage_of_node",),
    "postprocessor": ("WindowOrderPostprocessor",),
    "prompt_helper": ("WindowPromptHelper",),
    "source_nodes": ("ATTENTION_MASS", "SourceNode"),
    "synthesizer": ("WindowSynthesizer",),
    "templates": ("Parts",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
