"""Answers as data: what reads a forced call, or JSON in the text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
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
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from langchain_rag_windows.errors import in_langchain_terms
from rag_windows.integration import check_schema


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
        yield from RunnableSequence.transform(self._bound(kwargs), input, config)

    async def atransform(
        self,
        input: AsyncIterator[LanguageModelInput],
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """Like `transform`."""
        async for piece in RunnableSequence.atransform(self._bound(kwargs), input, config):
            yield piece

    def _bound(self, kwargs: Mapping[str, Any]) -> StructuredModel:
        first = self.first.bind(**kwargs) if kwargs else self.first
        return StructuredModel(first=first, middle=self.middle, last=self.last, name=self.name)


def reader_of(schema: Any, *, called: bool) -> Runnable[AIMessage, Any]:
    """What makes data of an answer: instances of a pydantic class, else what JSON holds.

    Args:
        schema: a class or a mapping; None for any JSON.
        called: whether the data are the arguments of a call, and not the text.
    """
    pydantic = isinstance(schema, type) and is_basemodel_subclass(schema)
    parser: Any
    if called and pydantic:
        parser = PydanticToolsParser(tools=[schema], first_tool_only=True)
    elif called:
        name = convert_to_openai_tool(schema)["function"]["name"]
        parser = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    else:
        parser = PydanticOutputParser(pydantic_object=schema) if pydantic else JsonOutputParser()
    whole = RunnableLambda(_called if called else _complete)
    return whole | RunnableLambda(parser.invoke)


def with_raw(reader: Runnable[AIMessage, Any]) -> RunnableGenerator[Any, Any]:
    """Hands messages on as they come, then what the reader makes of them all."""

    def read(message: Any) -> dict[str, Any]:
        try:
            return AddableDict(parsed=reader.invoke(message), parsing_error=None)
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


def json_schema(schema: Any) -> dict[str, Any]:
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
