"""Messages and documents of LangChain as a conversation with passages.

Documents come by ``documents=``, as blocks of messages, as artifacts of tools, or as marked text:
A stock chain formats each document with a ``document_prompt`` and joins the results into one
string. `WindowDocumentPrompt` writes a head before each text:

    BEGIN head CLOSE text END        head: a keyed digest and {"n": length of the text, ...}

in private-use characters, which survive ``.strip()`` and no tokenizer is asked for. The text stands
there as it is. It can hold anything, copies of marks included: its length says where it ends, and
nothing inside is looked at. What stands outside of documents can't make one up either: the digest
is keyed with a secret of this process and covers length, metadata and text.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.prompts import StringPromptTemplate
from pydantic import Field

from langchain_rag_windows.errors import RequestError, in_langchain_terms
from rag_windows import Passage
from rag_windows.integration import passage_of

DocumentLike = Document | Passage | str | Mapping[str, Any]
"""What ``documents=`` takes; a mapping is read as `rag_windows.Passage.of` reads it."""


def as_passage(document: DocumentLike) -> Passage:
    """A document with its id, title, score and metadata.

    The title is ``metadata["title"]``, the score ``metadata["relevance_score"]`` or ``["score"]``.

    Raises:
        RequestError: it is no document.
    """
    with in_langchain_terms():
        return passage_of(document)


def as_passages(documents: object) -> tuple[Passage, ...]:
    """The passages of a list of documents; None and an empty list are none.

    Raises:
        RequestError: it is no list, or holds something that is no document.
    """
    if documents is None:
        return ()
    if isinstance(documents, str | Mapping) or not isinstance(documents, Sequence):
        raise RequestError(
            f"documents must be a list of Documents, mappings or strings, not "
            f"{type(documents).__name__}."
        )
    return tuple(as_passage(document) for document in documents)


def is_document_list(value: object) -> bool:
    """Whether a tool's artifact is a non-empty list of Documents."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(entry, Document | Passage) for entry in value)
    )


# Documents marked in text

_BEGIN = "\ue0f1\ue0f2\ue0f1"
_CLOSE = "\ue0f3"
_END = "\ue0f4\ue0f2\ue0f4"
_FIRST_BYTE = 0xE100
_HEAD = re.compile(f"{_BEGIN}([\ue100-\ue1ff]*){_CLOSE}")
_DIGEST = 16
_KEY = secrets.token_bytes(32)


class WindowDocumentPrompt(StringPromptTemplate):
    """A ``document_prompt`` for stock chains and retriever tools: each document stays a document.

    LangChain shows a document prompt the text and the metadata that it names, never a document's
    own id; so name in ``keys`` what shall come along ("title" is shown to the model, "id" is used
    in citations). Every document must have them. `create_windows_chain` needs no such list.

    Attributes:
        keys: names of metadata.
    """

    input_variables: list[str] = Field(default_factory=lambda: ["page_content"])
    keys: tuple[str, ...] = ()

    def __init__(self, *keys: str, **fields: Any) -> None:
        names = keys or tuple(fields.get("keys", ()))
        super().__init__(**{**fields, "keys": names, "input_variables": ["page_content", *names]})

    @property
    def _prompt_type(self) -> str:
        return "rag-windows-document"

    def format(self, **kwargs: Any) -> str:
        """The marked text of one document."""
        return mark(kwargs["page_content"], {key: kwargs[key] for key in self.keys})


def mark(text: str, metadata: Mapping[str, Any]) -> str:
    """A text with its head and end.

    Args:
        text: any text; it stands in the result as it is.
        metadata: values that JSON can hold; others are turned into strings.
    """
    head = {"n": len(text), "m": dict(metadata)}
    data = json.dumps(head, default=str, sort_keys=True, separators=(",", ":")).encode()
    shown = "".join(chr(_FIRST_BYTE + byte) for byte in _digest(data, text) + data)
    return f"{_BEGIN}{shown}{_CLOSE}{text}{_END}"


