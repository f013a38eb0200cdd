"""LangChain messages as the engine's conversation, with the documents that they bring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from langchain_rag_windows.documents import Route, as_passage, as_passages, is_document_list
from langchain_rag_windows.documents import only_route as one_of
from langchain_rag_windows.errors import RequestError
from langchain_rag_windows.sentinels import unmark
from langchain_rag_windows.tools import call_message, result_message
from rag_windows import Passage

_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant"}
_SHOWN = ("text",)
_SILENT = ("reasoning", "thinking", "tool_call", "tool_call_chunk", "tool_use", "invalid_tool_call")
"""Blocks of an earlier answer that the template writes itself, or that are not shown again."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the engine is asked.

    Attributes:
        messages: mappings with ``role`` and ``content``; calls and results of tools as the chat
            template takes them.
        passages: the documents, whichever way they came.
    """

    messages: list[dict[str, Any]]
    passages: tuple[Passage, ...]


class _Reader:
    """Reads messages one by one."""

    def __init__(self, hidden: frozenset[str]) -> None:
        self._hidden = hidden
        self.messages: list[dict[str, Any]] = []
        self.blocks: list[Passage] = []
        self.artifacts: list[Passage] = []
        self.marked: list[Passage] = []

    def add(self, role: str, content: str) -> None:
        """Append a turn; one that continues the same role joins it, many templates want that."""
        last = self.messages[-1] if self.messages else None
        if last is not None and last.keys() == {"role", "content"} and last["role"] == role:
            last["content"] = "\n\n".join(part for part in (last["content"], content) if part)
        else:
            self.messages.append({"role": role, "content": content})

    def read(self, message: BaseMessage) -> None:
        if isinstance(message, AIMessage):
            self._answer(message)
        elif isinstance(message, ToolMessage):
            self._result(message)
        else:
            role = _role(message)
            unmarked = unmark(self._text(message, role))
            self.marked += unmarked.passages
            blank = not unmarked.text.strip()
            if not (blank and (unmarked.passages or self._brought(message))):
                self.add(role, unmarked.text)

    def _brought(self, message: BaseMessage) -> bool:
        return any(_kind(block) == "text-plain" for block in _blocks(message))

    def _answer(self, message: AIMessage) -> None:
        text = self._text(message, "assistant")
        if not message.tool_calls:
            self.add("assistant", text)
        elif not all(call["id"] in self._hidden for call in message.tool_calls):
            self.messages.append(call_message(message))

    def _result(self, message: ToolMessage) -> None:
        text = self._text(message, "tool")
        if is_document_list(message.artifact):
            found = [as_passage(document) for document in message.artifact]
            self.artifacts += found
        else:
            unmarked = unmark(text)
            found = list(unmarked.passages)
            self.marked += found
            text = unmarked.text
        if found:
            text = f"{len(found)} documents; they stand at the beginning of this conversation."
        if message.tool_call_id not in self._hidden:
            self.messages.append(result_message(message, text))

    def _text(self, message: BaseMessage, role: str) -> str:
        texts = []
        for block in _blocks(message):
            kind = _kind(block)
            if isinstance(block, str):
                texts.append(block)
            elif kind in _SHOWN:
                texts.append(str(block.get("text", "")))
            elif kind == "text-plain" and role == "user":
                self.blocks.append(_plain_text(block))
            elif not (kind in _SILENT and role == "assistant"):
                raise RequestError(
                    f"A {message.type} message holds a block of type {kind!r}, which this model "
                    "can't read. Give text blocks, and documents as text-plain blocks of a human "
                    "message or in documents=."
                )
        return "".join(texts)


def conversation(
    messages: Sequence[BaseMessage], documents: object = None, *, tools: bool = False
) -> Conversation:
    """Read messages, and find the documents.

    Documents come with ``documents``, as text-plain blocks of human messages, as the artifact of
    tool messages, or marked by a `WindowDocumentPrompt` in the text of any message but an answer;
    only one of these ways may bring any. Messages of one role that follow each other are joined
    with a blank line between them.

    Args:
        messages: of LangChain.
        documents: of the call.
        tools: whether tools are bound. If not, a call whose results are all documents is left out
            with them: the model sees the documents and the question, in any chat template.

    Raises:
        RequestError: a role or block that can't be read, or several ways that bring documents.
    """
    given = list(messages)
    reader = _Reader(frozenset() if tools else _hidden_calls(given))
    for message in given:
        reader.read(message)
    passages = one_of(
        [
            Route("documents=", as_passages(documents)),
            Route("text-plain blocks", tuple(reader.blocks)),
            Route("artifacts of tool messages", tuple(reader.artifacts)),
            Route("marked text", tuple(reader.marked)),
        ]
    )
    return Conversation(reader.messages, passages)


def _hidden_calls(messages: Sequence[BaseMessage]) -> frozenset[str]:
    """Ids of the calls that brought documents and nothing else, together with their neighbours."""
    found = {
        message.tool_call_id
        for message in messages
        if isinstance(message, ToolMessage)
        and (is_document_list(message.artifact) or unmark(str(message.text)).passages)
    }
    for message in messages:
        if isinstance(message, AIMessage):
            ids = {str(call["id"]) for call in message.tool_calls}
            if not ids <= found:
                found -= ids
    return frozenset(found)


def _role(message: BaseMessage) -> str:
    if isinstance(message, SystemMessage):
        return "system"
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, ChatMessage) and message.role in _ROLES:
        return _ROLES[message.role]
    raise RequestError(
        f"A {message.type} message can't be read; use system, human, AI and tool messages."
    )


def _blocks(message: BaseMessage) -> list[Any]:
    content = message.content
    return [content] if isinstance(content, str) else list(content)


def _kind(block: object) -> str:
    return str(block.get("type")) if isinstance(block, Mapping) else "text"


def _plain_text(block: Mapping[str, Any]) -> Passage:
    text = block.get("text")
    if not isinstance(text, str):
        raise RequestError(
            "A text-plain block must hold its text; base64, url and file_id are not fetched. Read "
            "the file and give its text."
        )
    metadata = dict(block.get("extras") or {})
    if block.get("context") is not None:
        metadata.setdefault("context", block["context"])
    mapping = {"text": text, "id": block.get("id"), "title": block.get("title")}
    return as_passage({**mapping, "metadata": metadata})
