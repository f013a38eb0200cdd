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
from rag_windows.integration import call_entry, one_way, passage_list, passage_of

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
    """A text with its head and end; of its metadata, what JSON can't hold becomes a string."""
    head = {"n": len(text), "m": dict(metadata)}
    data = json.dumps(head, default=str, sort_keys=True, separators=(",", ":")).encode()
    shown = "".join(chr(_FIRST_BYTE + byte) for byte in _digest(data, text) + data)
    return f"{_BEGIN}{shown}{_CLOSE}{text}{_END}"


def unmark(text: str) -> tuple[str, list[Passage]]:
    """A text without its marked documents, and these.

    What stands between two of them and holds no letter or digit goes as well: it separated them.

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
    rest = text
    if passages:
        words = [part for part in kept[1:] if re.search(r"\w", part)]
        rest = "\n\n".join(part for part in (kept[0], *words, text[at:].lstrip()) if part)
    if _BEGIN in rest or _END in rest:
        raise _broken()
    return rest, passages


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
    return passage_of(document), end + len(_END)


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
_SILENT = ("reasoning", "thinking", "tool_call", "tool_call_chunk", "tool_use", "invalid_tool_call")
"""Blocks of an earlier answer that the template writes itself, or that are not shown again."""


def conversation(
    messages: Sequence[BaseMessage], documents: object = None, *, tools: bool = False
) -> tuple[list[dict[str, Any]], list[Passage]]:
    """Messages as `WindowedLM.generate` takes them, and the documents, which come in one way.

    Messages of one role that follow each other are joined with a blank line between them, many
    templates want that.

    Where no ``tools`` are bound, a call whose results are all documents is left out with them: the
    model sees the documents and the question, in any chat template.

    Raises:
        RequestError: a role or block that can't be read, or several ways that bring documents.
    """
    hidden = set() if tools else _hidden_calls(messages)
    read: list[dict[str, Any]] = []
    blocks: list[Passage] = []
    artifacts: list[Passage] = []
    marked: list[Passage] = []
    for message in messages:
        role, before = _role(message), len(blocks)
        text = _text(message, role, blocks)
        said: dict[str, Any] = {"role": role, "content": text}
        if isinstance(message, ToolMessage):
            found = _artifact(message)
            artifacts += found
            if not found:
                said["content"], found = unmark(text)
                marked += found
            if found:
                told = f"{len(found)} documents; they stand at the beginning of this conversation."
                said["content"] = told
            if message.tool_call_id not in hidden:
                name = {"name": message.name} if message.name else {}
                read.append({**said, "tool_call_id": message.tool_call_id, **name})
            continue
        if isinstance(message, AIMessage) and message.tool_calls:
            if not hidden.issuperset(str(call["id"]) for call in message.tool_calls):
                calls = [
                    call_entry(one["name"], one["args"], one["id"]) for one in message.tool_calls
                ]
                read.append({**said, "tool_calls": calls})
            continue
        if role != "assistant":
            said["content"], found = unmark(text)
            marked += found
            if not said["content"].strip() and (found or len(blocks) > before):
                continue
        if read and read[-1].keys() == said.keys() and read[-1]["role"] == role:
            both = (read.pop()["content"], said["content"])
            said["content"] = "\n\n".join(part for part in both if part)
        read.append(said)
    with in_langchain_terms():
        passages = one_way(
            {
                "documents=": passage_list("documents", documents),
                "text-plain blocks": blocks,
                "artifacts of tool messages": artifacts,
                "marked text": marked,
            }
        )
    return read, passages


def _hidden_calls(messages: Sequence[BaseMessage]) -> set[str]:
    """Ids of the calls that brought documents and nothing else, together with their neighbours."""
    found = {
        message.tool_call_id
        for message in messages
        if isinstance(message, ToolMessage) and (_artifact(message) or unmark(str(message.text))[1])
    }
    for message in messages:
        if isinstance(message, AIMessage):
            ids = {str(call["id"]) for call in message.tool_calls}
            if not ids <= found:
                found -= ids
    return found


def _artifact(message: ToolMessage) -> list[Passage]:
    """The documents that a tool gave back, if its artifact is a list of them."""
    given = message.artifact
    if not isinstance(given, list | tuple):
        return []
    if not all(isinstance(entry, Document | Passage) for entry in given):
        return []
    return passage_list("artifact", given)


def _role(message: BaseMessage) -> str:
    kinds = {SystemMessage: "system", HumanMessage: "user", AIMessage: "assistant"}
    for kind, role in {**kinds, ToolMessage: "tool"}.items():
        if isinstance(message, kind):
            return role
    if isinstance(message, ChatMessage) and message.role in _ROLES:
        return _ROLES[message.role]
    raise RequestError(
        f"A {message.type} message can't be read; use system, human, AI and tool messages."
    )


def _text(message: BaseMessage, role: str, passages: list[Passage]) -> str:
    """What a message says; its documents are added to the passages."""
    content = message.content
    texts = []
    for block in [content] if isinstance(content, str) else content:
        kind = block.get("type") if isinstance(block, dict) else "text"
        if isinstance(block, str):
            texts.append(block)
        elif kind == "text":
            texts.append(str(block.get("text", "")))
        elif kind == "text-plain" and role == "user":
            passages.append(_plain_text(block))
        elif not (kind in _SILENT and role == "assistant"):
            raise RequestError(
                f"A {message.type} message holds a block of type {kind!r}, which this model "
                "can't read. Give text blocks, and documents as text-plain blocks of a human "
                "message or in documents=."
            )
    return "".join(texts)


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
    with in_langchain_terms():
        return passage_of({**mapping, "metadata": metadata})
