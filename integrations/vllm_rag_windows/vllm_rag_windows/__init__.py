"""Experimental: rag-windows inside vLLM, by a KV connector.

vLLM loads ``RagWindowsConnector`` of ``vllm_rag_windows.connector`` by name, `OfflineWindows` asks
a `vllm.LLM` that has it, and the endpoint plug-in ``rag-windows`` takes documents over HTTP. See
docs/vllm.md.
"""

from __future__ import annotations

from vllm_rag_windows.offline import OfflineWindows
from vllm_rag_windows.prompts import WindowedPrompt, WindowPrompts

__all__ = ["OfflineWindows", "WindowPrompts", "WindowedPrompt"]
