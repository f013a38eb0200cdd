"""One retrieved text, documents of any framework as such, and the windows made from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
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
        metadata: anything else; never read by the engine. Of documents that were split here it has
            ``source``, ``start`` and ``end``, and where they are known ``page`` and ``last_page``
            (from 1, of a PDF) and ``section`` (the headings above it, below the title).
        document: the name of the document that this is a chunk of, the same for all of its chunks.
        index: the chunk's place in its document, from 0.
        before: texts of the chunks in front of it in its document, nearest last. A method such as
            `Neighbours` encodes the passage in sight of them; `with_neighbours` fills them in.
    """

    text: str
    id: str | None = None
    title: str | None = None
    score: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    document: str | None = None
    index: int | None = None
    before: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value, kinds in (
            ("text", self.text, str),
            ("id", self.id, (str, type(None))),
            ("title", self.title, (str, type(None))),
            ("document", self.document, (str, type(None))),
        ):
            if not isinstance(value, kinds):
                raise InputError(
                    f"Passage.{name} must be a string, not {type(value).__name__}. Convert it "
                    f"first, for example Passage({name}=str(value))."
                )
        index = self.index
        if index is not None and (type(index) is not int or index < 0):
            raise InputError(
                f"Passage.index must be a whole number from 0 on, or None, not {index!r}. It is "
                "the chunk's place in its document; the first one's is 0."
            )
        listed = isinstance(self.before, list | tuple)
        if not listed or not all(isinstance(one, str) for one in self.before):
            raise InputError(
                "Passage.before must be a list of strings, the texts of the chunks in front of "
                f"this one in its document, not {self.before!r:.80}. with_neighbours() fills it in."
            )
        object.__setattr__(self, "before", tuple(self.before))

    @property
    def place(self) -> str | None:
        """Where in its document it stands, for a list of sources: ``page 3, part 7``.

        It differs between passages of one document that have an index. Of the metadata it shows
        ``section``, and ``page_label`` or ``page`` with ``last_page``; the first part has no
        number. None where nothing is known.
        """
        known = {
            key: str(value)
            for key in ("page_label", "page", "last_page", "section")
            if type(value := self.metadata.get(key)) in (str, int) and str(value).strip()
        }
        page = known.get("page_label", known.get("page"))
        last = page if "page_label" in known else known.get("last_page", page)
        named = [
            page and (f"page {page}" if page == last else f"pages {page}-{last}"),
            known.get("section"),
            f"part {self.index + 1}" if self.index else None,
        ]
        return ", ".join(one for one in named if one) or None

    @classmethod
    def of(cls, value: str | Passage | Mapping[str, Any]) -> Passage:
        """Make a passage from a string, a passage, or a mapping with a ``text`` key.

        Args:
            value: a mapping may use ``text`` or ``page_content`` for the text, ``id``, ``title``,
                ``score``, ``metadata``, ``document``, ``index`` and ``before``; a title or id
                inside ``metadata`` is used when none stands beside it, and so is what
                `CHUNK_KEY` holds there. Other keys are an error, so that no field is lost by a
                typo.

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
        known = {"text", "page_content", "id", "title", "score", "metadata", *_CHUNK}
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
        given = {name: value[name] for name in _CHUNK if value.get(name) is not None}
        identity = value.get("id", metadata.get("id"))
        score = value.get("score")
        return cls(
            text=text,
            id=None if identity is None else str(identity),
            title=value.get("title", metadata.get("title")),
            score=None if score is None else float(score),
            metadata=_without_chunk(metadata),
            **{**_chunk_of(metadata), **given},
        )


def refuse_single(passages: object) -> None:
    """Refuse a single passage where a list of them is meant; a string would become characters.

    Raises:
        InputError: it is a string, a passage, a mapping or a framework's document.
    """
    document = hasattr(passages, "page_content") or hasattr(passages, "node_id")
    if document or isinstance(passages, str | Passage | Mapping):
        raise InputError("passages must be a list of passages, not a single one. Wrap it in [].")


CHUNK_KEY = "rag_windows_chunk"
"""Metadata key under which documents of other frameworks keep document, index and neighbours.

