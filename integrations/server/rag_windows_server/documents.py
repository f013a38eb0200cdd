"""Reads the documents of a request, in all their forms; no file and no address is ever opened."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from html import unescape
from typing import Any
from urllib.parse import quote, urlsplit

from rag_windows import InputError, Passage
from rag_windows.integration import Transcript, one_way, passage_of
from rag_windows_server.errors import ApiError, refused

_TEXT = ("text", "page_content", "content", "snippet")
"""Names that clients give a document's text, the first one found counts."""

_TYPES = ("text/plain", "text/markdown")
_FILE = re.compile(r"data:([a-z/+.-]+)(?:;charset=utf-8)?;base64,(.*)", re.DOTALL | re.IGNORECASE)

# Both ends are looked for one after the other: one expression for the whole block would search the
# rest of the text again from each beginning that has no end.
_BEGIN = re.compile(r"<source\b([^<>]*+)>")
_END = re.compile(r"</source>\s*+")
_ATTRIBUTE = re.compile(r'(?<!\w)(\w++)="([^"]*+)"')
_EMPTY = re.compile(r"<context>\s*+</context>\s*+")


def passages_in(documents: object, param: str) -> list[Passage]:
    """The passages of a list of documents in any of the forms that clients send.

    A string; ``{id, title, text, metadata, url, score}``; vLLM's ``{title, text}``; Cohere's
    ``{id, data}``, whose data are a string or a mapping with the text. Further keys become
    metadata.
    """
    if documents is None:
        return []
    if isinstance(documents, str | Mapping) or not isinstance(documents, Sequence):
        raise refused(param, "must be a list of documents.", "invalid_type")
    return [_passage(one, f"{param}[{index}]") for index, one in enumerate(documents)]


def _passage(document: object, param: str) -> Passage:
    if isinstance(document, str):
        return Passage(document)
    if not isinstance(document, Mapping):
        raise refused(param, "must be a text or an object with a text.", "invalid_type")
    entry = dict(document)
    data = entry.pop("data", None)
    if isinstance(data, str):
        entry["text"] = data
    elif isinstance(data, Mapping):
        entry = {**data, **entry}
    elif data is not None:
        raise refused(f"{param}.data", "must be a text or an object with a text.", "invalid_type")
    names = [name for name in _TEXT if name in entry]
    if not names:
        raise refused(param, "has no text. Give it as 'text'.", "missing_required_parameter")
    text = entry.pop(names[0])
    metadata = entry.pop("metadata", None) or {}
    if not isinstance(metadata, Mapping):
        raise refused(f"{param}.metadata", "must be an object.", "invalid_type")
    given = {name: entry.pop(name, None) for name in ("id", "title", "score")}
    known = {name: value for name, value in given.items() if value is not None}
    try:
        return passage_of({**known, "text": text, "metadata": {**metadata, **entry}})
    except (InputError, TypeError, ValueError) as error:
        raise ApiError(400, f"{param}: {error}", param=param, code="invalid_type") from error


def passages_of(transcript: Transcript, most: int) -> list[Passage]:
    """All passages of a request, at most ``most`` and all in one way; else an ApiError."""
    found = transcript.count()
    if found > most:
        raise refused("documents", f"{found} are more than {most}. Send fewer.", "too_many")
    try:
        return one_way(transcript.ways)
    except InputError as error:
        raise ApiError(400, str(error), param="documents", code="invalid_value") from error


PARTS = ("document", "text-plain", "file", "input_file")
"""Types of content parts that bring a document."""


def part_passage(part: Mapping[str, Any], param: str) -> Passage:
    """The document of a content part.

    ``{"type": "document", "document": {...}}``, or with the document's own keys next to the type;
    Anthropic's ``{"type": "document", "source": {"type": "text", "data": ...}}``; OpenAI's files
    whose text comes along as base64. A file by id or address is refused: none is opened.
    """
    entry = {key: value for key, value in part.items() if key != "type" and value is not None}
    if part["type"] in ("file", "input_file"):
        return _file(entry.get("file", entry) if part["type"] == "file" else entry, param)
    inner, source = entry.pop("document", None), entry.pop("source", None)
    if inner is not None:
        return _passage(inner, f"{param}.document")
    if source is not None:
        if not isinstance(source, Mapping) or source.get("type") != "text":
            raise refused(
                f"{param}.source", "must hold the text itself, because nothing is opened."
            )
        return _passage({**entry, "text": source.get("data")}, param)
    return _passage(entry, param)


def _file(entry: object, param: str) -> Passage:
    given = entry if isinstance(entry, Mapping) else {}
    found = _FILE.fullmatch(str(given.get("file_data") or ""))
    why = (
        f"must hold its text in file_data, as data:text/plain;base64,... ({' or '.join(_TYPES)}); "
        "a file by id or address is never opened."
    )
    if found is None or found[1].lower() not in _TYPES or given.keys() & {"file_id", "file_url"}:
        raise refused(f"{param}.file", why)
    try:
        text = base64.b64decode(found[2], validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise refused(f"{param}.file.file_data", "is no base64 of UTF-8 text.") from error
    name = given.get("filename")
    return Passage(text, id=name if isinstance(name, str) else None)


def parse_sources(text: str) -> tuple[str, list[Passage]]:
    """A text without its ``<source>`` blocks, and these, as Open WebUI writes them."""
    passages, rest, at = [], [], 0
    while (begin := _BEGIN.search(text, at)) and (end := _END.search(text, begin.end())):
        named = {name: _unescaped(value) for name, value in _ATTRIBUTE.findall(begin[1])}
        inner = text[begin.end() : end.start()]
        passages.append(Passage(inner, id=named.get("id"), title=named.get("name")))
        rest.append(text[at : begin.start()])
        at = end.end()
    if not passages:
        return text, []
    return _EMPTY.sub("", "".join([*rest, text[at:]])).strip(), passages


def _unescaped(value: str) -> str:
    try:
        return unescape(value)
    except ValueError:  # a character's number of thousands of digits
        return value


def url_of(passage: Passage, index: int) -> str:
    """Where an annotation points: the document's own address, or ``passage:<id>``."""
    for name in ("url", "source"):
        own = passage.metadata.get(name)
        if isinstance(own, str) and own.isprintable():
            parts = _split(own)
            if parts in ("http", "https"):
                return own
    return "passage:" + quote(passage.id if passage.id else str(index), safe="/:@")


def _split(address: str) -> str:
    try:
        found = urlsplit(address)
    except ValueError:
        return ""
    return found.scheme if found.netloc else ""
