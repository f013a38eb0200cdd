"""What goes between LlamaIndex and the engine: messages, nodes and tools in, answers out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CitableBlock,
    CitationBlock,
    ContentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.schema import BaseNode, NodeWithScore
from llama_index.core.tools.types import BaseTool

from llama_index.llms.rag_windows.templates import Parts, WindowedPrompt
from rag_windows import Citation, Generation, Passage
from rag_windows.errors import GenerationError, InputError
from rag_windows.integration import AnswerReader, Conversation, ToolAnswer, carried, passage_of

BROKEN = "broken_calls"
"""Key in ``raw``: calls that can't be read, each with its ``text`` and the ``error``."""

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}
"""LlamaIndex's roles -> those of a chat template."""

_UNSHOWN = (CitationBlock, ThinkingBlock, CachePoint, ToolCallBlock)
"""What an earlier answer carries beside its text; calls of tools are read apart from it, and the
rest is not shown to the model again."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a call of the LLM asks.

    Attributes:
        query: the conversation, with the tools that the model may call.
        passages: each read in a window of its own.
        options: further arguments of `WindowedLM.generate`.
        reader: of the answer; finds calls of tools.
        parallel: whether an answer may call several tools; else its first call counts.
    """

    query: Conversation
    passages: list[Passage]
    options: dict[str, Any]
    reader: AnswerReader
    parallel: bool = True


