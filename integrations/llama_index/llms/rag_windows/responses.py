"""What LlamaIndex gets back: the text, and all else as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    MessageRole,
)

from llama_index.llms.rag_windows.blocks import answer_blocks
from llama_index.llms.rag_windows.serializing import as_plain
from llama_index.llms.rag_windows.tools import BROKEN, call_entries
from rag_windows import Generation, Method, Passage
from rag_windows.integration import ToolAnswer


def chat_response(
    generation: Generation, answer: ToolAnswer, passages: Sequence[Passage], raw: dict[str, Any]
) -> ChatResponse:
    """A whole answer, with citation blocks and calls of tools."""
    calls = {}
    if answer.calls:
        calls = {"tool_calls": call_entries(answer.calls)}
        raw = {**raw, "finish_reason": "tool_calls"}
    if answer.broken:
        raw = {**raw, BROKEN: [asdict(one) for one in answer.broken]}
    message = ChatMessage(
        role=MessageRole.ASSISTANT,
        blocks=answer_blocks(answer, generation.citations, passages),
        additional_kwargs=calls,
    )
    return ChatResponse(message=message, raw=raw)


def shown(answer: ToolAnswer, *, parallel: bool = True) -> ToolAnswer:
    """An answer as it is shown: a call that can't be read stands in its text.

    Args:
        answer: as it was read.
        parallel: whether several calls count, or the first one only.
    """
    text = "\n".join(part for part in (answer.text, *(one.text for one in answer.broken)) if part)
    return replace(answer, text=text, calls=answer.calls if parallel else answer.calls[:1])


def chat_piece(text: str, delta: str) -> ChatResponse:
    """What a stream has given so far."""
    message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
    return ChatResponse(message=message, delta=delta)


def as_raw(
    generation: Generation, passages: Sequence[Passage], model: str, method: Method
) -> dict[str, Any]:
    """All that is known about an answer but its text, as plain JSON.

    Keys:
        model, method: names; ``method`` with its numbers.
        usage: prompt_tokens, completion_tokens, total_tokens, cached_tokens.
        timings: seconds: encode_s, ttft_s, total_s.
        finish_reason: "stop", "length" or "cancelled"; "tool_calls" where tools are called.
        citations: for each passage in order its number, id, title and attention mass; or None.
        prefix_mass, query_mass: the rest of the attention; or None.
        windows: for each window the passage, its part of how many, the span of the passage's text
            and its tokens.
        notes: what was done with blank, duplicate and overlong passages.
        fallback: None, or what the guard found: where it was ``taken``, passages were read one
            after the other and not by ``method``.
        broken_calls: only where there are any: calls of tools that can't be read, with the reason;
            they stand in the text, too.
        alternatives: further answers, where ``num_return_sequences`` asked for them.
    """
    usage = generation.usage
    citations = generation.citations
    return {
        "model": model,
        "method": as_plain(method),
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "timings": asdict(generation.timings),
        "finish_reason": generation.finish_reason,
        "citations": None
        if citations is None
        else [
            {**asdict(citation), "title": passages[citation.passage].title}
            for citation in citations
        ],
        "prefix_mass": generation.prefix_mass,
        "query_mass": generation.query_mass,
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
        "notes": [asdict(note) for note in generation.notes],
        "fallback": None if generation.fallback is None else generation.fallback.as_dict(),
        "alternatives": [other.text for other in generation.alternatives],
    }
