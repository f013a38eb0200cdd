"""Tools and their calls in LlamaIndex's terms; `rag_windows.tool_answers` reads the answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ToolCallBlock
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools.types import BaseTool

from rag_windows.errors import GenerationError, InputError
from rag_windows.integration import ToolCall

BROKEN = "broken_calls"
"""Key in ``raw``: calls that can't be read, each with its ``text`` and the ``error``."""


def definitions(tools: Iterable[BaseTool | Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Tools as a chat template takes them.

    Args:
        tools: LlamaIndex's, or OpenAI's definitions.

    Raises:
        InputError: something else.
    """
    made: list[Mapping[str, Any]] = []
    for tool in tools:
        if isinstance(tool, BaseTool):
            made.append(tool.metadata.to_openai_tool(skip_length_check=True))
        elif isinstance(tool, Mapping):
            made.append(tool)
        else:
            raise InputError(
                f"A tool must be one of LlamaIndex's, or a definition, not {type(tool).__name__}; "
                "make one with FunctionTool.from_defaults(function)."
            )
    return made


def call_blocks(calls: Sequence[ToolCall]) -> list[ToolCallBlock]:
    """Calls, as they stand in an answer's message."""
    return [
        ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=dict(call.arguments))
        for call in calls
    ]


def call_entries(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Calls in the form of OpenAI's chat API, which LlamaIndex's programs look for."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for call in calls
    ]


def call_message(message: ChatMessage, content: str) -> dict[str, Any]:
    """An answer in the engine's form, with its calls, if it has any."""
    calls = [
        {
            "id": block.tool_call_id or None,
            "type": "function",
            "function": {"name": block.tool_name, "arguments": block.tool_kwargs},
        }
        for block in message.blocks
        if isinstance(block, ToolCallBlock)
    ]
    made = {"role": "assistant", "content": content}
    return {**made, "tool_calls": calls} if calls else made


def result_message(message: ChatMessage, content: str) -> dict[str, Any]:
    """What a tool gave back, in the engine's form."""
    known = {
        name: message.additional_kwargs[name]
        for name in ("tool_call_id", "name")
        if message.additional_kwargs.get(name)
    }
    return {"role": "tool", "content": content, **known}


def selections(response: ChatResponse, *, required: bool) -> list[ToolSelection]:
    """The calls of an answer.

    Args:
        response: of a chat.
        required: whether there must be one.

    Raises:
        GenerationError: there is none. Not a ``ValueError``: LlamaIndex's refine step would turn
            that into an empty response.
    """
    calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
    if required and not calls:
        broken = response.raw.get(BROKEN) if isinstance(response.raw, Mapping) else None
        why = "".join(f" {one['error']}" for one in broken or ())
        raise GenerationError(
            f"The model was to call a tool and answered {response.message.content or ''!r}.{why} "
            "Raise max_new_tokens if the call was cut off, or use tool_required=True."
        )
    return [
        ToolSelection(
            tool_id=call.tool_call_id or "",
            tool_name=call.tool_name,
            tool_kwargs=call.tool_kwargs if isinstance(call.tool_kwargs, dict) else {},
        )
        for call in calls
    ]