def unmark(text: str) -> tuple[str, tuple[Passage, ...]]:
    """Take marked documents out of a text.

    What stands between two documents goes with them if it holds no letter or digit: it separated
    them. All other text stays, without the white space around the documents and with a blank line
    in the place of those in the middle.

    Returns:
        The text without them, and the documents.

    Raises:
        RequestError: a mark that this process has not made, or a document that was changed since.
    """
    passages: list[Passage] = []
    kept: list[str] = []
    at = 0
    while (found := _HEAD.search(text, at)) is not None:
        between = text[at : found.start()].rstrip()
        kept.append(between.lstrip() if passages else between)
        passage, at = _read(text, found)
        passages.append(passage)
    kept.append(text[at:].lstrip() if passages else text)
    separators = kept[1:-1]
    shown = [kept[0], *(part for part in separators if re.search(r"\w", part)), kept[-1]]
    rest = "\n\n".join(part for part in shown if part) if passages else text
    if _BEGIN in rest or _END in rest:
        raise _broken()
    return rest, tuple(passages)


def _read(text: str, found: re.Match[str]) -> tuple[Passage, int]:
    data = bytes(ord(character) - _FIRST_BYTE for character in found[1])
    digest, data = data[:_DIGEST], data[_DIGEST:]
    # Nothing of the head is believed before the digest is right, but the length is needed for it.
    length = re.search(rb'"n":(\d{1,12})\}$', data)
    end = found.end() + (int(length[1]) if length else 0)
    content = text[found.end() : end]
    whole = length is not None and text.startswith(_END, end)
    if not whole or not hmac.compare_digest(digest, _digest(data, content)):
        raise _broken()
    document = Document(page_content=content, metadata=json.loads(data)["m"])
    return as_passage(document), end + len(_END)


def _broken() -> RequestError:
    return RequestError(
        "A document mark in this prompt is broken: it was made in another process, its text was "
        "cut or changed after the document prompt (a mustache template must use three braces), or "
        "somebody tries to forge a document. Format and ask in one process, and leave the "
        "formatted documents as they are."
    )


def _digest(data: bytes, text: str) -> bytes:
    covered = data + b"\0" + text.encode("utf-8", "surrogatepass")
    return hmac.new(_KEY, covered, hashlib.sha256).digest()[:_DIGEST]


# Messages

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
            text, marked = unmark(self._text(message, role))
            self.marked += marked
            brought = marked or any(_kind(block) == "text-plain" for block in _blocks(message))
            if text.strip() or not brought:
                self.add(role, text)

    def _answer(self, message: AIMessage) -> None:
        text = self._text(message, "assistant")
        if not message.tool_calls:
            self.add("assistant", text)
        elif not all(call["id"] in self._hidden for call in message.tool_calls):
            self.messages.append(_call_message(message))

    def _result(self, message: ToolMessage) -> None:
        text = self._text(message, "tool")
        if is_document_list(message.artifact):
            found = [as_passage(document) for document in message.artifact]
            self.artifacts += found
        else:
            text, marked = unmark(text)
            found = list(marked)
            self.marked += found
        if found:
            text = f"{len(found)} documents; they stand at the beginning of this conversation."
        if message.tool_call_id not in self._hidden:
            self.messages.append(_result_message(message, text))

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
    ways = {
        "documents=": as_passages(documents),
        "text-plain blocks": tuple(reader.blocks),
        "artifacts of tool messages": tuple(reader.artifacts),
        "marked text": tuple(reader.marked),
    }
    used = {name: passages for name, passages in ways.items() if passages}
    if len(used) > 1:
        names = " and ".join(f"{name} ({len(passages)})" for name, passages in used.items())
        raise RequestError(
            f"Documents come in several ways at once: {names}. Use one of them in a request, or "
            "put all documents into one list for documents=."
        )
    return Conversation(reader.messages, next(iter(used.values()), ()))


def _hidden_calls(messages: Sequence[BaseMessage]) -> frozenset[str]:
    """Ids of the calls that brought documents and nothing else, together with their neighbours."""
    found = {
        message.tool_call_id
        for message in messages
        if isinstance(message, ToolMessage)
        and (is_document_list(message.artifact) or unmark(str(message.text))[1])
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


def _call_message(message: AIMessage) -> dict[str, Any]:
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


def _result_message(message: ToolMessage, content: str) -> dict[str, Any]:
    """What a tool gave back, as the engine's message, with this content."""
    made = {"role": "tool", "content": content, "tool_call_id": message.tool_call_id}
    return {**made, "name": message.name} if message.name else made
