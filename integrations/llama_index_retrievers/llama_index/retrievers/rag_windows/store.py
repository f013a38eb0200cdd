"""An index on disk as LlamaIndex's vector store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode
from llama_index.core.storage.docstore.utils import doc_to_json, json_to_doc
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)

from llama_index.retrievers.rag_windows.nodes import node_of
from rag_windows import Passage
from rag_windows.errors import InputError
from rag_windows.integration import CHUNK_KEY, NEIGHBOURS, chunk_metadata, passage_of
from rag_windows_retrievers import Index
from rag_windows_retrievers.index_ranking import Where
from rag_windows_retrievers.retriever import DEPTH, fused
from rag_windows_retrievers.stale import StaleWindows

if TYPE_CHECKING:
    from rag_windows import PassageCache, WindowedLM

_WORDS = (VectorStoreQueryMode.TEXT_SEARCH, VectorStoreQueryMode.SPARSE)
_MODES = (VectorStoreQueryMode.DEFAULT, *_WORDS, VectorStoreQueryMode.HYBRID)
_DOCUMENT = ("ref_doc_id", "doc_id", "document_id")


class RagWindowsVectorStore(BasePydanticVectorStore):
    """An `Index` of `rag_windows_retrievers` for a ``VectorStoreIndex``: documents come and go.

    Everything lies in one file of a folder, which several threads and processes may use at once;
    what is deleted is overwritten there, and ``persist`` has nothing to do. Nodes come back whole,
    with their relationships and their metadata as JSON has them. A node that a query finds also
    brings the texts of the nodes in front of it in its document, so that methods such as "auto"
    encode it in sight of them; they stand in a metadata entry that no model and no embedding is
    shown.

    Query modes are "default" (by meaning), "text_search" or "sparse" (BM25), and "hybrid", both
    fused; `alpha` from 0 (words) to 1 (meaning) weights them, and `hybrid_top_k` and `sparse_top_k`
    count. Filters have every operator and condition of LlamaIndex, nested ones too; values of
    different kinds are not greater or less than each other. Of nodes with the same title and text,
    a query finds only the first.

    Args:
        index: its folder, made where it is missing, or an `Index` that is open. One with a model
            embeds nodes and questions itself: then give LlamaIndex
            ``embed_model=MockEmbedding(embed_dim=1)``, whose vectors are not stored.
        words_only: whether vectors are neither stored nor compared.
        cache: the `PassageCache` of the model that reads the nodes, or a `WindowedLM` with its
            cache: windows of what is replaced or deleted are removed from it, too.

    Raises:
        InputError: arguments that do not fit.
        RetrievalError: see `Index`.
    """

    stores_text: bool = True
    is_embedding_query: bool = True
    _index: Index = PrivateAttr()
    _stale: StaleWindows = PrivateAttr()
    _words_only: bool = PrivateAttr()

    def __init__(
        self,
        index: Index | str | Path,
        *,
        words_only: bool = False,
        cache: PassageCache | WindowedLM | None = None,
    ) -> None:
        opened = index if isinstance(index, Index) else Index(index)
        if words_only and opened.encoder is not None:
            raise InputError(
                "An Index with a model finds by meaning, too. Open it without one for words_only."
            )
        # A query needs LlamaIndex's vector only where the vectors are LlamaIndex's.
        super().__init__(
            stores_text=True, is_embedding_query=not words_only and opened.encoder is None
        )
        self._index, self._words_only = opened, words_only
        self._stale = StaleWindows(opened, cache)

    @classmethod
    def class_name(cls) -> str:
        """Its name in what LlamaIndex serializes."""
        return "RagWindowsVectorStore"

    @property
    def client(self) -> Index:
        """The index."""
        return self._index

    @property
    def passages(self) -> tuple[Passage, ...]:
        """All passages as queries find them, for `WindowedLM.warm_from_retriever`."""
        with self._index.snapshot():
            nodes = self._nodes(self._index.passages)
            return tuple(passage_of(self._with_neighbours(one)) for one in nodes)

    # How it changes.

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add nodes in one transaction; one whose id is there takes the place of the old one.

        Raises:
            InputError: metadata can't be saved as JSON, or a node has no embedding, or one of
                another length.
            RetrievalError: the index can't be written; then nothing of it changes.
        """
        _refuse(kwargs)
        vectors: list[list[float]] | None = None
        if self.is_embedding_query:
            bare = [one.node_id for one in nodes if one.embedding is None]
            if bare:
                raise InputError(
                    f"The node {bare[0]!r:.80} has no embedding. Add it by a VectorStoreIndex, or "
                    "open the store with words_only=True."
                )
            vectors = [one.get_embedding() for one in nodes]
        passages = [passage_of(one) for one in nodes]
        originals = [doc_to_json(one.model_copy(update={"embedding": None})) for one in nodes]
        self._index.add_passages(passages, vectors=vectors, originals=originals)
        self._stale.drop()
        return [one.node_id for one in nodes]

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete a document's nodes for good; their windows leave the cache."""
        _refuse(delete_kwargs)
        self._index.remove([ref_doc_id])
        self._stale.drop()

    def delete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """Delete nodes by their ids, by filters, or those of the ids that the filters fit."""
        _refuse(delete_kwargs)
        if node_ids is None and filters is None:
            raise InputError("delete_nodes needs node_ids or filters. To delete all, call clear().")
        self._index.remove_passages(
            [str(one.id) for one in self._chosen(node_ids, filters) if one.id is not None]
        )
        self._stale.drop()

    def clear(self) -> None:
        """Delete everything."""
        self._index.remove([one.id for one in self._index.documents()])
        self._stale.drop()

    # How it is asked.

    def get_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Nodes as they were added: all, those of some ids in their order, those that fit."""
        with self._index.snapshot():
            return self._nodes(self._chosen(node_ids, filters))

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The nodes that fit best, with their scores, greater is better.

        Raises:
            InputError: a mode or a filter that does not exist here, or what the mode needs is
                missing.
            RetrievalError: the index can't be read.
        """
        _refuse(kwargs)
        if query.mode not in _MODES:
            names = ", ".join(one.value for one in _MODES)
            raise InputError(f"The query mode {query.mode.value!r} is not served. Use {names}.")
        self._stale.drop(strict=False)
        where = _where(query)
        top_k = query.similarity_top_k
        with self._index.snapshot():
            if query.mode in _WORDS or self._words_only:
                found = self._index.by_words.retrieve(_text(query), top_k, where)
            elif query.mode == VectorStoreQueryMode.DEFAULT:
                found = self._by_meaning(query, top_k, where)
            else:
                found = self._by_both(query, where)
            nodes = [self._with_neighbours(one) for one in self._nodes(found)]
        scores = [0.0 if one.score is None else one.score for one in found]
        return VectorStoreQueryResult(
            nodes=nodes, similarities=scores, ids=[one.node_id for one in nodes]
        )

    def _by_meaning(self, query: VectorStoreQuery, k: int, where: Where | None) -> list[Passage]:
        if not self.is_embedding_query:
            return self._index.by_meaning.retrieve(_text(query), k, where)
        if query.query_embedding is None:
            raise InputError(
                f"The query mode {query.mode.value!r} needs query_embedding. Ask by a "
                "VectorStoreIndex, or use the mode text_search."
            )
        return self._index.nearest(query.query_embedding, k, where)

    def _by_both(self, query: VectorStoreQuery, where: Where | None) -> list[Passage]:
        alpha = 0.5 if query.alpha is None else query.alpha
        if not 0 <= alpha <= 1:
            raise InputError(f"alpha must be from 0 (words) to 1 (meaning), not {alpha}.")
        most, text = query.hybrid_top_k or query.similarity_top_k, _text(query)
        if alpha == 1:
            return self._by_meaning(query, most, where)
        depth = max(most, DEPTH) if alpha else most
        sparse = depth if query.sparse_top_k is None else min(depth, query.sparse_top_k)
        words = self._index.by_words.retrieve(text, sparse, where)
        if alpha == 0:
            return words
        return fused([words, self._by_meaning(query, depth, where)], (1 - alpha, alpha), most)

    # Passages as nodes.

    def _chosen(
        self, node_ids: Sequence[str] | None, filters: MetadataFilters | None
    ) -> list[Passage]:
        found = self._index.passages if node_ids is None else self._index.named(node_ids)
        return [one for one in found if filters is None or _fits(one, filters)]

    def _nodes(self, passages: Sequence[Passage]) -> list[BaseNode]:
        originals = self._index.originals([one.id for one in passages if one.id is not None])
        return [
            node_of(one) if (stored := _original(originals, one.id)) is None else stored
            for one in passages
        ]

    def _with_neighbours(self, node: BaseNode) -> BaseNode:
        """The node with the texts in front of it, where it does not have them already."""
        if CHUNK_KEY in node.metadata or node.prev_node is None or node.ref_doc_id is None:
            return node
        before: list[str] = []
        seen, at = {node.node_id}, node
        while len(before) < NEIGHBOURS and at.prev_node and at.prev_node.node_id not in seen:
            name = at.prev_node.node_id
            found = _original(self._index.originals([name]), name)
            if found is None or found.ref_doc_id != node.ref_doc_id:
                break
            seen.add(name)
            before.insert(0, passage_of(found).text)
            at = found
        if before:
            known = Passage("", document=node.ref_doc_id, before=tuple(before))
            node.metadata.update(chunk_metadata(known))
            for name in ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys"):
                getattr(node, name).append(CHUNK_KEY)
        return node

    # The same without blocking the event loop.

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """See ``add``."""
        return await asyncio.to_thread(self.add, nodes, **kwargs)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """See `delete`."""
        await asyncio.to_thread(self.delete, ref_doc_id, **delete_kwargs)

    async def adelete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """See ``delete_nodes``."""
        await asyncio.to_thread(self.delete_nodes, node_ids, filters, **delete_kwargs)

    async def aclear(self) -> None:
        """See ``clear``."""
        await asyncio.to_thread(self.clear)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """See ``get_nodes``."""
        return await asyncio.to_thread(self.get_nodes, node_ids, filters)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """See ``query``."""
        return await asyncio.to_thread(self.query, query, **kwargs)


