"""Experimental: rag-windows inside vLLM, by a KV connector.

vLLM loads `RagWindowsConnector` by name::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "RagWindowsConnector",
        "kv_connector_module_path": "vllm_rag_windows.connector", "kv_role": "kv_both"}'

`OfflineWindows` asks a `vllm.LLM` that has it, and the endpoint plug-in ``rag-windows`` takes
documents over HTTP. See docs/vllm.md.
"""

from __future__ import annotations

from vllm_rag_windows.offline import OfflineWindows
from vllm_rag_windows.prompts import TokenRequest, WindowPrompts, WindowRequests
from vllm_rag_windows.windowed_prompt import WindowedPrompt, new_cache_salt

__all__ = [
    "OfflineWindows",
    "TokenRequest",
    "WindowPrompts",
    "WindowRequests",
    "WindowedPrompt",
    "new_cache_salt",
]