@contextmanager
def surfacing() -> Iterator[None]:
    """Makes an error one that LlamaIndex's synthesizers don't swallow.

    They take ``ValueError`` and ``TypeError`` for an answer that could not be parsed, and go on
    with "Empty Response"; transformers raises them for an unknown option, for one.

    Raises:
        GenerationError: instead of those.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        raise GenerationError(f"The model can't answer this call: {error}") from error


def read_chat(
    messages: Sequence[ChatMessage],
    system: str | None,
    options: Mapping[str, Any],
    reader: AnswerReader,
) -> Question:
    """A chat call.

    Args:
        messages: may hold passages as citable blocks.
        system: the instruction, where ``messages`` begin with none.
        options: of the call; ``passages`` or ``nodes`` among them are the other ways to give
            passages. Only one way can be used in a call.
        reader: of the answer, with the tools of the call.

    Raises:
        InputError: passages by two ways, or what can't be shown to a text model.
    """
    read, in_blocks = read_messages(messages)
    if system and (not read or read[0]["role"] != "system"):
        read.insert(0, {"role": "system", "content": system})
    query, rest = reader.query(read), dict(options)
    parallel = bool(rest.pop("parallel_tool_calls", True))
    passages = _passages(in_blocks, rest.pop("passages", None), rest.pop("nodes", None))
    grammar = reader.grammar()
    if grammar is not None and not rest.keys() & {"grammar", "json_schema"}:
        rest["grammar"] = grammar
    return Question(query, passages, rest, reader, parallel)


def read_prompt(prompt: str, system: str | None, options: Mapping[str, Any]) -> Question:
    """A completion call: the prompt is the question; else as `read_chat`.

    Raises:
        InputError: as there, or the prompt is no string or holds nothing but passages.
    """
    if isinstance(prompt, WindowedPrompt):
        return read_chat(prompt.messages, system, options, AnswerReader())
    if isinstance(prompt, Parts):
        raise InputError(
            "The prompt is passages without a question; give the question as the prompt and the "
            "passages as passages=prompt.passages."
        )
    if not isinstance(prompt, str):
        raise InputError(f"The prompt must be a string, not {type(prompt).__name__}.")
    asked = [ChatMessage(role=MessageRole.USER, content=prompt)]
    return read_chat(asked, system, options, AnswerReader())


def read_messages(messages: Iterable[ChatMessage]) -> tuple[list[dict[str, Any]], list[Passage]]:
    """What the engine takes, from what LlamaIndex gives.

    Args:
        messages: leading system messages are joined to one; each citable block, in whatever
            message, becomes a passage.

    Returns:
        Messages as `WindowedLM.generate` takes them, and the passages in order.

    Raises:
        InputError: a role or a block that a text model can't be shown.
    """
    read: list[dict[str, Any]] = []
    passages: list[Passage] = []
    for index, message in enumerate(messages):
        if message.role not in _ROLES:
            raise InputError(
                f"Message {index} has the role {message.role.value!r}, which this model does not "
                "know; give the text as the user's message."
            )
        role, before = _ROLES[message.role], len(passages)
        content = "\n".join(_texts(message, index, passages))
        if role == "system" and len(read) == 1 and read[0]["role"] == "system":
            both = (read[0]["content"], content)
            read[0]["content"] = "\n\n".join(text for text in both if text)
            continue
        brought = len(passages) - before
        if role == "tool" and brought and not content:
            content = f"{brought} passages; they stand at the beginning of this conversation."
        said: dict[str, Any] = {"role": role, "content": content}
        if role == "assistant" and (calls := _calls_of(message)):
            said["tool_calls"] = calls
        if role == "tool":
            known = message.additional_kwargs
            said |= {key: known[key] for key in ("tool_call_id", "name") if known.get(key)}
        read.append(said)
    return read, passages


def _texts(message: ChatMessage, index: int, passages: list[Passage]) -> Iterator[str]:
    for block in message.blocks:
        if isinstance(block, TextBlock):
            yield block.text
        elif isinstance(block, CitableBlock):
            passages.append(_passage_of_block(block))
        elif not isinstance(block, _UNSHOWN):
            raise InputError(
                f"Message {index} holds a {type(block).__name__}; this model reads text and "
                "citable blocks only. Give its text as a TextBlock, or as a CitableBlock to read "
                "it as a passage."
            )


def _calls_of(message: ChatMessage) -> list[dict[str, Any]]:
    return [
        {
            "id": block.tool_call_id or None,
            "type": "function",
            "function": {"name": block.tool_name, "arguments": block.tool_kwargs},
        }
        for block in message.blocks
        if isinstance(block, ToolCallBlock)
    ]


def _passages(in_blocks: list[Passage], passages: Any, nodes: Any) -> list[Passage]:
    """The passages of a call, which come one way."""
    ways = {"citable blocks": in_blocks, "passages=": passages, "nodes=": nodes}
    used = [name for name, given in ways.items() if given is not None and len(given)]
    if len(used) > 1:
        raise InputError(f"Passages come by {' and by '.join(used)}; give all of them one way.")
    if used == ["nodes="]:
        if isinstance(nodes, str | NodeWithScore | BaseNode):
            raise InputError("nodes must be a list of nodes, not a single one; wrap it in [].")
        return [passage_of_node(node) for node in nodes]
    if used == ["passages="]:
        if isinstance(passages, Parts):
            return list(passages.passages)
        if isinstance(passages, str | Passage | Mapping):
            raise InputError("passages must be a list, not a single passage; wrap it in [].")
        return [Passage.of(passage) for passage in passages]
    return in_blocks


def passage_of_node(node: NodeWithScore | BaseNode) -> Passage:
    """The passage that a node becomes; id, score and metadata are kept.

    The text is what LlamaIndex shows a model (`MetadataMode.LLM`: text with the metadata that is
    not excluded), but for a title, which becomes the passage's own and heads its window. A title
    that ``excluded_llm_metadata_keys`` names is not shown.

    Raises:
        InputError: not a node.
    """
    if not isinstance(node.node if isinstance(node, NodeWithScore) else node, BaseNode):
        raise InputError(
            f"nodes must hold NodeWithScore or nodes, not {type(node).__name__}; give texts and "
            "mappings as passages= instead."
        )
    return passage_of(node)


def _passage_of_block(block: CitableBlock) -> Passage:
    """The passage that a citable block becomes: ``source`` is its id, ``title`` its title."""
    texts = []
    for part in block.content:
        if not isinstance(part, TextBlock):
            raise InputError(
                f"The citable block {block.title!r} holds a {type(part).__name__}; this model "
                "reads text only. Give its text as a TextBlock."
            )
        texts.append(part.text)
    return Passage(text="\n".join(texts), id=block.source or None, title=block.title or None)


def tool_definitions(tools: Iterable[BaseTool | Mapping[str, Any]]) -> list[Mapping[str, Any]]:
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


def tool_selections(response: ChatResponse, *, required: bool) -> list[ToolSelection]:
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


def shown(answer: ToolAnswer, *, parallel: bool) -> ToolAnswer:
    """An answer as it is shown: a call that can't be read stands in its text.

    Args:
        answer: as it was read.
        parallel: whether several calls count, or the first one only.
    """
    text = "\n".join(part for part in (answer.text, *(one.text for one in answer.broken)) if part)
    return replace(answer, text=text, calls=answer.calls if parallel else answer.calls[:1])


def chat_response(
    generation: Generation, answer: ToolAnswer, passages: Sequence[Passage], raw: dict[str, Any]
) -> ChatResponse:
    """A whole answer, with citation blocks and calls of tools."""
    entries = {}
    if answer.calls:
        raw = {**raw, "finish_reason": "tool_calls"}
        # In the form of OpenAI's chat API, which LlamaIndex's programs look for.
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for call in answer.calls
        ]
        entries = {"tool_calls": calls}
    if answer.broken:
        raw = {**raw, BROKEN: [asdict(one) for one in answer.broken]}
    message = ChatMessage(
        role=MessageRole.ASSISTANT,
        blocks=_answer_blocks(answer, generation.citations, passages),
        additional_kwargs=entries,
    )
    return ChatResponse(message=message, raw=raw)


def _answer_blocks(
    answer: ToolAnswer, citations: Sequence[Citation] | None, passages: Sequence[Passage]
) -> list[ContentBlock]:
    """What an answer holds, in order.

    Its reasoning, where it was told apart; its text; a citation for each passage that carried it,
    the strongest first; calls of tools. A citation block holds the passage's text, its id as
    ``source``, its title, and its place among the passages as given as
    ``additional_location_info["passage"]``.
    """
    blocks: list[ContentBlock] = []
    if answer.reasoning:
        blocks.append(ThinkingBlock(content=answer.reasoning))
    if answer.text or not answer.calls:
        blocks.append(TextBlock(text=answer.text))
    for citation in carried(citations):
        passage = passages[citation.passage]
        blocks.append(
            CitationBlock(
                cited_content=TextBlock(text=passage.text),
                source=passage.id or "",
                title=passage.title or "",
                additional_location_info={"passage": citation.passage},
            )
        )
    for call in answer.calls:
        arguments = dict(call.arguments)
        blocks.append(
            ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=arguments)
        )
    return blocks


def as_raw(
    generation: Generation, passages: Sequence[Passage], model: str, method: Any
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
    usage, citations, fallback = generation.usage, generation.citations, generation.fallback
    titled = [{**asdict(one), "title": passages[one.passage].title} for one in citations or ()]
    return {
        "model": model,
        "method": method,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "timings": asdict(generation.timings),
        "finish_reason": generation.finish_reason,
        "citations": None if citations is None else titled,
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
        "fallback": None if fallback is None else fallback.as_dict(),
        "alternatives": [other.text for other in generation.alternatives],
    }
