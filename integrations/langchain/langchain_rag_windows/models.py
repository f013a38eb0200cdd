"""The text model; the chat model, its tools, and its answers as data."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from langchain_core.documents import Document
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import (
    BaseLLM,
    LanguageModelInput,
    LanguageModelLike,
    ModelProfile,
)
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.output_parsers import (
    BaseOutputParser,
    JsonOutputParser,
    PydanticOutputParser,
    StrOutputParser,
)
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import (
    ChatGeneration,
    ChatGenerationChunk,
    ChatResult,
    Generation,
    GenerationChunk,
    LLMResult,
)
from langchain_core.prompts import BasePromptTemplate, format_document
from langchain_core.runnables import (
    Runnable,
    RunnableBinding,
    RunnableConfig,
    RunnableLambda,
    RunnablePassthrough,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.configurable import DynamicRunnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import ConfigDict

from langchain_rag_windows.base_model import BaseWindowModel
from langchain_rag_windows.errors import RequestError, in_langchain_terms
from rag_windows import Passage
from rag_windows.errors import ToolsUnsupportedError, install
from rag_windows.integration import (
    AnswerReader,
    ModelSource,
    check_schema,
    passage_list,
    position_limit,
    schemas_available,
)

_KEYWORDS: ContextVar[Mapping[str, Any]] = ContextVar("rag_windows_keywords")
_LANGCHAIN_S = ("callbacks", "tags", "metadata", "run_name", "run_id")


@contextmanager
def _known(kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Let `RagWindows.asdict` know the keywords of a call."""
    token = _KEYWORDS.set({k: value for k, value in kwargs.items() if k not in _LANGCHAIN_S})
    try:
        yield
    finally:
        _KEYWORDS.reset(token)


