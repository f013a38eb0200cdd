"""The engine's answers as LangChain's: messages, metadata, content blocks with citations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set
from datetime import date, time
from enum import Enum
from typing import Any, cast

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages import content as types
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.block_translators import register_translator
from langchain_core.messages.tool import invalid_tool_call, tool_call
from pydantic import BaseModel

from rag_windows import Generation, Passage
from rag_windows.integration import ModelCall, ToolAnswer, answer_record, carried, describe

PROVIDER = "rag_windows"
"""Under this name LangChain and LangSmith know our models."""


def usage_metadata(generation: Generation) -> UsageMetadata:
    """Token counts; ``cache_read`` are the input tokens that were not computed anew."""
    usage = generation.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
    )


def plain(value: object, _inside: tuple[int, ...] = ()) -> Any:
    """A value as JSON holds it, whatever a document's metadata hold.

    Dates and times are written in ISO 8601, sets become sorted lists, arrays lists, and what JSON
    has no form for (paths, UUIDs, infinity, objects) its string.
    """
    if isinstance(value, Enum):
        return plain(value.value, _inside)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, date | time):
        return value.isoformat()
    if id(value) in _inside:
        return str(value)
    inside = (*_inside, id(value))
    listed = getattr(value, "tolist", None)  # numpy's scalars and arrays, tensors
    if isinstance(value, BaseModel):
        value = value.model_dump()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    elif callable(listed) and not isinstance(value, type):
        return plain(listed(), inside)
    if isinstance(value, Mapping):
        return {str(key): plain(entry, inside) for key, entry in value.items()}
    if isinstance(value, Set):
        return sorted((plain(entry, inside) for entry in value), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [plain(entry, inside) for entry in value]
    return str(value)


def response_metadata(call: ModelCall, generation: Generation) -> dict[str, Any]:
    """What else is known of an answer, in values that JSON holds.

    ``citations`` has one entry a document, in the order given: its place (``index``), ``id``,
    ``title`` and ``metadata``, its share of the attention (``mass``), and whether it carried the
    answer (``cited``, see `rag_windows.integration.carried`); those that did come with their
    ``text``. The rest is as `rag_windows.integration.answer_record` has it.
    """
    passages = cast(Sequence[Passage], call.passages)
    cited = {citation.passage for citation in carried(generation.citations)}
    told = {
        "model_name": call.model_name,
        "model_provider": PROVIDER,
        "method": describe(call.method),
        "length": len(generation.text),
        "citations": [
            {
                "index": citation.passage,
                "id": citation.id,
                "title": passages[citation.passage].title,
                "metadata": plain(passages[citation.passage].metadata),
                "mass": citation.mass,
                "cited": citation.passage in cited,
                **({"text": passages[citation.passage].text} if citation.passage in cited else {}),
            }
            for citation in generation.citations or ()
        ],
        "notes": [note.message for note in generation.notes],
        **answer_record(generation),
    }
    if generation.logprobs is not None:
        told["logprobs"] = _logprobs(generation, call.lm.tokenizer)
    return told


def _logprobs(generation: Generation, tokenizer: Any) -> dict[str, Any]:
    """As OpenAI's models tell them; ``bytes`` of a token that is part of a character are None."""
    noted = list(generation.logprobs or ())
    while noted and noted[-1].id in tokenizer.all_special_ids:
        noted.pop()

    def entry(id_: int, logprob: float) -> dict[str, Any]:
        text = str(tokenizer.decode([id_]))
        whole = "\ufffd" not in text
        return {"token": text, "bytes": [*text.encode()] if whole else None, "logprob": logprob}

    return {
        "content": [
            {**entry(one.id, one.logprob), "top_logprobs": [entry(*other) for other in one.top]}
            for one in noted
        ]
    }


def as_message(call: ModelCall, generation: Generation) -> AIMessage:
    """A whole answer; one of several, where there are alternatives."""
    return AIMessage(**_fields(call, generation, call.reader.whole(generation)))


def last_chunk(call: ModelCall, generation: Generation) -> AIMessageChunk:
    """The end of a stream: what was not streamed yet, and everything that is told once."""
    fields = _fields(call, generation, call.reader.last(generation))
    return AIMessageChunk(**fields, chunk_position="last")


def _fields(call: ModelCall, generation: Generation, answer: ToolAnswer) -> dict[str, Any]:
    metadata = response_metadata(call, generation)
    if answer.calls:
        metadata["finish_reason"] = "tool_calls"
    return {
        "content": answer.text,
        "tool_calls": [
            tool_call(name=one.name, args=dict(one.arguments), id=one.id) for one in answer.calls
        ],
        "invalid_tool_calls": [
            invalid_tool_call(name=None, args=broken.text, id=None, error=broken.error)
            for broken in answer.broken
        ],
        "additional_kwargs": ({"reasoning_content": answer.reasoning} if answer.reasoning else {}),
        "usage_metadata": usage_metadata(generation),
        "response_metadata": metadata,
    }


def _citation(entry: dict[str, Any], length: int) -> types.Citation:
    """A citation as annotation: of the whole text, as attention is averaged over its tokens."""
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
        text["annotations"] = [_citation(entry, metadata["length"]) for entry in cited]
    return [text]


def translate_content(message: AIMessage) -> list[types.ContentBlock]:
    """Blocks of a whole answer: reasoning, the text with citations, the calls of tools."""
    blocks = _text(message)
    if reasoning := message.additional_kwargs.get("reasoning_content"):
        blocks.insert(0, types.ReasoningContentBlock(type="reasoning", reasoning=reasoning))
    calls: list[Any] = [{**call, "type": "tool_call"} for call in message.tool_calls]
    calls += [{**call, "type": "invalid_tool_call"} for call in message.invalid_tool_calls]
    return blocks + calls


def translate_content_chunk(message: AIMessageChunk) -> list[types.ContentBlock]:
    """Blocks of a piece of a stream, or of pieces put together; calls come whole, at its end."""
    return translate_content(message) if message.chunk_position == "last" else _text(message)


register_translator(PROVIDER, translate_content, translate_content_chunk)
