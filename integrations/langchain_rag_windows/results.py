"""The engine's answers as LangChain messages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set
from datetime import date, time
from enum import Enum
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from pydantic import BaseModel

from langchain_rag_windows.options import PROVIDER
from langchain_rag_windows.tools import ParsedAnswer
from rag_windows import Generation, Method, Passage
from rag_windows.methods import describe
from rag_windows.results import carried


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
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return plain(value.value, _inside)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, date | time):
        return value.isoformat()
    if id(value) in _inside:
        return str(value)
    inside = (*_inside, id(value))
    if isinstance(value, BaseModel):
        return plain(value.model_dump(), inside)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {name: plain(entry, inside) for name, entry in named}
    if isinstance(value, Mapping):
        return {str(key): plain(entry, inside) for key, entry in value.items()}
    if isinstance(value, Set):
        return sorted((plain(entry, inside) for entry in value), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [plain(entry, inside) for entry in value]
    listed = getattr(value, "tolist", None)  # numpy's scalars and arrays, tensors
    if callable(listed) and not isinstance(value, type):
        return plain(listed(), inside)
    return str(value)


def method_metadata(method: Method) -> dict[str, Any]:
    """A method's name and numbers."""
    return describe(method)


def response_metadata(
    generation: Generation, passages: Sequence[Passage], model_name: str, method: Method
) -> dict[str, Any]:
    """What else is known of an answer, in values that JSON holds.

    ``citations`` has one entry a document, in the order given: its place (``index``), ``id``,
    ``title`` and ``metadata``, its share of the attention (``mass``), and whether it carried the
    answer (``cited``, see `rag_windows.results.carried`); those that did come with their ``text``.
    ``windows`` is the engine's record of what was read in a window of its own: which document,
    which part of how many, and the span of its text. ``fallback`` is None, or what the guard found:
    where it was ``taken``, the documents were read one after the other and not by ``method``.
    """
    cited = {citation.passage for citation in carried(generation.citations)}
    return {
        "model_name": model_name,
        "model_provider": PROVIDER,
        "method": method_metadata(method),
        "finish_reason": generation.finish_reason,
        "timings": dataclasses.asdict(generation.timings),
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
        "windows": [
            {
                "passage": window.passage,
                "part": window.part,
                "parts": window.parts,
                "start": window.start,
                "end": window.end,
                "tokens": len(window.ids),
            }
            for window in generation.windows
        ],
        "notes": [note.message for note in generation.notes],
        "fallback": None if generation.fallback is None else generation.fallback.as_dict(),
    }


def logprobs_metadata(generation: Generation, tokenizer: Any) -> dict[str, Any]:
    """Log-probabilities in the form of OpenAI's, which LangChain's users know.

    Under ``content`` stands one entry a token, without those at the end that are no text:
    ``token``, its ``bytes`` (None where it is a part of a character), ``logprob`` and
    ``top_logprobs``.
    """
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


def answer(parsed: ParsedAnswer, generation: Generation, metadata: dict[str, Any]) -> AIMessage:
    """A whole answer."""
    return AIMessage(
        content=parsed.content,
        tool_calls=parsed.tool_calls,
        invalid_tool_calls=parsed.invalid_tool_calls,
        additional_kwargs=parsed.additional_kwargs,
        usage_metadata=usage_metadata(generation),
        response_metadata=_finished(metadata, parsed),
    )


def last_chunk(
    rest: ParsedAnswer, generation: Generation, metadata: dict[str, Any]
) -> AIMessageChunk:
    """The end of a stream: what was not streamed yet, and everything that is told once."""
    return AIMessageChunk(
        content=rest.content,
        tool_calls=rest.tool_calls,
        invalid_tool_calls=rest.invalid_tool_calls,
        additional_kwargs=rest.additional_kwargs,
        usage_metadata=usage_metadata(generation),
        response_metadata=_finished(metadata, rest),
        chunk_position="last",
    )


def _finished(metadata: dict[str, Any], parsed: ParsedAnswer) -> dict[str, Any]:
    return {**metadata, "finish_reason": "tool_calls"} if parsed.tool_calls else metadata
