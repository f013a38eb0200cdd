"""One retrieved text, documents of any framework as such, and the windows made from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from rag_windows.errors import InputError


@dataclass(frozen=True, slots=True)
class Passage:
    """One retrieved text with what the retriever knows about it.

    Attributes:
        text: the passage itself; a blank passage makes no window, and a note says so.
        id: the caller's name for it, carried through to citations.
        title: an optional title, shown to the model by the default header.
        score: the retriever's score, whatever its unit.
        metadata: anything else; never read by the engine.
    """

    text: str
    id: str | None = None
    title: str | None = None
    score: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, kinds in (
            ("text", self.text, str),
            ("id", self.id, (str, type(None))),
            ("title", self.title, (str, type(None))),
        ):
            if not isinstance(value, kinds):
                raise InputError(
                    f"Passage.{name} must be a string, not {type(value).__name__}. Convert it "
                    f"first, for example Passage({name}=str(value))."
                )

    @classmethod
    def of(cls, value: str | Passage | Mapping[str, Any]) -> Passage:
        """Make a passage from a string, a passage, or a mapping with a ``text`` key.

        Args:
            value: a mapping may use ``text`` or ``page_content`` for the text, ``id``, ``title``,
                ``score`` and ``metadata``; a title or id inside ``metadata`` is used when none
                stands beside it. Other keys are an error, so that no field is lost by a typo.

        Raises:
            InputError: the value is none of these, or a mapping lacks its text.
        """
        if isinstance(value, Passage):
            return value
        if isinstance(value, str):
            return cls(text=value)
        if not isinstance(value, Mapping):
            raise InputError(
                f"A passage must be a string, a Passage or a mapping with a 'text' key, "
                f"not {type(value).__name__}."
            )
        known = {"text", "page_content", "id", "title", "score", "metadata"}
        unknown = sorted(str(key) for key in value.keys() - known)
        if unknown:
            raise InputError(
                f"The passage has unknown keys {unknown}. Use {sorted(known)}, and put anything "
                "else into 'metadata'."
            )
        text = value.get("text", value.get("page_content"))
        if text is None:
            raise InputError("A passage mapping must have a 'text' key (or 'page_content').")
        metadata = value.get("metadata") or {}
        identity = value.get("id", metadata.get("id"))
        score = value.get("score")
        return cls(
            text=text,
            id=None if identity is None else str(identity),
            title=value.get("title", metadata.get("title")),
            score=None if score is None else float(score),
            metadata=dict(metadata),
        )


@dataclass(frozen=True, slots=True)
class WindowTokens:
    """One window.

    Attributes:
        ids: token ids, header and closing blank line included.
        passage: index into the passages as given.
        part: index of this window among the passage's windows.
        parts: number of the passage's windows.
        start: first character of ``passage.text`` in it.
        end: character of ``passage.text`` behind its last one.
    """

    ids: tuple[int, ...]
    passage: int
    part: int
    parts: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Note:
    """Something the caller should know about a passage.

    Attributes:
        kind: ``blank`` and ``duplicate`` passages make no window of their own; a ``split`` one
            makes several.
        passage: index into the passages as given.
        message: the same in words.
        of: for a duplicate, the index of the first passage that equals it.
    """

    kind: Literal["blank", "duplicate", "split"]
    passage: int
    message: str
    of: int | None = None


_LISTS = ("passages", "docs")
"""Attributes that hold documents: ours; LangChain's BM25 and other retrievers in memory."""

_INSIDE = (
    "retriever",
    "retrievers",
    "base_retriever",
    "vectorstore",
    "docstore",
    "_docstore",
    "index",
    "_index",
)
"""Attributes that hold what has the documents, in the order in which they are tried."""

_DEEPEST = 6


def passages_of(retriever: object) -> list[Passage]:
    """All documents that something which retrieves can list.

    Ours, LangChain's and LlamaIndex's retrievers, vector stores and document stores are known by
    what they hold; nothing of these frameworks is imported before a document of theirs is seen.
    Documents become passages as the adapters make them, so that the windows are the same.

    Raises:
        InputError: no documents are to be found in it.
    """
    found = _documents(retriever, 0)
    if found is None:
        raise InputError(
            f"{type(retriever).__name__} can't list its documents. Give them to warm() as a list "
            "of passages."
        )
    unique: dict[tuple[str | None, str | None, str], Passage] = {}
    for document in found:
        passage = passage_of(document)
        unique.setdefault((passage.id, passage.title, passage.text), passage)
    return list(unique.values())


