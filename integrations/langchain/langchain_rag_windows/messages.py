"""Messages and documents of LangChain as a conversation with passages, and answers as messages.

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
from typing import Any, cast

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ChatMessage, ToolMessage
from langchain_core.messages import content as types
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.block_translators import register_translator
from langchain_core.messages.tool import invalid_tool_call, tool_call
from langchain_core.prompts import StringPromptTemplate
from pydantic_core import to_json

from langchain_rag_windows.errors import RequestError, in_langchain_terms
from rag_windows import Generation, Passage
from rag_windows.integration import (
    ModelCall,
    Transcript,
    answer_record,
    call_entry,
    carried,
    describe,
    logprob_content,
    one_way,
    passage_list,
    passage_of,
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
    """A text with its head and end; metadata that JSON can't hold become strings."""
    head = {"n": len(text), "m": dict(metadata)}
    data = json.dumps(head, default=str, sort_keys=True, separators=(",", ":")).encode()
    shown = "".join(chr(_FIRST_BYTE + byte) for byte in _digest(data, text) + data)
    return f"{_BEGIN}{shown}{_CLOSE}{text}{_END}"


def unmark(text: str) -> tuple[str, list[Passage]]:
    """A text without its marked documents, and these.

    What stands between two of them and holds no letter or digit goes as well: it separated them.
    A mark that this process has not made, or a document that was changed since, is refused.
    """
    passages: list[Passage] = []
    outside: list[str] = []
    at = 0
    while (found := _HEAD.search(text, at)) and (read := _read(text, found)):
        between = text[at : found.start()].rstrip()
        outside.append(between.lstrip() if passages else between)
        passage, at = read
        passages.append(passage)
    rest = text
    if passages:
        words = [part for part in outside[1:] if re.search(r"\w", part)]
        rest = "\n\n".join(part for part in (outside[0], *words, text[at:].lstrip()) if part)
    if _BEGIN in rest or _END in rest:
        raise RequestError(
            "A document marker in this prompt is broken. It was made in another process, or its "
            "text was cut or changed after the document prompt (a mustache template must use "
            "three braces), or somebody tries to forge a document. Format and ask in one "
            "process, and leave formatted documents unchanged."
        )
    return rest, passages


def _read(text: str, found: re.Match[str]) -> tuple[Passage, int] | None:
    """The document at a mark, and where it ends; None if the mark is not ours."""
    data = bytes(ord(character) - _FIRST_BYTE for character in found[1])
    digest, data = data[:_DIGEST], data[_DIGEST:]
    # Nothing of the head is believed before the digest is right, but the length is needed for it.
    length = re.search(rb'"n":(\d{1,12})\}$', data)
    end = found.end() + (int(length[1]) if length else 0)
    content = text[found.end() : end]
    whole = length is not None and text.startswith(_END, end)
    if not whole or not hmac.compare_digest(digest, _digest(data, content)):
        return None
    document = Document(page_content=content, metadata=json.loads(data)["m"])
    return passage_of(document), end + len(_END)


def _digest(data: bytes, text: str) -> bytes:
    covered = data + b"\0" + text.encode("utf-8", "surrogatepass")
    return hmac.new(_KEY, covered, hashlib.sha256).digest()[:_DIGEST]


# Messages

_ROLES = {"human": "user", "ai": "assistant"}
_ROLES |= {role: role for role in ("system", "user", "assistant", "tool")}
_SILENT = ("reasoning", "thinking", "tool_call", "tool_call_chunk", "tool_use", "invalid_tool_call")
"""Blocks of an earlier answer that the template writes itself, or that are not shown again."""


def conversation(
    messages: Sequence[BaseMessage], documents: object = None, *, tools: bool = False
) -> tuple[list[dict[str, Any]], list[Passage]]:
    """Messages as `WindowedLM.generate` takes them, and the documents, which come in one way.

    See `rag_windows.integration.Transcript`; ``tools`` says whether any are bound.
    """
    transcript = Transcript()
    for message in messages:
        role, before = _role(message), transcript.count()
        text = _text(message, role, transcript)
        if role != "assistant":  # which may repeat what it was shown
            found, way = _artifact(message), "artifacts of tool messages"
            if not found:
                text, found = unmark(text)
                way = "marked text"
            transcript.bring(way, found)
        call_id = name = None
        if isinstance(message, ToolMessage):
            call_id, name = message.tool_call_id, message.name or None
            text = "" if transcript.count() > before else text
        made = message.tool_calls if isinstance(message, AIMessage) else ()
        transcript.add(
            role,
            text,
            brought=transcript.count() - before,
            calls=[call_entry(one["name"], one["args"], one["id"]) for one in made],
            call_id=call_id,
            name=name,
        )
    with in_langchain_terms():
        given = {"documents=": passage_list("documents", documents)}
        passages = one_way({**given, **transcript.ways})
    return transcript.conversation(tools=tools), passages