def _text(query: VectorStoreQuery) -> str:
    if query.query_str is None:
        raise InputError(
            f"The query mode {query.mode.value!r} needs query_str here. Give the question's text."
        )
    return query.query_str


def _original(originals: dict[str, Any], id: str | None) -> BaseNode | None:
    """The node that was added; None of a passage that came from a file or another framework."""
    stored = originals.get(id or "")
    if not isinstance(stored, dict) or not {"__data__", "__type__"} <= stored.keys():
        return None
    return json_to_doc(stored)


def _refuse(options: dict[str, Any]) -> None:
    if options:
        raise InputError(f"This store knows no argument {sorted(options)}. Leave it out.")


# Filters.


def _where(query: VectorStoreQuery) -> Where | None:
    """What a query may find; lists without entries stand for no condition, as LlamaIndex sends."""
    nodes, documents, filters = set(query.node_ids or ()), set(query.doc_ids or ()), query.filters
    if filters is not None:
        _fits(Passage(""), filters)  # refuses what can't be asked of any
    if not nodes and not documents and filters is None:
        return None

    def where(passage: Passage) -> bool:
        return (
            (not nodes or passage.id in nodes)
            and (not documents or passage.document in documents)
            and (filters is None or _fits(passage, filters))
        )

    return where


def _fits(passage: Passage, filters: MetadataFilters) -> bool:
    each = [
        _fits(passage, one) if isinstance(one, MetadataFilters) else _fits_one(passage, one)
        for one in filters.filters
    ]
    if not each:
        return True
    if filters.condition == FilterCondition.OR:
        return any(each)
    return not any(each) if filters.condition == FilterCondition.NOT else all(each)


