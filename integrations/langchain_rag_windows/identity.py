"""What an answer of a model depends on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_rag_windows.loaded import name_of
from rag_windows import __version__ as engine_version
from rag_windows.guard import guard_of
from rag_windows.sharing import folder_state

if TYPE_CHECKING:
    from langchain_rag_windows.options import EngineOptions

SECRETS = ("token", "use_auth_token")
"""Loading options that must not show in traces."""


def identity(options: EngineOptions) -> dict[str, Any]:
    """What an answer depends on: LangChain's cache finds answers by it.

    All of it is nested, because LangChain puts a call's keywords over the names here, and some
    (``generate_kwargs``) come on top of the constructor's and do not take their place.
    """
    source: dict[str, Any] = {
        "model": str(options.model),
        "revision": options.revision,
        "files": folder_state(options.model) if options.model is not None else None,
        "tokenizer": name_of(options.tokenizer),
    }
    if options.lm is not None:
        source = {"lm": name_of(options.lm)}
    reading = {
        "rag_windows": engine_version,
        "dtype": str(options.dtype),
        "device_map": options.device_map,
        "model_kwargs": {k: v for k, v in options.model_kwargs.items() if k not in SECRETS},
        "method": repr(options.reading()),
        "guard": repr(None if options.calibration is None else options.calibration.guard),
        "fallback": repr(guard_of(options.fallback)),
        "max_window_tokens": options.max_window_tokens,
        "header": options.header if isinstance(options.header, str) else name_of(options.header),
        "template_kwargs": options.template_kwargs,
        "text_tokens": options.text_tokens,
    }
    writing = {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "max_tokens": options.max_tokens,
        "stop": options.stop,
        "seed": options.seed,
        "logprobs": (options.logprobs, options.top_logprobs),
        "generate_kwargs": options.generate_kwargs,
    }
    return {"model_name": options.engine_name, "engine": {**source, **reading, **writing}}
