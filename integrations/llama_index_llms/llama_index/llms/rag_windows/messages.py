"""What goes between LlamaIndex and the engine: messages, nodes and tools in, answers out.

And how many of LlamaIndex's tokens one prompt holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, cast

from jinja2.exceptions import TemplateError
from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CitableBlock,
    CitationBlock,
    CompletionResponse,
    ContentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.utils import get_tokenizer

from llama_index.llms.rag_windows.nodes import passage_of_node
from llama_index.llms.rag_windows.templates import Parts
from rag_windows import Chunk, Generation, Passage
from rag_windows.errors import GenerationError, InputError, RagWindowsError
from rag_windows.integration import (
    ModelCall,
    ToolAnswer,
    Transcript,
    answer_record,
    call_entry,
    carried,
    describe,
    one_way,
    passage_list,
)

BROKEN = "broken_calls"
"""Key in ``raw``: calls that can't be read, each with its ``text`` and the ``error``."""

_ROLES = {"developer": "system", "chatbot": "assistant", "model": "assistant", "function": "tool"}
_ROLES |= {role: role for role in ("system", "user", "assistant", "tool")}

_UNSHOWN = (CitationBlock, ThinkingBlock, CachePoint, ToolCallBlock)
"""What an earlier answer carries besides its text; calls of tools are read separately, and the
rest is not shown to the model again."""


@contextmanager
def surfacing() -> Iterator[None]:
    """Raise other errors as ours, which LlamaIndex's synthesizers do not swallow."""
    try:
        yield
    except RagWindowsError:
        raise
    except (ValueError, TypeError) as error:
        raise GenerationError(f"The model can't answer this call: {error}") from error


def read_messages(messages: Iterable[ChatMessage]) -> tuple[list[dict[str, Any]], list[Passage]]:
    """Messages as `WindowedLM.generate` takes them, and the passages in their citable blocks."""
    transcript, passages = Transcript("passages"), list[Passage]()
    read = transcript.messages
    for index, message in enumerate(messages):
        role, before = _ROLES.get(message.role.value), len(passages)
        if role is None:
            raise InputError(
                f"Message {index} has the unknown role {message.role.value!r}. Give the text as "
                "the user's message."
            )
        content = "\n".join(_texts(message, index, passages))
        if role == "system" and len(read) == 1 and read[0]["role"] == "system":
            both = (read[0]["content"], content)
            read[0]["content"] = "\n\n".join(text for text in both if text)
            continue
        calls = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
        known = message.additional_kwargs if role == "tool" else {}
        transcript.add(
            role,
            content,
            brought=len(passages) - before,
            calls=[
                call_entry(block.tool_name, block.tool_kwargs, block.tool_call_id or None)
                for block in calls
                if role == "assistant"
            ],
            call_id=known.get("tool_call_id") or None,
            name=known.get("name") or None,
        )
    return read, passages


def _texts(message: ChatMessage, index: int, passages: list[Passage]) -> Iterator[str]:
    """The texts of a message; a citable block becomes a passage: ``source`` is its id."""
    where = f"Message {index}"
    for block in message.blocks:
        if isinstance(block, CitableBlock):
            texts = [_text_of(part, f"{block.title!r} in {where}") for part in block.content]
            text = "\n".join(texts)
            passages.append(Passage(text, id=block.source or None, title=block.title or None))
        elif not isinstance(block, _UNSHOWN):
            yield _text_of(block, where)


def _text_of(block: ContentBlock, where: str) -> str:
    if isinstance(block, TextBlock):
        return block.text
    raise InputError(
        f"{where} holds a {type(block).__name__}, but this model reads text and citable blocks of "
        "text only. Give its text as a TextBlock, or as a CitableBlock to read it as a passage."
    )