def _artifact(message: BaseMessage) -> list[Passage]:
    """The documents that a tool gave back, if its artifact is a list of them."""
    given = message.artifact if isinstance(message, ToolMessage) else None
    if not isinstance(given, list | tuple):
        return []
    whole = all(isinstance(entry, Document | Passage) for entry in given)
    return passage_list("artifact", given) if whole else []


def _role(message: BaseMessage) -> str:
    kind = message.role if isinstance(message, ChatMessage) else message.type
    role = _ROLES.get(kind.removesuffix("MessageChunk").lower())
    if role is None:
        raise RequestError(
            f"A {message.type} message can't be read. Use system, human, AI and tool messages."
        )
    return role


def _text(message: BaseMessage, role: str, transcript: Transcript) -> str:
    """What a message says; the documents in its blocks are added to the transcript."""
    texts = []
    for block in [message.content] if isinstance(message.content, str) else message.content:
        kind = block.get("type") if isinstance(block, dict) else "text"
        if isinstance(block, str):
            texts.append(block)
        elif kind == "text":
            texts.append(str(block.get("text", "")))
        elif kind == "text-plain" and role == "user":
            transcript.bring("text-plain blocks", [_plain_text(block)])
        elif not (kind in _SILENT and role == "assistant"):
            raise RequestError(
                f"A {message.type} message holds a block of type {kind!r}, which this model "
                "can't read. Give text blocks, and documents as text-plain blocks of a human "
                "message or in documents=."
            )
    return "".join(texts)


def _plain_text(block: Mapping[str, Any]) -> Passage:
    if not isinstance(block.get("text"), str):
        raise RequestError(
            "A text-plain block must hold its text, because base64, url and file_id are not "
            "loaded. Read the file and give its text."
        )
    context = {} if block.get("context") is None else {"context": block["context"]}
    own = {name: block.get(name) for name in ("text", "id", "title")}
    with in_langchain_terms():
        return passage_of({**own, "metadata": {**context, **(block.get("extras") or {})}})


PROVIDER = "rag_windows"
"""Under this name LangChain and LangSmith know our models."""


def plain(value: object) -> Any:
    """A value as JSON holds it: arrays and tensors become lists, other objects strings."""

    def listed(inner: Any) -> Any:
        method = None if isinstance(inner, type) else getattr(inner, "tolist", None)
        return method() if callable(method) else str(inner)

    try:
        written = to_json(value, inf_nan_mode="strings", bytes_mode="base64", fallback=listed)
        return json.loads(written)
    except ValueError:  # it holds itself, or half a surrogate pair
        return str(value)


def response_metadata(call: ModelCall, generation: Generation) -> dict[str, Any]:
    """What else is known of an answer, in values that JSON holds.

    ``citations`` has one entry a document, in the order given: its place (``index``), ``id``,
    ``title`` and ``metadata``, its share of the attention (``mass``), what the answer loses without
    it (``drop`` and ``supports``, with ``citations="removal"``), and whether it carried the answer
    (``cited``, see `rag_windows.integration.carried`); those that carried it, or a sentence of it,
    come with their ``text``. The rest is as `rag_windows.integration.answer_record` has it.
    """
    passages = cast(Sequence[Passage], call.passages)
    cited = {citation.passage for citation in carried(generation.citations)}
    named = cited.union(one.passage for said in generation.statements for one in said.citations)
    entries: list[dict[str, Any]] = []
    for citation in generation.citations or ():
        passage = passages[citation.passage]
        entries.append(
            {
                "index": citation.passage,
                "id": citation.id,
                "title": passage.title,
                "metadata": {str(name): plain(value) for name, value in passage.metadata.items()},
                "mass": citation.mass,
                "drop": citation.drop,
                "supports": citation.supports,
                "cited": citation.passage in cited,
                **({"text": passage.text} if citation.passage in named else {}),
            }
        )
    metadata = {
        "model_name": call.model_name,
        "model_provider": PROVIDER,
        "method": describe(call.method),
        "length": len(generation.text),
        "citations": entries,
        "notes": [note.message for note in generation.notes],
        **answer_record(generation),
    }
    if generation.logprobs is not None:
        metadata["logprobs"] = {"content": logprob_content(generation, call.lm.tokenizer)}
    return metadata


