"""Constructor arguments as plain JSON, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rag_windows import Guard, Method
from rag_windows.calibration import Profile
from rag_windows.errors import InputError
from rag_windows.guard import FallbackOption, guard_of
from rag_windows.methods import describe, from_description

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


def read_method(value: str | Method | Mapping[str, Any]) -> Method:
    """A method from its name, itself, or what `as_plain` made of it.

    Raises:
        MethodError: an unknown name, or numbers that it does not have.
    """
    return from_description(value)


def read_profile(value: Profile | str | Path | Mapping[str, Any] | None) -> Profile | None:
    """A profile from its path, itself, or what `as_plain` made of it.

    Raises:
        ProfileError: it can't be used.
    """
    if value is None:
        return None
    return Profile.from_json(json.dumps(value)) if isinstance(value, Mapping) else Profile.of(value)


def read_guard(value: FallbackOption | Mapping[str, Any]) -> Guard | None:
    """A guard from "sequential", itself, or what `as_plain` made of it.

    Raises:
        InputError: it is none of them, or has numbers that a guard does not have.
    """
    if not isinstance(value, Mapping):
        return guard_of(value)
    try:
        return Guard(**value)
    except TypeError as error:
        raise InputError(f"{dict(value)!r} are no numbers of a Guard: {error}.") from error
