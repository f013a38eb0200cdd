"""Tools that are bound to a model, and answers as data: a forced call, or JSON in the text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import (
    JsonOutputKeyToolsParser,
    PydanticToolsParser,
)
from langchain_core.runnables import (
    Runnable,
    RunnableConfig,
    RunnableGenerator,
    RunnableLambda,
    RunnableSequence,
)
from langchain_core.runnables.utils import AddableDict
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from langchain_rag_windows.errors import RequestError, in_langchain_terms
from rag_windows.errors import ToolsUnsupportedError, install
from rag_windows.integration import AnswerReader, check_schema

ToolLike = Mapping[str, Any] | type | Callable[..., Any] | BaseTool
"""What LangChain takes for a tool."""


def bind_tools(
    model: Any,
    tools: Sequence[ToolLike],
    *,
    tool_choice: Any = None,
    strict: bool | None = None,
    **kwargs: Any,
) -> Runnable[LanguageModelInput, AIMessage]:
    """The model with tools that it may call.

    Args:
        model: a chat model; it is loaded, to see whether its chat template supports tools.
        tools: functions, pydantic or TypedDict classes, LangChain tools or OpenAI definitions.
        tool_choice: None or "auto", "none", "any" (or "required", True), a tool's name, or
            OpenAI's ``{"type": "function", "function": {"name": ...}}``. A call is forced by
            writing its beginning for the model.
        strict: whether arguments must be held to the tool's schema, which works for a forced call
            and with the extra ``structured``. None does it where it can be done, False never.
        kwargs: bound too.

    Raises:
        NotImplementedError: the template shows no tools, its calls can't be read, or forced; or
            ``strict=True`` can't be kept.
        RequestError: a ``tool_choice`` that is no tool, or a tool's name that can't be used.
    """
    definitions = [convert_to_openai_tool(tool) for tool in tools]
    lm = model.windowed_lm()
    with in_langchain_terms():
        reader = AnswerReader.of(lm.tokenizer, lm.template_kwargs, definitions, tool_choice)
    if strict and definitions and reader.grammar() is None:
        raise ToolsUnsupportedError(
            "strict=True asks for arguments that always fit the schema. That takes a forced call "
            "(tool_choice), one whose arguments the chat template writes as JSON, a schema that "
            f"llguidance knows, and {install('structured')}. Leave strict out: what does not "
            "fit is reported as an error."
        )
    if strict is not None:
        kwargs["strict"] = strict
    bound: Runnable[LanguageModelInput, AIMessage] = model.bind(
        tools=definitions, tool_choice=tool_choice, **kwargs
    )
    return bound


class StructuredModel(RunnableSequence[LanguageModelInput, Any]):
    """A model and what reads its answers; keywords of a call, ``documents=`` too, reach the model.

    A plain sequence hands them to its first step only, but when streaming to every step, which
    then fails.
    """

    def transform(
        self,
        input: Iterator[LanguageModelInput],
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """See `Runnable.transform`; ``stream`` comes here, too."""
        yield from RunnableSequence.transform(self._asked(kwargs), input, config)

    async def atransform(
        self,
        input: AsyncIterator[LanguageModelInput],
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """Like `transform`."""
        async for piece in RunnableSequence.atransform(self._asked(kwargs), input, config):
            yield piece

    def _asked(self, kwargs: Mapping[str, Any]) -> StructuredModel:
        if not kwargs:
            return self
        return StructuredModel(
            first=self.first.bind(**kwargs), middle=self.middle, last=self.last, name=self.name
        )


def with_structured_output(
    model: BaseChatModel,
    schema: Mapping[str, Any] | type | None = None,
    *,
    method: str = "function_calling",
    include_raw: bool = False,
    strict: bool | None = None,
    **kwargs: Any,
) -> Runnable[LanguageModelInput, Any]:
    """The model, answering with an instance of a schema.

    Args:
        model: a chat model.
        schema: a pydantic class (instances come back, validated), or a TypedDict class, a JSON
            schema or an OpenAI definition (dicts come back, as the model wrote them).
        method: "function_calling" forces one call of a tool of this schema, where the chat
            template supports tools, and so shows the schema to the model. "json_schema" holds the
            answer to the schema token by token (extra ``structured``), in any model; "json_mode"
            only reads the answer as JSON. For these two the prompt should ask for JSON, with the
            names of the fields.
        include_raw: give ``{"raw": message, "parsed": ..., "parsing_error": ...}`` instead.
        strict: whether the data must be held to the schema: always with "json_schema", never with
            "json_mode". "function_calling" does it where the extra is installed and the schema and
            the template allow it; True refuses where it can't be done, False switches it off.
        kwargs: bound to the model.

    Raises:
        NotImplementedError: the template supports no tools, or ``strict=True`` can't be kept.
        RequestError: an unknown method, no schema, or one that answers can't be held to.
        MissingExtraError: method "json_schema" without the extra ``structured``.
        OutputParserException: at the call, if the answer was cut, holds no JSON or call, or does
            not fit a pydantic class.
    """
    if method not in ("function_calling", "json_schema", "json_mode"):
        raise RequestError(
            f"Unknown method {method!r}; use 'function_calling', 'json_schema' or 'json_mode' "
            "(with a prompt that asks for JSON)."
        )
    if strict and method == "json_mode":
        raise ToolsUnsupportedError(
            "method='json_mode' holds no answer to its schema, so it can't be strict; use "
            "method='json_schema'."
        )
    if schema is None and method != "json_mode":
        raise RequestError(f"{method} needs a schema; without one, use method='json_mode'.")
    told = {"kwargs": {"method": method}, "schema": schema}
    pydantic = isinstance(schema, type) and is_basemodel_subclass(schema)
    parser: Any
    if method == "function_calling":
        name = convert_to_openai_tool(schema)["function"]["name"]  # type: ignore[arg-type]  # not None, see above
        try:
            asked = model.bind_tools(
                [schema],  # type: ignore[list-item]  # not None, see above
                tool_choice=name,
                strict=strict,
                ls_structured_output_format=told,
                **kwargs,
            )
        except ToolsUnsupportedError as error:
            raise ToolsUnsupportedError(
                f"method='function_calling' needs a chat template with tools. {error} Without "
                "tools, ask for JSON with these fields in the prompt and use method='json_schema' "
                f"(needs {install('structured')}) or method='json_mode'."
            ) from error
        tools = PydanticToolsParser(tools=[schema], first_tool_only=True)  # type: ignore[list-item]  # a pydantic class where it is used
        keyed = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
        parser = RunnableLambda(_called) | RunnableLambda((tools if pydantic else keyed).invoke)
    else:
        if method == "json_schema":
            kwargs["json_schema"] = _json_schema(schema)
        asked = model.bind(ls_structured_output_format=told, **kwargs)
        read = PydanticOutputParser(pydantic_object=schema) if pydantic else JsonOutputParser()  # type: ignore[arg-type]  # a pydantic class
        parser = RunnableLambda(_complete) | RunnableLambda(read.invoke)
    if not include_raw:
        return StructuredModel(first=asked, last=parser)
    return StructuredModel(first=asked, last=_with_raw(parser))


def _with_raw(parser: Runnable[AIMessage, Any]) -> RunnableGenerator[Any, Any]:
    """Hands messages on as they come, then what the parser makes of them all."""

    def read(message: Any) -> dict[str, Any]:
        try:
            return AddableDict(parsed=parser.invoke(message), parsing_error=None)
        except Exception as error:  # noqa: BLE001 - handed to the one who asked for it
            return AddableDict(parsed=None, parsing_error=error)

    def whole(messages: Iterator[AIMessage]) -> Iterator[dict[str, Any]]:
        seen: Any = None
        for message in messages:
            seen = message if seen is None else seen + message
            yield AddableDict(raw=message)
        yield read(seen)

    async def whole_async(messages: AsyncIterator[AIMessage]) -> AsyncIterator[dict[str, Any]]:
        seen: Any = None
        async for message in messages:
            seen = message if seen is None else seen + message
            yield AddableDict(raw=message)
        yield read(seen)

    return RunnableGenerator(whole, whole_async)


def _json_schema(schema: Any) -> dict[str, Any]:
    """What pydantic, TypedDict, OpenAI or JSON schemas say, as the latter."""
    if isinstance(schema, Mapping) and "type" in schema and "title" not in schema:
        found = dict(schema)
    else:
        found = convert_to_openai_tool(schema)["function"]["parameters"]
    with in_langchain_terms():
        check_schema(found)
    return found


def _complete(message: AIMessage) -> AIMessage:
    """The message, if it was not cut: LangChain's JSON parser would close what is open."""
    if message.response_metadata.get("finish_reason") == "length" and not _closed(message.text):
        raise OutputParserException(
            "The answer was cut at max_tokens before the data was complete; raise max_tokens.",
            llm_output=str(message.text),
        )
    return message


def _closed(text: str) -> bool:
    """Whether a text that took the last token allowed is a whole JSON object or list."""
    try:
        return isinstance(json.loads(text), dict | list)
    except ValueError:
        return False


def _called(message: AIMessage) -> AIMessage:
    """The message, if it holds a call: LangChain's parsers would answer None without one."""
    if message.tool_calls:
        return message
    _complete(message)
    errors = [str(call["error"]) for call in message.invalid_tool_calls]
    raise OutputParserException(
        f"The model made no call that can be read. {' '.join(errors)}".strip(),
        llm_output=str(message.text),
    )