def as_message(call: ModelCall, generation: Generation, *, streamed: bool = False) -> AIMessage:
    """An answer; where it was ``streamed``, a chunk with what was not streamed yet."""
    answer = call.reader.last(generation) if streamed else call.reader.whole(generation)
    metadata, usage = response_metadata(call, generation), generation.usage
    if answer.calls:
        metadata["finish_reason"] = "tool_calls"
    fields: dict[str, Any] = {
        "content": answer.text,
        "tool_calls": [
            tool_call(name=one.name, args=dict(one.arguments), id=one.id) for one in answer.calls
        ],
        "invalid_tool_calls": [
            invalid_tool_call(name=None, args=broken.text, id=None, error=broken.error)
            for broken in answer.broken
        ],
        "additional_kwargs": (
            {"reasoning_content": answer.reasoning} if answer.reasoning and not streamed else {}
        ),
        "usage_metadata": UsageMetadata(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
            output_token_details=OutputTokenDetails(reasoning=usage.reasoning_tokens),
        ),
        "response_metadata": metadata,
    }
    return AIMessageChunk(**fields, chunk_position="last") if streamed else AIMessage(**fields)


def translate_content(message: AIMessage) -> list[types.ContentBlock]:
    """Blocks of an answer: reasoning, the text with citations, calls of tools.

    A piece of a stream is reasoning or text; the others come whole, at its end.
    """
    if not isinstance(message.content, str):
        raise NotImplementedError  # LangChain reads lists of blocks itself
    metadata = message.response_metadata
    blocks: list[Any] = []
    ended = not isinstance(message, AIMessageChunk) or message.chunk_position == "last"
    if reasoning := message.additional_kwargs.get("reasoning_content"):
        blocks.append({"type": "reasoning", "reasoning": reasoning})
    notes = _annotations(message.content, metadata)
    if message.content or notes:
        text = {"type": "text", "text": message.content}
        blocks.append({**text, "annotations": notes} if notes else text)
    if ended:
        blocks += [{**call, "type": "tool_call"} for call in message.tool_calls]
        blocks += [{**call, "type": "invalid_tool_call"} for call in message.invalid_tool_calls]
    return blocks


def _annotations(content: str, metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each sentence the passages that carried it; of the whole text those that are left.

    Beside calls of tools the text is not all of the answer, and its sentences stand elsewhere. A
    piece of a stream has the annotations of the whole.
    """
    entries, length = metadata.get("citations", ()), metadata.get("length", 0)
    statements = metadata.get("statements", ())
    if metadata.get("finish_reason") == "tool_calls":
        statements, length = (), len(content)
    found = [
        (one["passage"], _citation({**entries[one["passage"]], **one}, said["start"], said["end"]))
        for said in statements
        for one in said["citations"]
    ]
    named = {place for place, _ in found}
    rest = [one for one in entries if one["cited"] and one["index"] not in named and length]
    return [*(note for _, note in found), *(_citation(one, 0, length) for one in rest)]


def _citation(entry: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    """A citation as annotation of a stretch of the text."""
    source = entry["metadata"].get("url") or entry["metadata"].get("source")
    linked = isinstance(source, str) and source.startswith(("https://", "http://"))
    return {
        "type": "citation",
        "start_index": start,
        "end_index": end,
        "cited_text": entry["text"],
        "extras": {
            **{key: entry[key] for key in ("index", "id", "metadata", "mass")},
            **{key: entry[key] for key in ("drop", "supports") if entry[key] is not None},
        },
        **({} if entry["title"] is None else {"title": entry["title"]}),
        **({"url": source} if linked else {}),
    }


register_translator(PROVIDER, translate_content, translate_content)
