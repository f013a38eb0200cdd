"""One call of the LLM, read into what the engine takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.llms.types import ChatMessage

from llama_index.llms.rag_windows.blocks import read_messages
from llama_index.llms.rag_windows.parts import Parts, WindowedPrompt
from llama_index.llms.rag_windows.passages import passages_of_nodes
from rag_windows import Passage
from rag_windows.errors import GenerationError, InputError
from rag_windows.integration import AnswerReader, Conversation


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, over what, and how.

    Attributes:
        query: the conversation, with the tools that the model may call.
        passages: each read in a window of its own.
        options: further arguments of `WindowedLM.generate`.
        reader: of the answer; finds calls of tools.
        parallel: whether an answer may call several tools; else its first call counts.
    """

    query: Conversation
    passages: list[Passage]
    options: dict[str, Any] = field(default_factory=dict)
    reader: AnswerReader = field(default_factory=AnswerReader)
    parallel: bool = True


def read_chat(
    messages: Sequence[ChatMessage],
    system: str | None,
    options: Mapping[str, Any],
    reader: AnswerReader | None = None,
) -> Question:
    """A chat call.

    Args:
        messages: may hold passages as citable blocks.
        system: the instruction, where ``messages`` begin with none.
        options: of the call; ``passages`` or ``nodes`` among them are the other ways to give
            passages. Only one way can be used in a call.
        reader: of the answer, with the tools of the call; None without tools.

    Raises:
        InputError: passages by two ways, or what can't be shown to a text model.
    """
    read, in_blocks = read_messages(messages)
    if system and (not read or read[0]["role"] != "system"):
        read.insert(0, {"role": "system", "content": system})
    return _question(read, in_blocks, options, reader or AnswerReader())


def read_prompt(prompt: str, system: str | None, options: Mapping[str, Any]) -> Question:
    """A completion call: the prompt is the question; else as `read_chat`.

    Raises:
        InputError: as there, or the prompt is no string or holds nothing but passages.
    """
    if isinstance(prompt, WindowedPrompt):
        return read_chat(prompt.messages, system, options)
    if isinstance(prompt, Parts):
        raise InputError(
            "The prompt is passages without a question; give the question as the prompt and the "
            "passages as passages=prompt.passages."
        )
    if not isinstance(prompt, str):
        raise InputError(f"The prompt must be a string, not {type(prompt).__name__}.")
    messages = [{"role": "system", "content": system}] if system else []
    asked = [*messages, {"role": "user", "content": prompt}]
    return _question(asked, [], options, AnswerReader())


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


def _question(
    messages: Sequence[Mapping[str, Any]],
    in_blocks: list[Passage],
    options: Mapping[str, Any],
    reader: AnswerReader,
) -> Question:
    query, rest = reader.query(messages), dict(options)
    parallel = bool(rest.pop("parallel_tool_calls", True))
    passages, nodes = rest.pop("passages", None), rest.pop("nodes", None)
    ways = {"citable blocks": in_blocks, "passages=": passages, "nodes=": nodes}
    used = [name for name, given in ways.items() if given is not None and len(given)]
    if len(used) > 1:
        raise InputError(f"Passages come by {' and by '.join(used)}; give all of them one way.")
    if nodes is not None and len(nodes):
        return Question(query, passages_of_nodes(nodes), rest, reader, parallel)
    if passages is not None and len(passages):
        if isinstance(passages, str | Passage | Mapping) and not isinstance(passages, Parts):
            raise InputError("passages must be a list, not a single passage; wrap it in [].")
        given = passages.passages if isinstance(passages, Parts) else passages
        kept = [Passage.of(passage) for passage in given]
        return Question(query, kept, rest, reader, parallel)
    return Question(query, in_blocks, rest, reader, parallel)