def given_passages(blocks: list[Passage], passages: Any, nodes: Any) -> list[Passage]:
    """The passages of a call: in its messages, as ``passages=`` or as ``nodes=``."""
    if isinstance(passages, Parts):
        passages = passages.passages
    if isinstance(nodes, Sequence) and not isinstance(nodes, str):
        nodes = [passage_of_node(node) for node in nodes]
    return one_way(
        {
            "citable blocks": blocks,
            "passages=": passage_list("passages", passages),
            "nodes=": passage_list("nodes", nodes),
        }
    )


def chat_response(call: ModelCall, generation: Generation) -> ChatResponse:
    """A whole answer, with citation blocks and calls of tools."""
    return _response(call, generation, call.reader.whole(generation))


def chat_pieces() -> Callable[[ModelCall, Chunk], Iterator[ChatResponse]]:
    """What becomes of each chunk of one stream; calls come with the last."""
    said = thought = ""

    def pieces(call: ModelCall, chunk: Chunk) -> Iterator[ChatResponse]:
        nonlocal said, thought
        delta = call.reader.feed(chunk.text)
        said += delta
        thought += chunk.reasoning
        if chunk.generation is None:
            blocks: list[ContentBlock] = [ThinkingBlock(content=thought)] if thought else []
            message = ChatMessage(
                role=MessageRole.ASSISTANT, blocks=[*blocks, TextBlock(text=said)]
            )
            thinking = {"thinking_delta": chunk.reasoning} if chunk.reasoning else {}
            yield ChatResponse(message=message, delta=delta, additional_kwargs=thinking)
        else:
            rest = call.reader.last(chunk.generation)
            response = _response(call, chunk.generation, rest, said)
            response.delta = (response.message.content or "")[len(said) - len(delta) :]
            yield response

    return pieces


def completion_response(call: ModelCall, generation: Generation) -> CompletionResponse:
    """A whole answer as text."""
    return CompletionResponse(text=generation.text, raw=as_raw(call, generation))


def completion_pieces() -> Callable[[ModelCall, Chunk], Iterator[CompletionResponse]]:
    """What becomes of each chunk of one stream."""
    said = ""

    def pieces(call: ModelCall, chunk: Chunk) -> Iterator[CompletionResponse]:
        nonlocal said
        said += chunk.text
        raw = None if chunk.generation is None else as_raw(call, chunk.generation)
        if chunk.text or raw is not None:
            yield CompletionResponse(text=said, delta=chunk.text, raw=raw)

    return pieces


def _response(
    call: ModelCall, generation: Generation, answer: ToolAnswer, said: str = ""
) -> ChatResponse:
    """An answer in blocks: reasoning, text, a citation for each passage that carried it, calls.

    ``said`` was streamed of it already, and ``answer`` is the rest.
    """
    rest = "\n".join(part for part in (answer.text, *(one.text for one in answer.broken)) if part)
    calls = answer.calls if call.parallel else answer.calls[:1]
    passages = cast(Sequence[Passage], call.passages)
    blocks: list[ContentBlock] = []
    if answer.reasoning:
        blocks.append(ThinkingBlock(content=answer.reasoning))
    if said + rest or not calls:
        blocks.append(TextBlock(text=said + rest))
    for citation in carried(generation.citations):
        passage = passages[citation.passage]
        blocks.append(
            CitationBlock(
                cited_content=TextBlock(text=passage.text),
                source=passage.id or "",
                title=passage.title or "",
                additional_location_info={"passage": citation.passage},
            )
        )
    raw, entries = as_raw(call, generation), []
    for one in calls:
        arguments = dict(one.arguments)
        blocks.append(ToolCallBlock(tool_call_id=one.id, tool_name=one.name, tool_kwargs=arguments))
        # In the form of OpenAI's chat API, which LlamaIndex's programs look for.
        entries.append(call_entry(one.name, json.dumps(arguments), one.id))
    if calls:
        raw["finish_reason"] = "tool_calls"
    if answer.broken:
        raw[BROKEN] = [asdict(one) for one in answer.broken]
    message = ChatMessage(
        role=MessageRole.ASSISTANT,
        blocks=blocks,
        additional_kwargs={"tool_calls": entries} if calls else {},
    )
    return ChatResponse(message=message, raw=raw)


