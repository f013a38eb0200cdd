"""From the harness's model arguments to a model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from rag_windows import WindowedLM, loading
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.calibration import Profile
from rag_windows.errors import InputError, MethodError
from rag_windows.methods import Method, linked, resolve
from rag_windows.methods.registry import known_parameters, with_known

DEFAULT_METHOD = "ape"

_log = logging.getLogger(__name__)


def method_of(
    name: str | Method | None, numbers: Mapping[str, Any], link_tokens: Any, link_choose: Any
) -> Method | None:
    """A method with those of its parameters that were given.

    Args:
        name: of it, or itself; None for the default one if there are numbers, else for none.
        numbers: parameters by name; each goes to the method, or to the one that it stands on.
        link_tokens: see `rag_windows.methods.Linked`; None for no linking.
        link_choose: likewise.

    Raises:
        InputError: a name that is no parameter of the method.
        MethodError: an unknown method, or a number outside its domain.
    """
    if name is None and not numbers and link_tokens is None:
        return None
    method = resolve(name or DEFAULT_METHOD)
    known = known_parameters(method)
    unknown = sorted(set(numbers) - known)
    if unknown:
        raise InputError(
            f"model_args holds {unknown}, which is neither an option of rag-windows nor a "
            f"parameter of the method {method.name!r} ({', '.join(sorted(known)) or 'it has none'})"
            "; take it out. docs/lm_eval.md lists the options."
        )
    try:
        return linked(with_known(method, numbers), link_tokens, link_choose)
    except TypeError as error:
        raise MethodError(f"{dict(numbers)!r} do not fit the method {method.name!r}.") from error


def load(
    pretrained: Any,
    *,
    tokenizer: Any,
    method: Method | None,
    profile: str | None,
    dtype: Any,
    device: str | None,
    device_map: Any,
    revision: str | None,
    cache: PassageCache | None,
    model_kwargs: Mapping[str, Any],
) -> WindowedLM:
    """Load a model onto its device.

    Args:
        pretrained: name or folder, a loaded model (with ``tokenizer``), or a `WindowedLM`.
        tokenizer: name or folder of it, or itself; None for the model's own.
        method: how windows are read; None for the profile's, else the default one.
        profile: path of a calibration, or None.
        dtype: of the weights.
        device: "cpu", "cuda", "cuda:1"; None for the first accelerator there is.
        device_map: instead of a device, for several of them.
        revision: of the model on the Hub.
        cache: of passages, or None.
        model_kwargs: for transformers, such as ``trust_remote_code``, which is refused.

    Raises:
        InputError: options that do not go together, or a device that is not there.
        ModelError: the model can't be found, loaded or read in windows.
    """
    if isinstance(pretrained, WindowedLM):
        if tokenizer is not None or method is not None or profile is not None:
            raise InputError(
                "A WindowedLM has its tokenizer, method and profile already; leave those out of "
                "model_args, or give the plain model as pretrained."
            )
        return pretrained if cache is None else pretrained.with_cache(cache)
    found = None if profile is None else Profile.load(profile)
    if isinstance(tokenizer, str):
        tokenizer = loading.load_tokenizer(tokenizer)
    settings = {"method": method, "profile": found, "cache": cache, "tokenizer": tokenizer}
    if not isinstance(pretrained, str):
        return WindowedLM.from_pretrained(pretrained, **settings)
    options = {key: value for key, value in model_kwargs.items() if value not in (None, False)}
    if revision is not None:
        options["revision"] = str(revision)
    if device_map is not None:
        return WindowedLM.from_pretrained(
            pretrained, dtype=dtype, device_map=device_map, **settings, **options
        )
    place = _device(device)
    model, settings["tokenizer"] = loading.load(pretrained, tokenizer, dtype=dtype, **options)
    return WindowedLM(model.to(place).eval(), revision=options.get("revision"), **settings)


def _device(name: str | None) -> torch.device:
    """The device asked for; the CPU where PyTorch has no CUDA, since the harness asks for it."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        _log.warning("PyTorch sees no CUDA device; %s becomes cpu.", name)
        name = "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise InputError(f"The device {name!r} can't be used here ({first}).") from error
    return device


def cache_of(cache: bool, folder: str | None, memory: Any) -> PassageCache | None:
    """The passage cache of a run: in memory, or also in a folder.

    Raises:
        InputError: a folder, but no cache.
        CacheError: the folder can't be used.
    """
    if not cache:
        if folder is not None:
            raise InputError("cache=false and cache_dir can't both be given; leave one out.")
        return None
    if folder is not None:
        return PassageCache.default(folder, memory=memory)
    return PassageCache(memory=memory)
