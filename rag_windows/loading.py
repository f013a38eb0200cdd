"""Finding and loading a model and its tokenizer."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rag_windows.errors import ModelLoadError

EMBEDDED = ("tiny-reader",)
"""Models that are shipped with the package."""


def embedded_path(name: str) -> Path:
    """Folder of a shipped model."""
    return Path(str(resources.files("rag_windows") / "models" / name))


def load(
    model: str | Path,
    tokenizer: PreTrainedTokenizerBase | None,
    **kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load by shipped name, local folder or Hub name.

    Weights come from safetensors only, and no code of a repository is run.

    Args:
        model: name or folder.
        tokenizer: to use instead of the model's own.
        kwargs: for ``AutoModelForCausalLM.from_pretrained``: dtype, device_map,
            quantization_config, revision, attn_implementation, ...

    Raises:
        ModelLoadError: saying what was not found or could not be loaded, and what to do.
    """
    if kwargs.get("trust_remote_code"):
        raise ModelLoadError(
            "trust_remote_code=True is refused: it runs code from the model's repository. Load the "
            "model yourself if you trust it, and pass the object to from_pretrained."
        )
    source = str(embedded_path(model) if model in EMBEDDED else model)
    _check_path(str(model), source)
    hub = {key: kwargs[key] for key in ("revision", "token", "cache_dir") if key in kwargs}
    if isinstance(kwargs.get("dtype"), str) and kwargs["dtype"] != "auto":
        kwargs["dtype"] = _dtype(kwargs["dtype"])
    try:
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(source, **hub)
        loaded = AutoModelForCausalLM.from_pretrained(source, use_safetensors=True, **kwargs)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError) as error:
        raise ModelLoadError(_explain(str(model), error)) from error
    return loaded, tokenizer


def _check_path(name: str, source: str) -> None:
    path = Path(source)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelLoadError(
            f"The folder {name!r} holds no config.json; give the folder that save_pretrained made."
        )
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name
    if looks_local and not path.exists():
        raise ModelLoadError(f"There is no model folder {name!r}; check the path.")


def _dtype(name: str) -> torch.dtype:
    value = getattr(torch, name, None)
    if not isinstance(value, torch.dtype):
        raise ModelLoadError(
            f"Unknown dtype {name!r}; use 'auto', 'float32', 'bfloat16' or 'float16'."
        )
    return value


def _explain(name: str, error: Exception) -> str:
    text = str(error)
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    lowered = text.lower()
    if "safetensors" in lowered and isinstance(error, OSError):
        return (
            f"Model {name!r} has no safetensors weights ({first}). Convert it with "
            "save_pretrained, which writes them; pickled weights are never loaded."
        )
    offline = ("connection", "couldn't connect", "offline", "resolve", "timed out", "can't load")
    if isinstance(error, OSError) and any(word in lowered for word in offline):
        return (
            f"Model {name!r} is neither a folder here nor in the local cache, and the model hub "
            f"can't be reached or does not know it. Check the name and the network, or give a "
            f"local folder; the shipped model is {EMBEDDED[0]!r}."
        )
    if "Unrecognized configuration class" in text:
        return (
            f"Model {name!r} is no causal language model: transformers has no "
            "AutoModelForCausalLM for its type. Choose a decoder-only model."
        )
    return f"Model {name!r} can't be loaded: {first}"
