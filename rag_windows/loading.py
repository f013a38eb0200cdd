"""Finding and loading a model and its tokenizer."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rag_windows.errors import InputError, ModelLoadError

EMBEDDED = ("tiny-reader", "tiny-learner")
"""Models that are shipped with the package."""


def embedded_path(name: str) -> Path:
    """Folder of a shipped model."""
    return Path(str(resources.files("rag_windows") / "models" / name))


def resolve(
    model: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    dtype: str | torch.dtype,
    device_map: Any,
    **model_kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A loaded model as it is, or one loaded by name, in evaluation mode.

    Raises:
        InputError: options of loading for a loaded model, or no model at all.
        ModelLoadError: see `load`.
    """
    if isinstance(model, PreTrainedModel):
        if model_kwargs or device_map is not None or dtype != "auto":
            raise InputError(
                "dtype, device_map and model options apply to models loaded here by name; "
                "this one is loaded already."
            )
        return model, tokenizer
    if not isinstance(model, str | Path):
        raise InputError(
            f"model must be a name, a folder or a transformers PreTrainedModel, not "
            f"{type(model).__name__}. Give a compiled model uncompiled, and a PEFT model as "
            "its get_base_model()."
        )
    if device_map is not None:
        model_kwargs["device_map"] = device_map
    loaded, tokenizer = load(model, tokenizer, dtype=dtype, **model_kwargs)
    return loaded.eval(), tokenizer


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
    hub = _hub(kwargs)
    if isinstance(kwargs.get("dtype"), str) and kwargs["dtype"] != "auto":
        kwargs["dtype"] = _dtype(kwargs["dtype"])
    try:
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(source, **hub)
        loaded = AutoModelForCausalLM.from_pretrained(source, use_safetensors=True, **kwargs)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError) as error:
        raise ModelLoadError(_explain(str(model), error)) from error
    return loaded, tokenizer


def load_config(model: str | Path, **kwargs: Any) -> PreTrainedConfig:
    """Only a model's configuration, no weights; arguments and errors as in `load`."""
    source = str(embedded_path(model) if model in EMBEDDED else model)
    _check_path(str(model), source)
    try:
        return AutoConfig.from_pretrained(source, **_hub(kwargs))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelLoadError(_explain(str(model), error)) from error


def load_tokenizer(name: str | Path, **kwargs: Any) -> PreTrainedTokenizerBase:
    """Only a tokenizer, with options of its own; errors as in `load`."""
    if kwargs.get("trust_remote_code"):
        raise ModelLoadError(
            "trust_remote_code=True is refused: it runs code from the tokenizer's repository. Load "
            "the tokenizer yourself if you trust it, and pass the object as tokenizer=."
        )
    source = str(embedded_path(name) if name in EMBEDDED else name)
    try:
        return AutoTokenizer.from_pretrained(source, **kwargs)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError) as error:
        raise ModelLoadError(_explain(str(name), error)) from error


def _hub(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: kwargs[key] for key in ("revision", "token", "cache_dir") if key in kwargs}


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
            f"local folder; the shipped models are {' and '.join(EMBEDDED)}."
        )
    if "Unrecognized configuration class" in text:
        return (
            f"Model {name!r} is no causal language model: transformers has no "
            "AutoModelForCausalLM for its type. Choose a decoder-only model."
        )
    return f"Model {name!r} can't be loaded: {first}"
