"""Tool calls in LangChain's terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, InvalidToolCall, ToolCall, ToolMessage
from langchain_core.messages.tool import invalid_tool_call, tool_call
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from langchain_rag_windows.errors import in_langchain_terms
from rag_windows import Generation, WindowedLM
from rag_windows.errors import ToolsUnsupportedError
from rag_windows.hints import install
from rag_windows.prompt import tool_answers
from rag_windows.prompt.conversation import Conversation
from rag_windows.prompt.tool_answers import ToolAnswer

ToolLike = Mapping[str, Any] | type | Callable[..., Any] | BaseTool
"""What LangChain takes for a tool."""


class _Model(Protocol):
    def windowed_lm(self) -> WindowedLM: ...

    def bind(self, **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]: ...


def bind(
    model: _Model,
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
    reader = AnswerReader.of(model.windowed_lm(), definitions, tool_choice)
    if strict and definitions and reader.grammar() is None:
        raise ToolsUnsupportedError(
            "strict=True asks for arguments that always fit the schema. That takes a forced call "
            "(tool_choice), one whose arguments the chat template writes as JSON, a schema that "
            f"llguidance knows, and {install('structured')}. Leave strict out: what does not "
            "fit is reported as an error."
        )
    if strict is not None:
        kwargs["strict"] = strict
    return model.bind(tools=definitions, tool_choice=tool_choice, **kwargs)


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer in the fields of an `AIMessage`.

    Attributes:
        content: the text; from `AnswerReader.last`, what was not fed out before.
        tool_calls: calls of tools.
        invalid_tool_calls: calls that can't be read, with the reason.
        additional_kwargs: ``reasoning_content``, where the model thought aloud.
    """

    content: str
    tool_calls: list[ToolCall] = field(default_factory=list)
    invalid_tool_calls: list[InvalidToolCall] = field(default_factory=list)
    additional_kwargs: dict[str, Any] = field(default_factory=dict)


class AnswerReader:
    """`rag_windows.prompt.tool_answers.AnswerReader`, in LangChain's terms.

    Args:
        reader: of one request.
    """

    def __init__(self, reader: tool_answers.AnswerReader) -> None:
        self._reader = reader

    @classmethod
    def of(
        cls, lm: WindowedLM, tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any = None
    ) -> AnswerReader:
        """A reader for one request; for the arguments and errors see `bind`."""
        with in_langchain_terms():
            return cls(
                tool_answers.AnswerReader.of(lm.tokenizer, lm.template_kwargs, tools, tool_choice)
            )

    def query(self, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        """The query for the engine.

        Args:
            messages: as `Conversation.of` takes them.
        """
        with in_langchain_terms():
            return self._reader.query(messages)

    def grammar(self) -> str | None:
        """See `rag_windows.prompt.tool_answers.AnswerReader.grammar`."""
        return self._reader.grammar()

    def feed(self, text: str) -> str:
        """Take a chunk of a stream; give what of it is text and no call, nor may become one."""
        return self._reader.feed(text)

    def last(self, generation: Generation) -> ParsedAnswer:
        """The end of a stream whose chunks were all fed: the rest of the text, and the calls."""
        return _parsed(self._reader.last(generation))

    def whole(self, generation: Generation) -> ParsedAnswer:
        """An answer of which nothing was fed; one of several, where there are alternatives."""
        return _parsed(self._reader.whole(generation))


def call_message(message: AIMessage) -> dict[str, Any]:
    """An answer with calls, as the engine's message."""
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["args"]},
        }
        for call in message.tool_calls
    ]
    return {"role": "assistant", "content": str(message.text), "tool_calls": calls}


def result_message(message: ToolMessage, content: str) -> dict[str, Any]:
    """What a tool gave back, as the engine's message, with this content."""
    made = {"role": "tool", "content": content, "tool_call_id": message.tool_call_id}
    return {**made, "name": message.name} if message.name else made


def _parsed(answer: ToolAnswer) -> ParsedAnswer:
    return ParsedAnswer(
        answer.text,
        [tool_call(name=call.name, args=dict(call.arguments), id=call.id) for call in answer.calls],
        [
            invalid_tool_call(name=None, args=broken.text, id=None, error=broken.error)
            for broken in answer.broken
        ],
        {"reasoning_content": answer.reasoning} if answer.reasoning else {},
    )
