"""Answers as LangChain's standard content blocks, with citations as annotations of the text."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages import content as types
from langchain_core.messages.block_translators import register_translator

from langchain_rag_windows.options import PROVIDER


def citation(entry: dict[str, Any], length: int) -> types.Citation:
    """One entry of ``response_metadata["citations"]`` as the annotation of a text.

    Attention is averaged over all tokens of the answer, so the annotation spans the whole of it.
    ``extras`` hold the document's place among those given, its id, its metadata and the share of
    the attention that it got.

    Args:
        entry: of a document that carried the answer.
        length: of the answer, in characters.
    """
    made = types.Citation(
        type="citation",
        start_index=0,
        end_index=length,
        cited_text=entry["text"],
        extras={key: entry[key] for key in ("index", "id", "metadata", "mass")},
    )
    if entry["title"] is not None:
        made["title"] = entry["title"]
    source = entry["metadata"].get("url") or entry["metadata"].get("source")
    if isinstance(source, str) and source.startswith(("https://", "http://")):
        made["url"] = source
    return made


def _text(message: AIMessage) -> list[types.ContentBlock]:
    if not isinstance(message.content, str):
        raise NotImplementedError  # LangChain reads lists of blocks itself
    metadata = message.response_metadata
    cited = [entry for entry in metadata.get("citations", ()) if entry["cited"]]
    if not message.content and not cited:
        return []
    text = types.TextContentBlock(type="text", text=message.content)
    if cited:
        text["annotations"] = [citation(entry, metadata["length"]) for entry in cited]
    return [text]


def translate_content(message: AIMessage) -> list[types.ContentBlock]:
    """Blocks of a whole answer: reasoning, the text with citations, the calls of tools."""
    blocks = _text(message)
    if reasoning := message.additional_kwargs.get("reasoning_content"):
        blocks.insert(0, types.ReasoningContentBlock(type="reasoning", reasoning=reasoning))
    for call in message.tool_calls:
        blocks.append(
            types.ToolCall(type="tool_call", id=call["id"], name=call["name"], args=call["args"])
        )
    for bad in message.invalid_tool_calls:
        blocks.append(
            types.InvalidToolCall(
                type="invalid_tool_call",
                id=bad["id"],
                name=bad["name"],
                args=bad["args"],
                error=bad["error"],
            )
        )
    return blocks


def translate_content_chunk(message: AIMessageChunk) -> list[types.ContentBlock]:
    """Blocks of a piece of a stream, or of pieces put together; calls come whole, at its end."""
    return translate_content(message) if message.chunk_position == "last" else _text(message)


register_translator(PROVIDER, translate_content, translate_content_chunk)
