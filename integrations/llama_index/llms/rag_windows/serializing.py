"""Constructor arguments as plain JSON, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from rag_windows import Guard, Method, Profile
from rag_windows.integration import describe

SECRETS = ("token", "use_auth_token")
"""Keys that are left out."""


def as_plain(value: Any) -> Any:
    """A value as JSON.

    Types of torch become their names, configurations (quantization) their dictionaries, methods
    their name and numbers. Of what has no plain form, such as a header function, only the name is
    left: making an LLM of it fails with that name, instead of going on without.
    """
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Method):
        return describe(value)
    if isinstance(value, Guard):
        return asdict(value)
    if isinstance(value, Profile):
        return json.loads(value.to_json())
    if isinstance(value, Mapping):
        return {str(key): as_plain(entry) for key, entry in value.items() if key not in SECRETS}
    if isinstance(value, Sequence):
        return [as_plain(entry) for entry in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    described = getattr(value, "to_dict", None)
    if callable(described):
        return as_plain(described())
    return getattr(value, "__qualname__", None) or str(value)