The value is JSON, which every store keeps: an object with ``document``, ``index`` and ``before``.
"""

_CHUNK = ("document", "index", "before")


def chunk_metadata(passage: Passage) -> dict[str, str]:
    """What a document of another framework keeps of a passage under `CHUNK_KEY`; often nothing."""
    held = {name: getattr(passage, name) for name in _CHUNK}
    known = {name: value for name, value in held.items() if value not in (None, ())}
    return {CHUNK_KEY: json.dumps(known)} if known else {}


def _chunk_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a passage that metadata hold under `CHUNK_KEY`."""
    value = metadata.get(CHUNK_KEY)
    with suppress(ValueError):
        value = json.loads(value) if isinstance(value, str) else value
    if value is None:
        return {}
    if not isinstance(value, Mapping) or value.keys() - {*_CHUNK}:
        raise InputError(
            "The neighbours in a document's metadata must be a JSON object with document, "
            f"index and before, not {value!r:.80}. Write it again, or remove it from the metadata."
        )
    return dict(value)


def _without_chunk(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key != CHUNK_KEY}


DOCUMENT_KEYS = ("document_id", "doc_id", "ref_doc_id", "source")
"""Where metadata name the document that a passage is part of."""


def document_of(metadata: Mapping[str, Any]) -> str | None:
    """The name of a document, as metadata have it."""
    named = (metadata.get(key) for key in DOCUMENT_KEYS)
    return next((one for one in named if isinstance(one, str) and one), None)


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
        before: of each chunk in front of it in its document that its method may let it see, the
            token ids, nearest last; earlier parts of its passage are such chunks.
    """

    ids: tuple[int, ...]
    passage: int
    part: int
    parts: int
    start: int
    end: int
    before: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Note:
    """Something the caller should know about a passage.

    Attributes:
        kind: ``blank`` and ``duplicate`` passages make no window of their own; a ``split`` one
            makes several; an ``alone`` one is a later chunk of a document, to be encoded in sight
            of its neighbours, but came without them; of one with a ``header`` that left a window
            too little for its text, the header was shortened. ``method`` says what `Auto` chose.
        passage: index into the passages as given; None for ``method``.
        message: the same in words.
        of: for a duplicate, the index of the first passage that equals it.
    """

    kind: Literal["blank", "duplicate", "split", "alone", "header", "method"]
    passage: int | None
    message: str
    of: int | None = None


_LISTS = ("passages", "docs")
"""Attributes that hold documents: ours; LangChain's BM25 and other retrievers in memory."""

