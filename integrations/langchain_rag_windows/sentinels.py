"""Documents inside prompt text, marked so that they can be taken out again as documents.

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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document
from langchain_core.prompts import StringPromptTemplate
from pydantic import Field

from langchain_rag_windows.documents import as_passage
from langchain_rag_windows.errors import RequestError
from rag_windows import Passage

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


@dataclass(frozen=True, slots=True)
class Unmarked:
    """A text without its documents, and these."""

    text: str
    passages: tuple[Passage, ...]


def unmark(text: str) -> Unmarked:
    """Take marked documents out of a text.

    What stands between two documents goes with them if it holds no letter or digit: it separated
    them. All other text stays, without the white space around the documents and with a blank line
    in the place of those in the middle.

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
    return Unmarked(rest, tuple(passages))


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
