"""What the chat model and the text model have in common: arguments, loading, calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from functools import partial
from pathlib import Path
from typing import Any, Self
from uuid import uuid4
from weakref import WeakKeyDictionary

from langchain_core.language_models import LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from langchain_rag_windows.errors import RequestError, in_langchain_terms
from langchain_rag_windows.messages import PROVIDER, as_message, conversation
from rag_windows import Chunk, Generation, Profile, WindowedLM, __version__
from rag_windows.integration import (
    AnswerReader,
    Calls,
    ModelCall,
    ModelOptions,
    ModelSource,
    folder_state,
    guard_of,
    sampling_options,
    unalias,
    warn_without_windows,
)

ALIASES = {
    "model_name": "model",
    "model_id": "model",
    "max_new_tokens": "max_tokens",
    "pipeline_kwargs": "generate_kwargs",
    "stop_sequences": "stop",
    "request_timeout": "timeout",
    "concurrency": "batch_rows",
}
"""Names that users bring from other integrations -> ours."""

_LOADING = (
    *("tokenizer", "revision", "device_map", "dtype", "header"),
    *("max_window_tokens", "max_batch_tokens", "template_kwargs", "text_tokens"),
)
_IDENTIFYING = (
    *("revision", "device_map", "max_window_tokens", "template_kwargs", "text_tokens"),
    *("temperature", "top_p", "max_tokens", "stop", "seed", "logprobs", "top_logprobs"),
    "generate_kwargs",
)
_SECRETS = ("token", "use_auth_token")
_INSTEAD = (
    "llm.invoke(question, documents=docs); for create_stuff_documents_chain(llm, prompt) write"
    " create_windows_chain(llm, prompt)."
)


class BaseWindowModel(ModelOptions):
    """Arguments besides those of `rag_windows.integration.ModelOptions`, and their use.

    Attributes:
        model: Hub name, local folder, or "tiny-reader"; also as ``model_name`` or ``model_id``.
        lm: an engine that is loaded already, instead of ``model``.
        tokenizer: instead of the model's own: a tokenizer, a Hub name or a folder.
        revision: of the Hub repository: a branch, a tag or a commit.
        dtype: of the weights.
        calibration: a saved profile, or its path: it sets the method (where ``method`` does not)
            and the guard's threshold. (``profile`` is LangChain's own, of what a chat
            model can do.)
        text_tokens: control tokens that documents may spell after all.
        max_batch_tokens: tokens in one encoding pass.
        passage_cache: keeps encoded windows: a `PassageCache`, or True for one with good defaults.
            (``cache`` is LangChain's own, of whole answers.)
        max_tokens: at most so many are generated; also as ``max_new_tokens``.
        stop: the answer ends before any of these strings; those of a call take their place.
        seed: for sampling.
        logprobs: whether ``response_metadata["logprobs"]`` holds the log-probability of each token.
        top_logprobs: of how many of the likeliest tokens in each place as well, up to 20.
        streaming: whether ``invoke`` streams where somebody listens.
        timeout: seconds after which a call is an error.
        max_retries: taken for compatibility; a local model has nothing to retry.
        api_key: taken for compatibility, never used nor shown.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: str | Path | None = None
    lm: WindowedLM | None = Field(default=None, exclude=True, repr=False)
    tokenizer: Any = Field(default=None, exclude=True, repr=False)
    revision: str | None = None
    dtype: Any = "auto"
    calibration: Any = Field(default=None, repr=False)
    text_tokens: tuple[str, ...] = ()
    max_batch_tokens: int | None = Field(default=None, ge=1)
    passage_cache: Any = Field(default=None, exclude=True, repr=False)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: list[str] | str | None = None
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    streaming: bool = False
    timeout: float | None = Field(default=None, gt=0)
    max_retries: int | None = None
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)

    _source: Any = PrivateAttr(default=None)
    _under_way: Calls | None = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _take_known_names(cls, given: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        # The engine's errors are no ValueErrors, of which pydantic makes its own.
        with in_langchain_terms():
            return validate(unalias(given, ALIASES) if isinstance(given, Mapping) else given)

    @field_validator("calibration")
    @classmethod
    def _read_calibration(cls, calibration: Any) -> Profile | None:
        # Read now: one that can't be used is an error before gigabytes are loaded.
        return None if calibration is None else Profile.of(calibration)

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.model is None) == (self.lm is None):
            raise RequestError(
                "Exactly one of model= (a name or a folder) and lm= (a WindowedLM) must be given."
            )
        if self.lm is not None and self.calibration is not None:
            raise RequestError(
                "calibration= has no effect with lm=. Give the profile as profile= to the "
                "WindowedLM."
            )
        return self

    @property
    def _llm_type(self) -> str:
        return "rag-windows"

    @property
    def engine_name(self) -> str:
        """The model's name, as it stands in the metadata of its answers."""
        return ModelSource(self.model, lm=self.lm).name

    def windowed_lm(self) -> WindowedLM:
        """The engine; loads the model if nobody has.

        Raises:
            ModelMissingError: it can't be found or loaded.
        """
        if self.lm is not None:
            return self.lm
        arguments: dict[str, Any] = {
            **{name: getattr(self, name) for name in _LOADING},
            "cache": self.passage_cache,
            "profile": self.calibration,
            **self.model_kwargs,
        }
        # By its arguments: a copy may have others.
        if self._source is None or self._source[0] != (self.model, arguments):
            self._source = (self.model, arguments), ModelSource(str(self.model), **arguments)
        with in_langchain_terms():
            lm: WindowedLM = self._source[1].lm()
            return lm

    def __getstate__(self) -> dict[Any, Any]:
        if self.lm is not None:
            raise TypeError(
                f"{type(self).__name__}(lm=...) can't be pickled, because it holds loaded "
                "weights. Make it with model= (a name or a folder), which is pickled without "
                "weights and loads or shares them where it is used."
            )
        state = dict(super().__getstate__())
        state["__pydantic_private__"] = {**state["__pydantic_private__"], "_source": None}
        return state

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What an answer depends on: LangChain's cache finds answers by it.

        All of it is nested, because LangChain puts a call's keywords over the names here, and some
        (``generate_kwargs``) come on top of the constructor's and do not take their place.
        """
        brings = self.lm or self.calibration
        engine = {
            "rag_windows": __version__,
            "lm": _name_of(self.lm),
            "files": None if self.model is None else folder_state(self.model),
            "tokenizer": _name_of(self.tokenizer),
            "header": _name_of(self.header),
            "dtype": str(self.dtype),
            "model_kwargs": {k: v for k, v in self.model_kwargs.items() if k not in _SECRETS},
            "method": repr(self.reading({}, "auto" if brings is None else brings.method)),
            "fallback": repr(guard_of(self.fallback)),
            **{name: getattr(self, name) for name in _IDENTIFYING},
        }
        return {"model_name": self.engine_name, "engine": engine}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params: LangSmithParams = super()._get_ls_params(stop=stop, **kwargs)  # type: ignore[misc]  # of LangChain
        params["ls_provider"] = PROVIDER
        params.setdefault("ls_model_name", self.engine_name)
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of a text in the model's own vocabulary, without special tokens."""
        custom = getattr(self, "custom_get_token_ids", None)
        if custom is not None:
            return list(custom(text))
        tokenizer: Any = self.windowed_lm().tokenizer
        return list(tokenizer.encode(text, add_special_tokens=False))

    @abstractmethod
    def _generation(self, message: AIMessage) -> Any:
        """An answer as LangChain's kind of model gives it; of a chunk, a chunk."""

    def _read(self, call: ModelCall, generation: Generation) -> list[Any]:
        made = (generation, *generation.alternatives)
        return [self._generation(as_message(call, one)) for one in made]

    def _read_chunk(self, call: ModelCall, chunk: Chunk) -> Iterator[Any]:
        if chunk.reasoning:
            thought = {"reasoning_content": chunk.reasoning}
            yield self._generation(AIMessageChunk(content="", additional_kwargs=thought))
        text = call.reader.feed(chunk.text)
        if text:
            yield self._generation(AIMessageChunk(content=text))
        if chunk.generation is not None:
            yield self._generation(as_message(call, chunk.generation, streamed=True))

    @property
    def _calls(self) -> Calls:
        bounds, now = (self.batch_rows, self.batch_bytes), self._under_way
        if now is None or (now.max_rows, now.max_bytes) != bounds:
            now = self._under_way = Calls(*bounds)
        return now

    def _answered(
        self, asked: Sequence[Any], stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> list[list[Any]]:
        """Answers to prompts or conversations that are asked at once, several of each."""
        calls = [partial(self._call, one, stop, kwargs) for one in asked]
        with in_langchain_terms():
            return self._calls.answer_all(calls, self._read, timeout=self._limit(kwargs))

    async def _answered_async(
        self, asked: Any, stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> list[Any]:
        call = partial(self._call, asked, stop, kwargs)
        with in_langchain_terms():
            return await self._calls.answer_async(call, self._read, timeout=self._limit(kwargs))

    def _stream(
        self, asked: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Generator[Any, None, None]:
        call = partial(self._call, asked, stop, kwargs)
        with in_langchain_terms():
            pieces = self._calls.stream(call, self._read_chunk, timeout=self._limit(kwargs))
            with closing(pieces):
                for piece in pieces:
                    if run_manager is not None:
                        run_manager.on_llm_new_token(piece.text, chunk=piece)
                    yield piece

    async def _astream(
        self, asked: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        call = partial(self._call, asked, stop, kwargs)
        with in_langchain_terms():
            pieces = self._calls.stream_async(call, self._read_chunk, timeout=self._limit(kwargs))
            async with aclosing(pieces):
                async for piece in pieces:
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(piece.text, chunk=piece)
                    yield piece

    def _limit(self, kwargs: Mapping[str, Any]) -> float | None:
        return unalias(kwargs, ALIASES).get("timeout", self.timeout)

    def _call(self, asked: Any, stop: list[str] | None, kwargs: Mapping[str, Any]) -> ModelCall:
        given = unalias(kwargs, ALIASES)
        if "model" in given:
            raise RequestError(
                "A call can't change the model. Make another chat model with model=."
            )
        taken = ("timeout", "stream", "documents", "tools", "tool_choice", "strict")
        _, _, documents, tools, choice, strict = (given.pop(name, None) for name in taken)
        if (form := given.pop("response_format", None)) is not None:
            given["json_schema"] = _answer_schema(form, tools and choice != "none")
        said = [HumanMessage(asked)] if isinstance(asked, str) else asked
        messages, passages = conversation(said, documents, tools=bool(tools))
        if not passages:
            text = "\n".join(str(message["content"]) for message in messages)
            warn_without_windows(text, lambda said: len(self.get_token_ids(said)), _INSTEAD)
        lm = self.windowed_lm()
        reader = AnswerReader.of(lm.tokenizer, lm.template_kwargs, tools, choice)
        query = reader.query(messages)
        if strict is not False and (grammar := reader.grammar()) is not None:
            given["grammar"] = grammar
        method = self.reading(given, lm.method)
        fallback = given.pop("fallback", self.fallback)
        return ModelCall(
            lm=lm,
            query=query,
            passages=passages,
            options={**self._options(stop, given), "method": method, "fallback": fallback},
            method=method,
            model_name=self.engine_name,
            reader=reader,
        )

    def _options(self, stop: Sequence[str] | str | None, given: dict[str, Any]) -> dict[str, Any]:
        shared = ("max_tokens", "temperature", "top_p")
        most, temperature, top_p = (given.pop(name, getattr(self, name)) for name in shared)
        single = {
            "max_new_tokens": most,
            "stop": self.stop if stop is None else stop,
            **{name: getattr(self, name) for name in ("seed", "logprobs", "top_logprobs")},
        }
        return {
            **self.generate_kwargs,
            **sampling_options(temperature, top_p),
            **{name: value for name, value in single.items() if value is not None},
            **(given.pop("generate_kwargs", None) or {}),
            **given,
        }


def _answer_schema(form: Any, tools: object) -> Any:
    """What OpenAI's ``response_format``, which agents give, holds an answer to."""
    if tools:
        raise RequestError(
            "response_format and tools can't be combined. Leave the tools out, or let an agent "
            "answer by a tool: create_agent(..., response_format=ToolStrategy(A))."
        )
    try:
        return form["json_schema"]["schema"]
    except (TypeError, KeyError) as error:
        raise RequestError(
            "response_format must be {'type': 'json_schema', 'json_schema': {'name': ..., "
            "'schema': ...}}."
        ) from error


_names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def _name_of(value: object) -> str | None:
    """A name that no other object has had or will have, in no process; strings are their own."""
    if value is None or isinstance(value, str | Path):
        return value if value is None else str(value)
    return _names.setdefault(value, f"{type(value).__name__}-{uuid4().hex}")