_INSIDE = (
    "retriever",
    "retrievers",
    "base_retriever",
    "vectorstore",
    "_vector_store",
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
    for passage in with_places(found):
        unique.setdefault((passage.id, passage.title, passage.text), passage)
    return list(unique.values())


NEIGHBOURS = 8
"""How many chunks `with_neighbours` gives a passage by default."""

_BETWEEN = 16
"""Characters between two chunks that splitting may have left out, such as blank lines."""


def with_neighbours(passages: Iterable[Any], most: int = NEIGHBOURS) -> list[Passage]:
    """Passages with the texts of the chunks in front of them, as `Passage.before` has them.

    Give it the chunks of a whole corpus once, before they are indexed or warmed. Whatever a
    question then retrieves of them is encoded as `warm` encoded it. A passage that has ``before``
    already, or no document or index, stays as it is.

    Args:
        passages: in any order, of any number of documents. Only chunks whose indices follow each
            other directly are neighbours. Documents of LangChain and LlamaIndex count by their
            places: ``start_index`` (and ``page``) in metadata, nodes by their previous ones.
        most: how many chunks, at least 0; each of them adds to what encoding costs.

    Raises:
        InputError: two different texts say that they are one chunk in front of another, `most` is
            no number, or there is a single passage instead of a list.
    """
    if type(most) is not int or most < 0:
        raise InputError(f"most must be a whole number of chunks, 0 or more, not {most!r}.")
    made = with_places(passages)
    texts: dict[tuple[str | None, int], set[str]] = {}
    for one in made:
        if one.document is not None and one.index is not None:
            texts.setdefault((one.document, one.index), set()).add(one.text)
    filled = []
    for one in made:
        before: list[str] = []
        if one.index is not None and not one.before:
            at = one.index - 1
            while len(before) < most and (found := texts.get((one.document, at))):
                if len(found) > 1:
                    raise InputError(
                        f"Two different texts say that they are chunk {at} of the document "
                        f"{one.document!r}. Give each document a name of its own, and number its "
                        "chunks from 0 on."
                    )
                before += found
                at -= 1
        filled.append(replace(one, before=tuple(reversed(before))) if before else one)
    return filled


def with_places(documents: Iterable[Any]) -> list[Passage]:
    """`passage_of` each document of a corpus, with the index of those that say where they stand.

    Where something is missing between two chunks of a document, so is an index.
    """
    refuse_single(documents)
    given = list(documents)
    made = [passage_of(one) for one in given]
    previous = _previous(given, made)
    after = {place: at for at, place in previous.items()}
    latest: dict[str | None, int] = {}
    for first in (at for at in after if at not in previous):
        at: int | None = first
        index = latest.get(made[first].document, -2) + 2
        while at is not None:
            made[at] = replace(made[at], index=index)
            latest[made[at].document] = index
            at, index = after.get(at), index + 1
    return made


def _previous(given: Sequence[Any], made: Sequence[Passage]) -> dict[int, int]:
    """Which of a corpus stands directly in front of which, as frameworks tell it."""
    ids = {(one.document, one.id): at for at, one in enumerate(made) if one.id and one.document}
    found: dict[int, int] = {}
    spans: dict[str, dict[tuple[int, int], int]] = {}
    for at, one in enumerate(made):
        if one.document is None or one.index is not None:
            continue
        node = getattr(given[at], "node", given[at])
        before = getattr(getattr(node, "prev_node", None), "node_id", None)
        if before is not None and (one.document, before) in ids:
            found[at] = ids[one.document, before]
        start, page = one.metadata.get("start_index"), one.metadata.get("page", 0)
        if type(start) is int and start >= 0 and type(page) is int:
            spans.setdefault(one.document, {}).setdefault((page, start), at)
    for of_document in spans.values():
        for (last, at), (here, behind) in pairwise(sorted(of_document.items())):
            end = last[1] + len(made[at].text) + _BETWEEN
            if here[1] <= end if here[0] == last[0] else here[0] == last[0] + 1:
                found[behind] = at
    return found


def passage_of(document: Any) -> Passage:
    """A document of any framework as a passage; nothing of the framework is imported.

    Of a LangChain document the title is ``metadata["title"]``, the score
    ``metadata["relevance_score"]`` or ``["score"]``. A LlamaIndex node's text is what LlamaIndex
    shows a model, with the metadata that is not excluded, but for a title, which becomes the
    passage's own. Both name their document in one of `DOCUMENT_KEYS` of their metadata, a node
    first by ``ref_doc_id``, and what `CHUNK_KEY` holds is no text for the model. Anything else is
    read as `Passage.of` reads it.

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
        metadata=_without_chunk(metadata),
        **{"document": document_of(metadata), **_chunk_of(metadata)},
    )


def _of_llama_index(node: Any, score: float | None) -> Passage:
    titles = (key for key in ("title", "Title") if _is_title(node.metadata.get(key)))
    key, shown = next(titles, None), node
    if key is not None and key in node.excluded_llm_metadata_keys:
        key = None
    document = getattr(node, "ref_doc_id", None) or document_of(node.metadata)
    if hidden := {key, CHUNK_KEY} & node.metadata.keys():
        shown = node.model_copy()
        shown.excluded_llm_metadata_keys = [*node.excluded_llm_metadata_keys, *hidden]
    return Passage(
        text=shown.get_content(metadata_mode="llm"),
        id=node.node_id,
        title=None if key is None else node.metadata[key],
        score=score,
        metadata=_without_chunk(node.metadata),
        **{"document": document, **_chunk_of(node.metadata)},
    )


def _is_title(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _documents(value: Any, depth: int) -> Iterable[Any] | None:
    """What a value holds, or None if that is unknown."""
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
