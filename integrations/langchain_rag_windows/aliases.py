"""Arguments under the names that users bring from other integrations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_rag_windows.errors import RequestError

ALIASES = {
    "model_name": "model",
    "model_id": "model",
    "max_new_tokens": "max_tokens",
    "pipeline_kwargs": "generate_kwargs",
    "stop_sequences": "stop",
    "request_timeout": "timeout",
}
"""Names that users bring from other integrations -> ours."""


def unalias(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments under our names.

    Raises:
        RequestError: one argument under two names.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        ours = ALIASES.get(name, name)
        if ours in found:
            raise RequestError(f"{name} and {ours} are one argument; give only one of them.")
        found[ours] = value
    return found
