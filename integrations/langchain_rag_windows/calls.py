"""A call of the engine out of LangChain's messages and keywords, and how calls are answered."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import BaseMessage

from langchain_rag_windows.documents import conversation
from langchain_rag_windows.engine_options import EngineOptions, unalias
from langchain_rag_windows.errors import RequestError, in_langchain_terms
from rag_windows import Chunk, Generation, Method
from rag_windows.integration import (
    AnswerReader,
    Call,
    method_of,
    sampling_options,
    warn_without_windows,
)

_NOT_FOR_THE_ENGINE = ("stream", "timeout")
"""Keywords by which LangChain steers itself, and how long a call may take."""

_INSTEAD = (
    "llm.invoke(question, documents=docs); for create_stuff_documents_chain(llm, prompt) write"
    " create_windows_chain(llm, prompt)."
)


def engine_options(
    model: EngineOptions, stop: Sequence[str] | str | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Options for `WindowedLM.generate`: the constructor's, and those of the call above them."""

    def chosen(name: str) -> Any:
        return given.get(name, getattr(model, name))

    named = ("temperature", "top_p", "max_tokens", "generate_kwargs")
    stops = model.stop if stop is None else stop
    single = {
        "max_new_tokens": chosen("max_tokens"),
        "stop": stops,
        "seed": model.seed,
        "logprobs": model.logprobs,
        "top_logprobs": model.top_logprobs,
    }
    return {
        **model.generate_kwargs,
        **sampling_options(chosen("temperature"), chosen("top_p")),
        **{name: value for name, value in single.items() if value is not None},
        **(given.get("generate_kwargs") or {}),
        **{name: value for name, value in given.items() if name not in named},
    }


@dataclass(frozen=True, kw_only=True)
class ModelCall(Call):
    """One call of a model.

    Attributes:
        method: how the windows are read.
        model_name: for the metadata.
        reader: of the answer; finds calls of tools.
    """

    method: Method
    model_name: str
    reader: AnswerReader


class AnswersCalls(EngineOptions):
    """A model that answers calls; what is asked and what an answer looks like, models say."""

    @abstractmethod
    def _messages(self, asked: Any) -> Sequence[BaseMessage]:
        """The conversation of what LangChain hands to `_stream`."""

    @abstractmethod
    def _read(self, call: ModelCall, generation: Generation) -> Any:
        """The answer for LangChain."""

    @abstractmethod
    def _read_chunk(self, call: ModelCall, chunk: Chunk) -> Iterable[Any]:
        """Pieces of the answer for LangChain."""

    def _answered(
        self, asked: Sequence[Any], stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Answers of what is asked at once."""
        prepares = [self._prepare(one, stop, kwargs) for one in asked]
        with in_langchain_terms():
            return self._calls.answer_all(prepares, self._read, timeout=self._timeout(kwargs))

    async def _answered_async(
        self, asked: Any, stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> Any:
        prepare, timeout = self._prepare(asked, stop, kwargs), self._timeout(kwargs)
        with in_langchain_terms():
            return await self._calls.answer_async(prepare, self._read, timeout=timeout)

    def _stream(
        self, asked: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Generator[Any, None, None]:
        prepare, timeout = self._prepare(asked, stop, kwargs), self._timeout(kwargs)
        with in_langchain_terms():
            pieces = self._calls.stream(prepare, self._read_chunk, timeout=timeout)
            with closing(pieces):
                for piece in pieces:
                    if run_manager is not None:
                        run_manager.on_llm_new_token(piece.text, chunk=piece)
                    yield piece

    async def _astream(
        self, asked: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        prepare, timeout = self._prepare(asked, stop, kwargs), self._timeout(kwargs)
        pieces = self._calls.stream_async(prepare, self._read_chunk, timeout=timeout)
        with in_langchain_terms():
            async with aclosing(pieces):
                async for piece in pieces:
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(piece.text, chunk=piece)
                    yield piece

    def _timeout(self, kwargs: Mapping[str, Any]) -> float | None:
        chosen: float | None = unalias(kwargs).get("timeout", self.timeout)
        return chosen

    def _prepare(
        self, asked: Any, stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> Callable[[], ModelCall]:
        """What reads a call's messages, documents and keywords; it loads the model on first use.

        Raises:
            RequestError: something about the call can't be used.
            ModelMissingError: the model can't be loaded.
            NotImplementedError: tools are bound, and the chat template knows none.
        """

        def prepare() -> ModelCall:
            given = unalias(kwargs)
            for name in _NOT_FOR_THE_ENGINE:
                given.pop(name, None)
            if "model" in given:
                raise RequestError(
                    "The model can't be changed in a call; make another one, it shares nothing but "
                    "what is equal."
                )
            bound, choice = given.pop("tools", None), given.pop("tool_choice", None)
            strict, form = given.pop("strict", None), given.pop("response_format", None)
            if form is not None:
                given |= _answer_form(form, bound and choice != "none")
            documents = given.pop("documents", None)
            read = conversation(self._messages(asked), documents, tools=bool(bound))
            chosen = given.pop("method", None)
            method = method_of(
                self.own_method() if chosen is None else chosen,
                link_tokens=given.pop("link_tokens", self.link_tokens),
                link_choose=given.pop("link_choose", self.link_choose),
            )
            lm = self.windowed_lm()
            reader = AnswerReader.of(lm.tokenizer, lm.template_kwargs, bound, choice)
            query = reader.query(read.messages)
            if not read.passages:
                text = "\n".join(str(message["content"]) for message in read.messages)
                warn_without_windows(text, self._count, _INSTEAD)
            fallback = given.pop("fallback", self.fallback)
            grammar = None if strict is False else reader.grammar()
            if grammar is not None:
                given["grammar"] = grammar
            return ModelCall(
                lm=lm,
                query=query,
                passages=read.passages,
                options={
                    **engine_options(self, stop, given),
                    "method": method,
                    "fallback": fallback,
                },
                method=method,
                model_name=self.engine_name,
                reader=reader,
            )

        return prepare

    def _count(self, text: str) -> int:
        return len(self.get_token_ids(text))


def _answer_form(form: object, tools: object) -> dict[str, Any]:
    """The engine's option for OpenAI's ``response_format``, which agents give, too."""
    kind = form.get("type") if isinstance(form, Mapping) else None
    if tools and kind != "text":
        raise RequestError(
            "An answer that is held to response_format can't call a tool. Leave the tools out, or "
            "have an agent answer by a tool: create_agent(..., response_format=ToolStrategy(A))."
        )
    if isinstance(form, Mapping) and kind == "json_schema":
        return {"json_schema": form["json_schema"]["schema"]}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    if kind == "text":
        return {}
    raise RequestError(
        "response_format must be {'type': 'json_schema', 'json_schema': {'name': ..., 'schema': "
        "...}}, {'type': 'json_object'} or {'type': 'text'}."
    )