def as_raw(call: ModelCall, generation: Generation) -> dict[str, Any]:
    """All that is known about an answer but its text, as plain JSON.

    Keys, in addition to those of `rag_windows.integration.answer_record`:
        model, method: names; ``method`` with its numbers.
        usage: prompt_tokens, completion_tokens, total_tokens, cached_tokens.
        finish_reason: "tool_calls", too, where tools are called.
        citations: for each passage in order its number, id, title, attention mass and, with
            ``citations="removal"``, drop and supports; or None.
        prefix_mass, query_mass: the rest of the attention; or None.
        notes: what was done with blank, duplicate and overlong passages.
        broken_calls: only where there are any: calls of tools that can't be read, with the reason;
            they stand in the text, too.
        alternatives: further answers, where ``num_return_sequences`` asked for them.
        reasoning: only where there is any: what the model wrote for itself before the answer.
    """
    usage, citations = generation.usage, generation.citations
    passages = cast(Sequence[Passage], call.passages)
    titled = [{**asdict(one), "title": passages[one.passage].title} for one in citations or ()]
    return {
        "model": call.model_name,
        "method": describe(call.method),
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "citations": None if citations is None else titled,
        "prefix_mass": generation.prefix_mass,
        "query_mass": generation.query_mass,
        "notes": [asdict(note) for note in generation.notes],
        "alternatives": [other.text for other in generation.alternatives],
        **({"reasoning": generation.reasoning} if generation.reasoning else {}),
        **answer_record(generation),
    }


# What one prompt holds

SAMPLES = (
    (
        "Which invoices of Zielinski & Brandt GmbH, Wroclaw, were still open on 31 March 2019?",
        "Nos. 20418-A (EUR 13,870.55, due 2019-02-28), 20431 (EUR 902.10) and 20577-C "
        "(EUR 148,066.00, 30 days net). Contact: Dr. Agnieszka Wojciechowska, +48 71 555 01 92, "
        "a.wojciechowska@zielinski-brandt.example; reference WRO/2019/0331/7.",
        "And how much of that, in per cent, was paid by the 15th of May?",
    ),
    (
        "Why does `retry(max_attempts=5)` raise TimeoutError although the handler isn't called?",
        "Because `_deadline_ns` is computed once, in `Client.__init__()`; see "
        "https://docs.example.org/v2/retries#deadlines. Pass `deadline=None`, or subclass "
        "BackoffPolicy:\n\n    class Patient(BackoffPolicy):\n        base_delay_ms = 250\n"
        "        jitter = (0.8, 1.25)\n\nEigenvalue-like re-initialization isn't thread-safe.",
        "Is asyncio.wait_for() an alternative for the HTTP/2 multiplexer?",
    ),
)
"""Conversations (user, assistant, user) of names and figures, and of code; prose takes less."""


def fitting(
    tokenizer: Any, template_kwargs: Mapping[str, Any], positions: int, system: str | None
) -> int:
    """How many of LlamaIndex's tokens fit a model's positions behind an instruction, at least 1."""
    count = get_tokenizer()

    def tokens(texts: Sequence[str], instruction: str | None = None) -> int:
        messages = [{"role": "system", "content": instruction}] if instruction else []
        roles = ("user", "assistant", "user")
        messages += [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
        written = "\n\n".join(f"{each['role']}: {each['content']}" for each in messages)
        if getattr(tokenizer, "chat_template", None):
            with suppress(TemplateError):  # one that knows no system message, for example
                written = tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **template_kwargs
                )
        return len(tokenizer(written, add_special_tokens=False)["input_ids"])

    fixed = tokens(["."])
    ratios = [
        (tokens(texts) - fixed) / sum(len(count(text)) for text in texts) for texts in SAMPLES
    ]
    return max(1, int((positions - tokens(["."], system)) / max(1.0, *ratios)))
