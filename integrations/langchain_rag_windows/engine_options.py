"""Constructor arguments that the chat model and the text model have in common."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from langchain_core.language_models import BaseChatModel, LangSmithParams
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    field_validator,
    model_validator,
)

from langchain_rag_windows.errors import RequestError, in_langchain_terms
from rag_windows import Method, Profile, WindowedLM, __version__
from rag_windows.integration import Calls, Choose, ModelSource, folder_state, guard_of, method_of

PROVIDER = "rag_windows"
"""Under this name LangChain and LangSmith know our models."""

THREADS = 4
"""Threads for asynchronous calls, unless ``concurrency`` says otherwise."""

ALIASES = {
    "model_name": "model",
    "model_id": "model",
    "max_new_tokens": "max_tokens",
    "pipeline_kwargs": "generate_kwargs",
    "stop_sequences": "stop",
    "request_timeout": "timeout",
}
"""Names that users bring from other integrations -> ours."""

SECRETS = ("token", "use_auth_token")
"""Loading options that must not show in traces."""

_names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


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


class EngineOptions(BaseModel):
    """How the model is loaded, how it reads its windows, and how it writes.

    Attributes:
        model: Hub name, local folder, or "tiny-reader"; also as ``model_name`` or ``model_id``.
        lm: an engine that is loaded already, instead of ``model``.
        tokenizer: instead of the model's own: a tokenizer, a Hub name or a folder.
        revision: of the Hub repository: a branch, a tag or a commit.
        device_map: where the weights go: "cpu", "cuda", "cuda:1"; "auto" or a mapping spreads them
            (needs accelerate). None for the best device: CUDA where there is one.
        dtype: of the weights.
        model_kwargs: further ones for ``AutoModelForCausalLM.from_pretrained``.
        method: how the windows are read: "ape", "pcw", "sequential", ... or a `Method`; None takes
            that of the ``calibration``, that of ``lm``, or "ape".
        calibration: the profile that one saved, or its path: brings the method (where ``method``
            gives none) and the guard's threshold. (``profile`` is LangChain's own, of what a chat
            model can do.)
        link_tokens: tokens of each window that are encoded in sight of the others: a number (int),
            a share (float), or "all"; see `rag_windows.Linked`.
        link_choose: which ones: "first", or those of largest "deviation".
        fallback: "sequential" or a `rag_windows.Guard`: where windows are likely to lose, documents
            are read one after the other; ``fallback`` in the metadata says so.
        max_window_tokens: a longer document becomes several windows.
        header: line above each document: "title", "none", "number", "number+title", or a function.
        template_kwargs: variables of the chat template, such as ``{"enable_thinking": False}``.
        text_tokens: control tokens that documents may spell after all.
        max_batch_tokens: tokens in one encoding pass.
        passage_cache: keeps encoded windows: a `PassageCache`, or True for one with good defaults.
            (``cache`` is LangChain's own, of whole answers.)
        temperature: 0 takes the likeliest token, more samples; None leaves it to the model.
        top_p: nucleus sampling.
        max_tokens: at most so many are generated; also as ``max_new_tokens``.
        stop: the answer ends before any of these strings; those of a call take their place.
        seed: for sampling.
        logprobs: whether ``response_metadata["logprobs"]`` tells the log-probability of each token.
        top_logprobs: of how many of the likeliest tokens in each place as well, up to 20.
        generate_kwargs: further ones for ``transformers`` generate.
        streaming: whether ``invoke`` streams where somebody listens.
        timeout: seconds after which a call is an error.
        batch_rows: so many calls that are made at once, by tasks or by threads, are answered
            together: one forward pass gives each its next token, and documents that several read
            are held once. More wait in line. Each takes memory for the documents that it alone
            reads. 1 answers each call by itself.
        concurrency: how many calls are answered at once, if fewer than ``batch_rows``; with
            ``batch_rows=1``, how many asynchronous ones (4).
        max_retries: taken for compatibility; a local model has nothing to retry.
        api_key: taken for compatibility, never used nor shown.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: str | Path | None = None
    lm: WindowedLM | None = Field(default=None, exclude=True, repr=False)
    tokenizer: Any = Field(default=None, exclude=True, repr=False)
    revision: str | None = None
    device_map: Any = None
    dtype: Any = "auto"
    model_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    method: str | Method | None = None
    calibration: Any = Field(default=None, repr=False)
    link_tokens: Any = None
    link_choose: Choose = "first"
    fallback: Any = None
    max_window_tokens: int | None = Field(default=None, ge=1)
    header: Any = "title"
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    text_tokens: tuple[str, ...] = ()
    max_batch_tokens: int | None = Field(default=None, ge=1)
    passage_cache: Any = Field(default=None, exclude=True, repr=False)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: list[str] | str | None = None
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    generate_kwargs: dict[str, Any] = Field(default_factory=dict)
    streaming: bool = False
    timeout: float | None = Field(default=None, gt=0)
    batch_rows: int = Field(default=32, ge=1)
    concurrency: int | None = Field(default=None, ge=1)
    max_retries: int | None = None
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)

    _made: Any = PrivateAttr(default=None)
    _under_way: Calls | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _take_known_names(cls, given: Any) -> Any:
        return unalias(given) if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _check_source(self) -> EngineOptions:
        if (self.model is None) == (self.lm is None):
            raise RequestError("Give either model= (a name or a folder) or lm= (a WindowedLM).")
        if self.lm is not None and self.calibration is not None:
            raise RequestError(
                "calibration= applies to a model that is loaded here; give it as profile= to the "
                "WindowedLM that you give as lm=."
            )
        return self

    @field_validator("method")
    @classmethod
    def _check_method(cls, method: str | Method | None) -> str | Method | None:
        with in_langchain_terms():
            if method is not None:
                method_of(method)
        return method

    @field_validator("calibration")
    @classmethod
    def _check_calibration(cls, calibration: Any) -> Profile | None:
        # Read now: one that can't be used is told before gigabytes are loaded.
        with in_langchain_terms():
            return None if calibration is None else Profile.of(calibration)

    @field_validator("fallback")
    @classmethod
    def _check_fallback(cls, fallback: Any) -> Any:
        with in_langchain_terms():
            guard_of(fallback)
        return fallback

    @model_validator(mode="after")
    def _check_links(self) -> EngineOptions:
        with in_langchain_terms():
            self.linked_method()
        return self

    def own_method(self) -> Method:
        """How windows are read unless a call says otherwise, links aside."""
        if self.method is not None:
            return method_of(self.method)
        if self.lm is not None:
            return self.lm.method
        return method_of("ape") if self.calibration is None else self.calibration.method

    def linked_method(self) -> Method:
        """How windows are read unless a call says otherwise."""
        return method_of(
            self.own_method(), link_tokens=self.link_tokens, link_choose=self.link_choose
        )

    @property
    def engine_name(self) -> str:
        """The model's name, as it stands in the metadata of its answers."""
        if self.model is not None:
            return str(self.model)
        return str(getattr(self.windowed_lm().model, "name_or_path", "") or "local model")

    def windowed_lm(self) -> WindowedLM:
        """The engine; loads the model if nobody has.

        Raises:
            ModelMissingError: it can't be found or loaded.
        """
        if self.lm is not None:
            return self.lm
        arguments: dict[str, Any] = {
            "tokenizer": self.tokenizer,
            "revision": self.revision,
            "device_map": self.device_map,
            "dtype": self.dtype,
            "max_window_tokens": self.max_window_tokens,
            "header": self.header,
            "template_kwargs": self.template_kwargs or None,
            "text_tokens": self.text_tokens or None,
            "max_batch_tokens": self.max_batch_tokens,
            "cache": self.passage_cache,
            "profile": self.calibration,
            **self.model_kwargs,
        }
        made = self._made
        if made is None or made[0] != (self.model, arguments):
            made = (self.model, arguments), ModelSource(str(self.model), **arguments)
            self._made = made
        with in_langchain_terms():
            return made[1].lm()

    @property
    def _calls(self) -> Calls:
        """The calls that are under way."""
        rows = min(self.batch_rows, self.concurrency or self.batch_rows)
        made = self._under_way
        if made is None or made.max_rows != rows:
            made = self._under_way = Calls(rows, self.concurrency or THREADS)
        return made

    def __getstate__(self) -> dict[Any, Any]:
        if self.lm is not None:
            raise TypeError(
                f"{type(self).__name__}(lm=...) can't be pickled: it holds loaded weights. Make it "
                "with model=, a name or a folder; such a model is pickled without them and loads "
                "or shares them where it is used."
            )
        state = dict(super().__getstate__())
        state["__pydantic_private__"] = {**state["__pydantic_private__"], "_made": None}
        return state

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What an answer depends on: LangChain's cache finds answers by it.

        All of it is nested, because LangChain puts a call's keywords over the names here, and some
        (``generate_kwargs``) come on top of the constructor's and do not take their place.
        """
        source: dict[str, Any] = {
            "model": str(self.model),
            "revision": self.revision,
            "files": folder_state(self.model) if self.model is not None else None,
            "tokenizer": _name_of(self.tokenizer),
        }
        if self.lm is not None:
            source = {"lm": _name_of(self.lm)}
        named = (
            *("device_map", "max_window_tokens", "template_kwargs", "text_tokens"),
            *("temperature", "top_p", "max_tokens", "stop", "seed", "logprobs", "top_logprobs"),
            "generate_kwargs",
        )
        engine = {
            **source,
            "rag_windows": __version__,
            "dtype": str(self.dtype),
            "model_kwargs": {k: v for k, v in self.model_kwargs.items() if k not in SECRETS},
            "method": repr(self.linked_method()),
            "guard": repr(None if self.calibration is None else self.calibration.guard),
            "fallback": repr(guard_of(self.fallback)),
            "header": _name_of(self.header),
            **{name: getattr(self, name) for name in named},
        }
        return {"model_name": self.engine_name, "engine": engine}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        chosen = unalias(kwargs)
        params = LangSmithParams(
            ls_provider=PROVIDER,
            ls_model_type="chat" if isinstance(self, BaseChatModel) else "llm",
            ls_model_name=str(chosen.get("model", self.engine_name)),
        )
        temperature = chosen.get("temperature", self.temperature)
        if temperature is not None:
            params["ls_temperature"] = temperature
        max_tokens = chosen.get("max_tokens", self.max_tokens)
        if max_tokens is not None:
            params["ls_max_tokens"] = max_tokens
        stops = self.stop if stop is None else stop
        if stops:
            params["ls_stop"] = [stops] if isinstance(stops, str) else list(stops)
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of a text in the model's own vocabulary, without special tokens."""
        custom = getattr(self, "custom_get_token_ids", None)
        if custom is not None:
            return list(custom(text))
        tokenizer: Any = self.windowed_lm().tokenizer
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _name_of(value: object) -> str | None:
    """A name that no other object has had or will have, in no process; strings are their own."""
    if value is None or isinstance(value, str | Path):
        return value if value is None else str(value)
    return _names.setdefault(value, f"{type(value).__name__}-{uuid4().hex}")