class RagWindows(BaseWindowModel, BaseLLM):  # type: ignore[misc]  # the first argument of _stream has another name in each
    """A local text model that reads each document in a window of its own.

    The prompt becomes a user's question in the model's chat template, if there is one. Documents
    come with ``documents=``, or from a stock chain that formats them with `WindowDocumentPrompt`.
    Arguments and further keywords are those of `ChatRagWindows`. Citations, token counts and times
    are in ``generation_info`` of the result of ``generate``.

    For example::

        llm = RagWindows(model="tiny-reader")
        llm.invoke("Where was Alra Ashden born?", documents=retriever.invoke(...))
    """

    model_config = ConfigDict(extra="forbid")

    def asdict(self) -> dict[str, Any]:
        """What identifies an answer.

        LangChain's cache finds text answers by this and the prompt, but not by a call's keywords:
        without them, other documents would get the cached answer.
        """
        keywords = _KEYWORDS.get({})
        return {**super().asdict(), **({"keywords": keywords} if keywords else {})}

    def generate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """See `BaseLLM.generate`."""
        with _known(kwargs):
            return super().generate(prompts, *args, **kwargs)

    async def agenerate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """See `BaseLLM.agenerate`."""
        with _known(kwargs):
            return await super().agenerate(prompts, *args, **kwargs)

    def _generate(
        self, prompts: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> LLMResult:
        return LLMResult(generations=self._answered(prompts, stop, kwargs))

    async def _agenerate(
        self, prompts: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> LLMResult:
        answers = (self._answered_async(prompt, stop, kwargs) for prompt in prompts)
        return LLMResult(generations=await asyncio.gather(*answers))

    def _generation(self, message: AIMessage) -> Generation:
        kind = GenerationChunk if isinstance(message, AIMessageChunk) else Generation
        known = {**message.response_metadata, "usage_metadata": message.usage_metadata}
        info = known if message.response_metadata else {}
        info |= message.additional_kwargs
        return kind(text=str(message.content), generation_info=info or None)


class StructuredModel(RunnableLambda[LanguageModelInput, Any]):
    """A model and what makes data of its answers; keywords of a call reach the model.

    A sequence hands them to its first step, but when streaming to every step, which then fails.
    """


class BoundModel(RunnableBinding[LanguageModelInput, AIMessage]):
    """A chat model with keywords, which stay when tools or a schema are bound to it later.

    A plain binding binds those to the model behind it, without ``documents=`` and the rest.
    """

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[Any, AIMessage]:
        """See `ChatRagWindows.bind_tools`."""
        return self._again("bind_tools", tools, kwargs)

    def with_structured_output(self, schema: Any = None, **kwargs: Any) -> Runnable[Any, Any]:
        """See `ChatRagWindows.with_structured_output`."""
        return self._again("with_structured_output", schema, kwargs)

    def _again(self, name: str, bound: Any, kwargs: Mapping[str, Any]) -> Runnable[Any, Any]:
        # New tools take the place of those bound before, as with LangChain's own models.
        earlier = {k: v for k, v in self.kwargs.items() if k not in ("tools", "tool_choice")}
        made: Runnable[Any, Any] = getattr(self.bound, name)(bound, **{**earlier, **kwargs})
        return made.with_config(self.config) if self.config else made


class ChatRagWindows(BaseWindowModel, BaseChatModel):  # type: ignore[misc]  # the first argument of _stream has another name in each
    """A local chat model that reads each document in a window of its own.

    Documents come with ``documents=`` (of ``invoke``, ``stream``, ``bind``, ...), as text-plain
    blocks of a human message, as the artifact of tool messages, or from a stock chain that formats
    them with `WindowDocumentPrompt`; see `conversation`. Without documents it is an ordinary chat
    model. Arguments are those of `BaseWindowModel` and `rag_windows.integration.ModelOptions`;
    further keywords of a call are ``method``, ``temperature``, ``top_p``, ``max_tokens``,
    ``seed``, ``timeout``, ``citations``, and any option of ``transformers`` generate.

    The weights are loaded on first use, and shared by all models with equal arguments. Calls that
    are made at once, by tasks or by threads, share forward passes (``batch_rows``). Async calls
    leave the event loop free; cancelling one stops it within a token.

    For example::

        llm = ChatRagWindows(model="tiny-reader")
        answer = llm.invoke("Where was Alra Ashden born?", documents=retriever.invoke(...))
        answer.content; answer.response_metadata["citations"]; answer.content_blocks
    """

    model_config = ConfigDict(extra="forbid")

    def _resolve_model_profile(self) -> ModelProfile | None:
        # Only files that are here already: nothing is downloaded before the first call.
        here: dict[str, Any] = {"local_files_only": True}
        source = ModelSource(
            self.model,
            lm=self.lm,
            tokenizer=self.tokenizer,
            tokenizer_kwargs=here if isinstance(self.tokenizer, str | Path) else None,
            revision=self.revision,
            cache_dir=self.model_kwargs.get("cache_dir"),
            template_kwargs=self.template_kwargs,
            **here,
        )
        tools, limit = source.tool_format(), position_limit(source.config())
        others = ("image", "audio", "video")
        profile: Any = {
            **{"text_inputs": True, "text_outputs": True, "pdf_inputs": False},
            **{f"{kind}_{side}": False for kind in others for side in ("inputs", "outputs")},
            # One prompt has to fit them; documents do not count together.
            **({} if limit is None else {"max_input_tokens": limit}),
            "reasoning_output": source.reasons(),
            "tool_calling": tools is not None,
            "tool_choice": tools is not None and tools.opening is not None,
            # With tools an agent would bind both, and an answer held to a schema calls no tool.
            "structured_output": tools is None and schemas_available(),
        }
        return cast(ModelProfile, profile)

    def bind(self, **kwargs: Any) -> BoundModel:  # type: ignore[override]  # theirs is private
        """See `Runnable.bind`; tools or a schema that are bound later leave these keywords."""
        return BoundModel(bound=self, kwargs=kwargs, config={})

    def with_config(
        self, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """See `Runnable.with_config`."""
        merged: Any = {**(config or {}), **kwargs}
        return BoundModel(bound=self, kwargs={}, config=merged)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: Any = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools that it may call; it is loaded, to see its chat template.

        Args:
            tools: functions, pydantic or TypedDict classes, LangChain tools or OpenAI definitions.
            tool_choice: None or "auto", "none", "any" (or "required", True), a tool's name, or
                OpenAI's ``{"type": "function", "function": {"name": ...}}``. A call is forced by
                writing its beginning for the model.
            strict: whether arguments must be held to the tool's schema, which works for a forced
                call and with the extra ``structured``. None does it where it can be done, False
                never.
            kwargs: bound too.

        Raises:
            NotImplementedError: the template shows no tools, its calls can't be read, or forced;
                or ``strict=True`` can't be met.
            RequestError: a ``tool_choice`` that is no tool, or a tool's name that can't be used.
        """
        definitions = [convert_to_openai_tool(tool) for tool in tools]
        lm = self.windowed_lm()
        with in_langchain_terms():
            reader = AnswerReader.of(lm.tokenizer, lm.template_kwargs, definitions, tool_choice)
        if strict and definitions and reader.grammar() is None:
            raise ToolsUnsupportedError(
                "strict=True needs a forced call (tool_choice) whose arguments the chat template "
                f"writes as JSON, a schema that llguidance supports, and {install('structured')}. "
                "Leave strict out; a call that does not fit the schema is then an error."
            )
        if strict is not None:
            kwargs["strict"] = strict
        return self.bind(tools=definitions, tool_choice=tool_choice, **kwargs)

    def with_structured_output(
        self,
        schema: Mapping[str, Any] | type | None = None,
        *,
        method: str = "function_calling",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """The model, answering with an instance of a schema.

        Args:
            schema: a pydantic class (instances come back, validated), or a TypedDict class, a JSON
                schema or an OpenAI definition (dicts come back, as the model wrote them).
            method: "function_calling" forces one call of a tool of this schema, where the chat
                template supports tools, and so shows the schema to the model. "json_schema" holds
                the answer to the schema token by token (extra ``structured``), in any model;
                "json_mode" only reads the answer as JSON. For these two the prompt should ask for
                JSON, with the names of the fields.
            include_raw: give ``{"raw": message, "parsed": ..., "parsing_error": ...}`` instead.
            strict: whether the data must be held to the schema: always with "json_schema", never
                with "json_mode". "function_calling" does it where the extra is installed and the
                schema and the template allow it; True refuses where it can't be done, False
                switches it off.
            kwargs: bound to the model.

        Raises:
            NotImplementedError: the template supports no tools, or ``strict=True`` can't be met.
            RequestError: an unknown method, no schema, or one that answers can't be held to.
            MissingExtraError: method "json_schema" without the extra ``structured``.
            OutputParserException: at the call, if the answer was cut, holds no JSON or call, or
                does not fit a pydantic class.
        """
        if method not in ("function_calling", "json_schema", "json_mode"):
            raise RequestError(
                f"Unknown method {method!r}. Use 'function_calling', 'json_schema' or 'json_mode' "
                "(with a prompt that asks for JSON)."
            )
        if strict and method == "json_mode":
            raise ToolsUnsupportedError(
                "method='json_mode' does not hold answers to a schema, so it can't be strict. "
                "Use method='json_schema'."
            )
        if schema is None and method != "json_mode":
            raise RequestError(
                f"method={method!r} needs a schema. Give one, or use method='json_mode'."
            )
        kwargs["ls_structured_output_format"] = {"kwargs": {"method": method}, "schema": schema}
        asked: Runnable[LanguageModelInput, AIMessage]
        if method == "function_calling":
            tool: Any = schema
            name = convert_to_openai_tool(tool)["function"]["name"]
            try:
                asked = self.bind_tools([tool], tool_choice=name, strict=strict, **kwargs)
            except ToolsUnsupportedError as error:
                raise ToolsUnsupportedError(
                    f"method='function_calling' needs a chat template with tools. {error} Without "
                    "tools, ask for JSON with these fields in the prompt and use "
                    f"method='json_schema' (needs {install('structured')}) or method='json_mode'."
                ) from error
        else:
            if method == "json_schema":
                form: Any = schema
                if not (isinstance(form, Mapping) and "type" in form and "title" not in form):
                    form = convert_to_openai_tool(form)["function"]["parameters"]
                with in_langchain_terms():
                    check_schema(form)
                kwargs["json_schema"] = form
            asked = self.bind(**kwargs)
        read = _reader_of(schema, called=method == "function_calling")

        def read_raw(message: AIMessage) -> dict[str, Any]:
            try:
                return {"raw": message, "parsed": read(message), "parsing_error": None}
            except Exception as error:  # noqa: BLE001 - handed to the one who asked for it
                return {"raw": message, "parsed": None, "parsing_error": error}

        def ask(_: LanguageModelInput, **options: Any) -> Runnable[LanguageModelInput, Any]:
            return asked.bind(**options) | RunnableLambda(read_raw if include_raw else read)

        return StructuredModel(ask, name="structured_output")

    def _generate(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        return ChatResult(generations=self._answered([messages], stop, kwargs)[0])

    async def _agenerate(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        return ChatResult(generations=await self._answered_async(messages, stop, kwargs))

    def _generation(self, message: AIMessage) -> ChatGeneration:
        if isinstance(message, AIMessageChunk):
            return ChatGenerationChunk(message=message)
        return ChatGeneration(message=message)


def _reader_of(schema: Any, *, called: bool) -> Callable[[AIMessage], Any]:
    """What makes data of an answer, or of its call: a pydantic instance, else what JSON holds."""
    pydantic = isinstance(schema, type) and is_basemodel_subclass(schema)
    parser: Any
    if called and pydantic:
        parser = PydanticToolsParser(tools=[schema], first_tool_only=True)
    elif called:
        name = convert_to_openai_tool(schema)["function"]["name"]
        parser = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    else:
        parser = PydanticOutputParser(pydantic_object=schema) if pydantic else JsonOutputParser()

    def read(message: AIMessage) -> Any:
        # LangChain's parsers would close JSON that was cut, and answer None without a call.
        if not (called and message.tool_calls) and _cut(message):
            raise OutputParserException(
                "The answer was cut at max_tokens before the data was complete. Raise max_tokens.",
                llm_output=str(message.text),
            )
        if called and not message.tool_calls:
            errors = [str(call["error"]) for call in message.invalid_tool_calls]
            raise OutputParserException(
                f"The model made no tool call that can be read. {' '.join(errors)}".strip(),
                llm_output=str(message.text),
            )
        return parser.invoke(message)

    return read


def _cut(message: AIMessage) -> bool:
    """Whether an answer took the last token allowed and is no whole JSON object or list."""
    if message.response_metadata.get("finish_reason") != "length":
        return False
    try:
        return not isinstance(json.loads(message.text), dict | list)
    except ValueError:
        return True


def create_windows_chain(
    llm: LanguageModelLike,
    prompt: BasePromptTemplate[Any],
    *,
    output_parser: BaseOutputParser[Any] | None = None,
    document_prompt: BasePromptTemplate[Any] | None = None,
    document_separator: str = "\n\n",
    document_variable_name: str = "context",
) -> Runnable[dict[str, Any], Any]:
    """A chain that gives a list of documents to the model, each in a window of its own.

    It takes the arguments of ``create_stuff_documents_chain`` and replaces it, in
    ``create_retrieval_chain`` too. The documents' variable becomes empty in the prompt: the model
    reads the documents before the first user message.

    Args:
        llm: `ChatRagWindows` or `RagWindows`, also bound, configured, with fallbacks, or with
            structured output.
        prompt: with the documents' variable among its input variables.
        output_parser: `StrOutputParser` unless given; none for a model with structured output.
        document_prompt: makes the whole text of a window, from ``page_content`` and metadata; no
            title is put above it then. Without, a window is the title, if any, and the content.
        document_separator: accepted for compatibility and not used; windows need no separator.
        document_variable_name: key of the documents in the input, and variable of the prompt.

    Returns:
        A runnable from a mapping with the list of documents and the prompt's other variables.

    Raises:
        RequestError: the prompt lacks the variable, or a model would not get the documents.
    """
    if document_variable_name not in prompt.input_variables:
        raise RequestError(
            f"The prompt has no variable {document_variable_name!r} (it has "
            f"{prompt.input_variables}). Add it, or name yours with document_variable_name."
        )
    asked = _asked(llm)
    for model in asked:
        if not isinstance(model, BaseWindowModel | RunnableLambda):
            raise RequestError(
                f"{type(model).__name__} would not get the documents. Give ChatRagWindows or "
                "RagWindows, also bound, configured or with fallbacks, or what its "
                "with_structured_output returns. For other models use "
                "create_stuff_documents_chain."
            )
    structured = any(isinstance(model, StructuredModel) for model in asked)
    own: Runnable[Any, Any] = RunnablePassthrough() if structured else StrOutputParser()
    parser = output_parser or own

    def ask(inputs: dict[str, Any]) -> Runnable[dict[str, Any], Any]:
        with in_langchain_terms():
            passages = passage_list(document_variable_name, inputs[document_variable_name])
        if document_prompt is not None:
            passages = [_shaped(passage, document_prompt) for passage in passages]
        emptied = RunnablePassthrough.assign(**{document_variable_name: lambda _: ""})
        return emptied | prompt | llm.bind(documents=passages) | parser

    return RunnableLambda(ask).with_config(run_name="windows_chain")


def _shaped(passage: Passage, document_prompt: BasePromptTemplate[Any]) -> Passage:
    def shaped(text: str) -> str:
        document = Document(page_content=text, metadata=dict(passage.metadata))
        return format_document(document, document_prompt)

    before = tuple(map(shaped, passage.before))
    return replace(passage, text=shaped(passage.text), title=None, before=before)


def _asked(llm: object) -> list[object]:
    """What gets the keywords of a call, behind bindings and fallbacks."""
    if isinstance(llm, RunnableBindingBase):
        return _asked(llm.bound)
    if isinstance(llm, DynamicRunnable):
        return _asked(llm.default)
    if isinstance(llm, RunnableWithFallbacks):
        return [model for runnable in llm.runnables for model in _asked(runnable)]
    return [llm]
