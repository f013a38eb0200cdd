"""One call of the engine: its options, its documents, its end."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import BaseMessage

from langchain_rag_windows.aliases import unalias
from langchain_rag_windows.errors import RequestError, in_langchain_terms
from langchain_rag_windows.messages import conversation
from langchain_rag_windows.options import EngineOptions
from langchain_rag_windows.results import logprobs_metadata, response_metadata
from langchain_rag_windows.tools import AnswerReader
from rag_windows import Chunk, Generation, Method, Passage, WindowedLM
from rag_windows.batching.awaiting import Crowd, submitted
from rag_windows.batching.questions import OnText
from rag_windows.batching.scheduler import Scheduled
from rag_windows.generate import sampling_options
from rag_windows.hints import LONG_PROMPT_TOKENS, user_level, warn_without_windows
from rag_windows.methods import linked, resolve
from rag_windows.streaming import Watch

_NOT_FOR_THE_ENGINE = ("stream", "timeout")
"""Keywords by which LangChain steers itself, and that of the watch."""

_INSTEAD = (
    "llm.invoke(question, documents=docs); for create_stuff_documents_chain(llm, prompt) write"
    " create_windows_chain(llm, prompt)."
)

_BETWEEN = frozenset(
    (
        "asyncio",
        "concurrent",
        "contextlib",
        "langchain",
        "langchain_classic",
        "langchain_core",
        "langchain_rag_windows",
        "langgraph",
        "tenacity",
        "threading",
    )
)
"""Packages whose frames stand between a user's line and a call of the engine."""


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


@dataclass(frozen=True, slots=True)
class Call:
    """One call, ready to run.

    Attributes:
        lm: the engine.
        query: the conversation.
        passages: the documents.
        options: for `WindowedLM.generate`.
        method: how the windows are read.
        model_name: for the metadata.
        reader: of the answer; finds calls of tools.
        watch: stops it.
        rows: so many calls are answered together; 1 for each by itself.
        crowd: of the calls under way, this one among them.
    """

    lm: WindowedLM
    query: Any
    passages: tuple[Passage, ...]
    options: dict[str, Any]
    method: Method
    model_name: str
    reader: AnswerReader
    watch: Watch
    rows: int
    crowd: Crowd

    def whole(self) -> Generation:
        """Run to the end, together with other calls if there are any."""
        with in_langchain_terms():
            if self.rows == 1:
                generation = self.lm.generate(self.query, self.passages, **self.options)
            else:
                scheduler = self.lm.shared_scheduler(max_rows=self.rows)
                generation = scheduler.answer(self._request(), lone=self.crowd.lone)
            self.watch.check()
        return generation

    def submit(self, on_text: OnText | None = None) -> Scheduled:
        """Ask, together with other calls."""
        with in_langchain_terms():
            return submitted(
                self.lm,
                self._request(),
                self.watch,
                max_rows=self.rows,
                crowd=self.crowd,
                on_text=on_text,
            )

    def pieces(self) -> Generator[Chunk, None, None]:
        """Run, piece by piece; closing this stops the work within a token."""
        with in_langchain_terms(), closing(self._stream()) as chunks:
            for chunk in chunks:
                self.watch.check()
                yield chunk

    def _stream(self) -> Any:
        return self.lm.stream(self.query, self.passages, **self.options)

    def _request(self) -> dict[str, Any]:
        return {"query": self.query, "passages": self.passages, **self.options}

    def metadata(self, generation: Generation) -> dict[str, Any]:
        """What is told of an answer beside its text."""
        told = response_metadata(generation, self.passages, self.model_name, self.method)
        if generation.logprobs is not None:
            told["logprobs"] = logprobs_metadata(generation, self.lm.tokenizer)
        return told


def watch_of(model: EngineOptions, kwargs: Mapping[str, Any]) -> Watch:
    """The watch of a call; its time runs from here, waiting for others included."""
    return Watch(unalias(kwargs).get("timeout", model.timeout))


def prepare(
    model: EngineOptions,
    messages: Sequence[BaseMessage],
    stop: Sequence[str] | str | None,
    kwargs: Mapping[str, Any],
    watch: Watch,
) -> Call:
    """Read a call's messages, documents and options; loads the model on first use.

    Raises:
        RequestError: something about the call can't be used.
        ModelMissingError: the model can't be loaded.
        NotImplementedError: tools are bound, and the chat template knows none.
    """
    given = unalias(kwargs)
    for name in _NOT_FOR_THE_ENGINE:
        given.pop(name, None)
    if "model" in given:
        raise RequestError(
            "The model can't be changed in a call; make another one, it shares nothing but what "
            "is equal."
        )
    bound, choice = given.pop("tools", None), given.pop("tool_choice", None)
    strict, form = given.pop("strict", None), given.pop("response_format", None)
    if form is not None:
        given |= _answer_form(form, bound and choice != "none")
    read = conversation(messages, given.pop("documents", None), tools=bool(bound))
    with in_langchain_terms():
        chosen = given.pop("method", None)
        method = linked(
            model.own_method() if chosen is None else resolve(chosen),
            given.pop("link_tokens", model.link_tokens),
            given.pop("link_choose", model.link_choose),
        )
        lm = model.windowed_lm()
        reader = AnswerReader.of(lm, bound, choice)
        query = reader.query(read.messages)
    if not read.passages:
        _warn_of_a_long_prompt(model, read.messages)
    fallback = given.pop("fallback", model.fallback)
    grammar = None if strict is False else reader.grammar()
    if grammar is not None:
        given["grammar"] = grammar
    options = {**engine_options(model, stop, given), "method": method, "fallback": fallback}
    return Call(
        lm,
        query,
        read.passages,
        watch.options(options),
        method,
        model.engine_name,
        reader,
        watch,
        model.rows,
        model.crowd,
    )


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


def _warn_of_a_long_prompt(model: EngineOptions, messages: Sequence[Mapping[str, Any]]) -> None:
    text = "\n".join(str(message["content"]) for message in messages)
    if len(text) < LONG_PROMPT_TOKENS:
        return
    tokens, level = len(model._token_ids(text)), user_level(_BETWEEN)
    warn_without_windows(tokens, 0, _INSTEAD, stacklevel=level)
