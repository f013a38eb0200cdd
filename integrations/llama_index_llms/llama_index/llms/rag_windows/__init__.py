"""rag-windows for LlamaIndex: an LLM that reads each retrieved node in a window of its own."""

from llama_index.llms.rag_windows.llm import RagWindowsLLM
from llama_index.llms.rag_windows.nodes import (
    ATTENTION_MASS,
    SourceNode,
    WindowOrderPostprocessor,
    passage_of_node,
)
from llama_index.llms.rag_windows.synthesizer import (
    WindowCondensePlusContextChatEngine,
    WindowContextChatEngine,
    WindowPromptHelper,
    WindowSynthesizer,
)
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
