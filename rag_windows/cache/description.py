"""Plain data, configs and modules as bytes that are the same wherever they are the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any

import torch
from transformers import PreTrainedModel

from rag_windows.cache.keys import fields

_NOT_COMPUTED_WITH = {
    # Names and notes of a config or module that change no number, or change while it is used.
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "use_cache",
    "_attn_implementation",
    "_attn_implementation_internal",
    "attn_implementation",
    "training",
    "gradient_checkpointing",
    "warnings_issued",
    "max_seq_len_cached",
}
_ADAPTER_SWITCHES = {"_active_adapter", "_disable_adapters"}


def canonical(value: Any) -> bytes:
    """Plain data as JSON that is the same for equal data; names that change nothing left out."""
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=True).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {f"{type(key).__name__}:{key}": _plain(v) for key, v in value.items() if counts(key)}
    if isinstance(value, Set):
        return sorted(json.dumps(_plain(entry), sort_keys=True) for entry in value)
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    return repr(value) if isinstance(value, float) else f"{type(value).__name__}:{value}"


def counts(name: Any) -> bool:
    """Whether an attribute or config entry of this name can change what is computed."""
    if name in _ADAPTER_SWITCHES:
        return True
    return name not in _NOT_COMPUTED_WITH and not (
        isinstance(name, str) and name.startswith("_") and name != "_commit_hash"
    )


def is_plain(value: Any) -> bool:
    """Whether a value is plain data through and through."""
    if isinstance(value, Mapping):
        return all(isinstance(k, str | int) and is_plain(v) for k, v in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(is_plain(entry) for entry in value)
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def describe(name: str, module: torch.nn.Module) -> bytes:
    """A module's place, class and plain attributes."""
    kind = type(module)
    plain: dict[str, Any] = {}
    if not isinstance(module, PreTrainedModel):
        # Containers among them are read again in every call.
        plain = {
            key: value
            for key, value in module.__dict__.items()
            if counts(key) and is_plain(value) and not isinstance(value, dict | list)
        }
    return fields(name.encode(), kind.__module__.encode(), kind.__qualname__.encode()) + canonical(
        plain
    )