def passage_of(document: Any) -> Passage:
    """A document of any framework as a passage; nothing of the framework is imported.

    Of a LangChain document the title is ``metadata["title"]``, the score
    ``metadata["relevance_score"]`` or ``["score"]``. A LlamaIndex node's text is what LlamaIndex
    shows a model, with the metadata that is not excluded, but for a title, which becomes the
    passage's own. Anything else is read as `Passage.of` reads it.

    Raises:
        InputError: it is no document.
    """
    if isinstance(document, Passage | Mapping | str):
        return Passage.of(document)
    if hasattr(document, "page_content"):
        return _of_langchain(document)
    node = getattr(document, "node", document)
    if hasattr(node, "node_id") and callable(getattr(node, "get_content", None)):
        return _of_llama_index(node, getattr(document, "score", None))
    return Passage.of(document)


def _of_langchain(document: Any) -> Passage:
    metadata = document.metadata
    identity = document.id if document.id is not None else metadata.get("id")
    title = metadata.get("title")
    score = metadata.get("relevance_score", metadata.get("score"))
    return Passage(
        text=document.page_content,
        id=None if identity is None else str(identity),
        title=None if title is None else str(title),
        score=float(score) if isinstance(score, int | float) else None,
        metadata=dict(metadata),
    )


def _of_llama_index(node: Any, score: float | None) -> Passage:
    titles = (key for key in ("title", "Title") if _is_title(node.metadata.get(key)))
    key, shown = next(titles, None), node
    if key is not None and key in node.excluded_llm_metadata_keys:
        key = None
    if key is not None:
        shown = node.model_copy()
        shown.excluded_llm_metadata_keys = [*node.excluded_llm_metadata_keys, key]
    return Passage(
        text=shown.get_content(metadata_mode="llm"),
        id=node.node_id,
        title=None if key is None else node.metadata[key],
        score=score,
        metadata=node.metadata,
    )


def _is_title(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _documents(value: Any, depth: int) -> Iterable[Any] | None:
    """What a value holds, or None if it can't be told."""
    if value is None or depth > _DEEPEST or isinstance(value, str | bytes):
        return None
    if isinstance(value, Sequence):
        lists = [_documents(entry, depth + 1) for entry in value]
        known = [one for one in lists if one is not None]
        return None if len(known) < len(lists) else [entry for one in known for entry in one]
    for name in _LISTS:
        held = getattr(value, name, None)
        if isinstance(held, Mapping):  # LlamaIndex's document store: nodes by id
            return list(held.values())
        if isinstance(held, Sequence) and not isinstance(held, str):
            return held
    if (stored := _of_store(value)) is not None:
        return stored
    for name in _INSIDE:
        held = _documents(getattr(value, name, None), depth + 1)
        if held is not None:
            return held
    return None


def _of_store(value: Any) -> Iterable[Any] | None:
    """What one of LangChain's stores holds, each kind by the methods that it lists with."""
    by_ids = getattr(value, "get_by_ids", None)
    if by_ids and isinstance(store := getattr(value, "store", None), dict):  # in memory
        return list(by_ids(list(store)))
    if isinstance(held := getattr(value, "_dict", None), dict):  # InMemoryDocstore, which FAISS has
        return list(held.values())
    keys, by_keys = getattr(value, "yield_keys", None), getattr(value, "mget", None)
    if keys and by_keys:  # stores by key, which parent-document retrievers have
        return list(by_keys(list(keys())))
    if by_ids and not isinstance(value, Mapping) and callable(get := getattr(value, "get", None)):
        with suppress(TypeError):  # another kind of get() than Chroma's
            columns = get(include=["documents", "metadatas"])
            if isinstance(columns, Mapping) and {"ids", "documents"} <= columns.keys():
                metadata = columns.get("metadatas") or [None] * len(columns["ids"])
                rows = zip(columns["ids"], columns["documents"], metadata, strict=True)
                return [{"id": i, "text": text, "metadata": data or {}} for i, text, data in rows]
    return None