def _fits_one(passage: Passage, filter: MetadataFilter) -> bool:
    wanted, operator = filter.value, filter.operator
    own = {"title": passage.title, **dict.fromkeys(_DOCUMENT, passage.document)}
    found = {**own, **passage.metadata}.get(filter.key)
    if operator in _LISTED and not isinstance(wanted, list):
        raise InputError(
            f"The filter {operator.value!r} of {filter.key!r:.80} needs a list, not {wanted!r:.80}."
            " Write value=[...]."
        )
    if operator in _TEXT and not isinstance(wanted, str):
        raise InputError(
            f"The filter {operator.value!r} of {filter.key!r:.80} needs a text, not {wanted!r:.80}."
            " Write value='...'."
        )
    if operator == FilterOperator.IS_EMPTY:
        return found is None or found in ("", [])
    if found is None:
        return operator in (FilterOperator.NE, FilterOperator.NIN)
    if operator not in _TESTS:
        raise InputError(f"The filter {operator.value!r} is not served. Use another operator.")
    return _TESTS[operator](found, wanted)


_LISTED = (FilterOperator.IN, FilterOperator.NIN, FilterOperator.ANY, FilterOperator.ALL)
_TEXT = (FilterOperator.TEXT_MATCH, FilterOperator.TEXT_MATCH_INSENSITIVE)


def _ordered(found: Any, wanted: Any) -> int | None:
    """-1, 0 or 1 for less, equal and greater; None of values of different kinds."""
    numbers = all(type(one) in (int, float) for one in (found, wanted))
    if not numbers and not (isinstance(found, str) and isinstance(wanted, str)):
        return None
    return int(found > wanted) - int(found < wanted)


def _holds(found: Any, value: Any) -> bool:
    if isinstance(found, str):
        return isinstance(value, str) and value in found
    return isinstance(found, list) and value in found


_TESTS: dict[FilterOperator, Callable[[Any, Any], bool]] = {
    FilterOperator.EQ: lambda found, wanted: bool(found == wanted),
    FilterOperator.NE: lambda found, wanted: bool(found != wanted),
    FilterOperator.GT: lambda found, wanted: _ordered(found, wanted) == 1,
    FilterOperator.GTE: lambda found, wanted: _ordered(found, wanted) in (0, 1),
    FilterOperator.LT: lambda found, wanted: _ordered(found, wanted) == -1,
    FilterOperator.LTE: lambda found, wanted: _ordered(found, wanted) in (-1, 0),
    FilterOperator.IN: lambda found, wanted: found in wanted,
    FilterOperator.NIN: lambda found, wanted: found not in wanted,
    FilterOperator.ANY: lambda found, wanted: any(_holds(found, one) for one in wanted),
    FilterOperator.ALL: lambda found, wanted: all(_holds(found, one) for one in wanted),
    FilterOperator.CONTAINS: _holds,
    FilterOperator.TEXT_MATCH: lambda found, wanted: isinstance(found, str) and wanted in found,
    FilterOperator.TEXT_MATCH_INSENSITIVE: lambda found, wanted: (
        isinstance(found, str) and wanted.casefold() in found.casefold()
    ),
}
