"""An index on disk as LangChain's vector store."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import run_in_executor
from langchain_core.vectorstores import VectorStore
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from langchain_rag_windows.errors import in_langchain_terms
from rag_windows import Passage
from rag_windows.errors import InputError
from rag_windows.integration import chunk_metadata, passage_of
from rag_windows_retrievers import Encoder, Index, Progress
from rag_windows_retrievers.in_memory import PROBE, Vectors
from rag_windows_retrievers.index_ranking import Where
from rag_windows_retrievers.stale import StaleWindows

if TYPE_CHECKING:
    from rag_windows import PassageCache, WindowedLM

_METADATA = "langchain_metadata"
"""Where an index keeps what a document's metadata were."""

Ranking: TypeAlias = Literal["meaning", "words", "hybrid"]


class RagWindowsVectorStore(VectorStore):
    """An `Index` of `rag_windows_retrievers` in chains and agents: documents come, change and go.

    Everything lies in one file of a folder, which several threads and processes may use at once.
    What is deleted is overwritten there. A document comes back with its id and its metadata as
    JSON has them (tuples become lists); a ``title`` in them counts when it is searched. Of
    documents with the same title and text, a search finds only the first.

    Documents that `rag_windows.integration.keep_neighbours` was given come back with their
    neighbours. What these say of a deleted document stays with them, so delete the chunks of a text
    together.

    Args:
        index: its folder, made where it is missing, or an `Index` that is open.
        embedding: LangChain's embeddings, compared by cosine; None for words only. An `Index`
            brings its own model.
        ranking: of searches that do not say it: "meaning" (None, where there are embeddings),
            "words" (BM25), or "hybrid", both fused.
        cache: the `PassageCache` of the model that reads the documents, or a `WindowedLM` with its
            cache: windows of what is replaced or deleted are removed from it, too.

    Search arguments:
        ``store.similarity_search(query, k=4, filter={"year": 1931}, ranking="words")``; so do the
        ``search_kwargs`` of `as_retriever`. A filter is a mapping of metadata that have to be
        equal, or a function from a document to whether it may be found.

    Raises:
        RequestError: arguments that do not fit.
        RetrievalError: see `Index`.
    """

    def __init__(
        self,
        index: Index | str | Path,
        embedding: Embeddings | None = None,
        *,
        ranking: Ranking | None = None,
        cache: PassageCache | WindowedLM | None = None,
    ) -> None:
        with in_langchain_terms():
            if isinstance(index, Index):
                if embedding is not None:
                    raise InputError(
                        "An Index that is open has its own model. Leave embedding= out, or give "
                        "the index's folder."
                    )
                self.index = index
            else:
                self.index = Index(index, None if embedding is None else _Encoder(embedding))
            default: Ranking = "words" if self.index.encoder is None else "meaning"
            self._ranking = self._checked(default if ranking is None else ranking)
            self._stale = StaleWindows(self.index, cache)

    @property
    def embeddings(self) -> Embeddings | None:
        """What embeds queries; None for words only."""
        encoder = self.index.encoder
        if isinstance(encoder, _Encoder):
            return encoder.embeddings
        return None if encoder is None else _OfEncoder(encoder)

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings | None = None,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        index: Index | str | Path | None = None,
        **kwargs: Any,
    ) -> RagWindowsVectorStore:
        """A store with some texts; ``index=`` names its folder, others are the constructor's."""
        with in_langchain_terms():
            if index is None:
                raise InputError("The store needs a folder. Name one: index='index/'.")
        store = cls(index, embedding, **kwargs)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    # How it changes.

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts, see `add_documents`."""
        given = list(texts)
        with in_langchain_terms():
            if metadatas is not None and len(metadatas) != len(given):
                raise InputError(
                    f"{len(given)} texts came with {len(metadatas)} metadatas. Give one for each."
                )
        metadata = metadatas if metadatas is not None else [{} for _ in given]
        pairs = zip(given, metadata, strict=True)
        documents = [Document(text, metadata=one) for text, one in pairs]
        return self.add_documents(documents, ids=ids, **kwargs)

    def add_documents(
        self, documents: list[Document], *, ids: Sequence[str | None] | None = None, **kwargs: Any
    ) -> list[str]:
        """Add documents in one transaction; one whose id is there takes the place of the old one.

        Args:
            documents: they are not changed.
            ids: one for each, instead of their own; where there is none, one is made.
            kwargs: only ``batch_size``, which LangChain's indexing gives; it changes nothing.

        Returns:
            The ids.

        Raises:
            RequestError: metadata can't be saved as JSON, or the ids don't fit.
            RetrievalError: the index can't be written; then nothing of it changes.
        """
        with in_langchain_terms():
            _refuse({key: one for key, one in kwargs.items() if key != "batch_size"})
            given = [one.id for one in documents] if ids is None else list(ids)
            if len(given) != len(documents):
                raise InputError(
                    f"{len(documents)} documents came with {len(given)} ids. Give one for each."
                )
            names = [str(uuid.uuid4()) if one is None else one for one in given]
            pairs = zip(documents, names, strict=True)
            passages = [replace(passage_of(one), id=name, score=None) for one, name in pairs]
            stored = [{_METADATA: one.metadata} for one in documents]
            self.index.add_passages(passages, originals=stored)
            self._stale.drop()
            return names

    def delete(self, ids: Sequence[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents by their ids for good, or all of them; unknown ids are ignored.

        Their windows, and those of other documents of the same source, leave the cache.
        """
        with in_langchain_terms():
            _refuse(kwargs)
            if ids is None:
                self.index.remove([one.id for one in self.index.documents()])
            else:
                self.index.remove_passages(ids)
            self._stale.drop()
        return True

    # How it is asked.

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Documents by their ids, in this order; unknown ones are left out."""
        with in_langchain_terms(), self.index.snapshot():
            return self._documents(self.index.named(ids))

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """The documents that fit a query best; see the class for `kwargs`."""
        return [one for one, _ in self.similarity_search_with_score(query, k, **kwargs)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """Documents with scores, greater is better: the cosine, BM25's, or that of the fusion."""
        with in_langchain_terms():
            where, ranking = self._options(kwargs)
            self._stale.drop(strict=False)
            with self.index.snapshot():
                if ranking == "hybrid":
                    found = self.index.retrieve(query, k, where)
                elif ranking == "words":
                    found = self.index.by_words.retrieve(query, k, where)
                else:
                    found = self.index.by_meaning.retrieve(query, k, where)
                return self._scored(found)

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, **kwargs: Any
    ) -> list[Document]:
        """The documents nearest to a vector."""
        found = self.similarity_search_with_score_by_vector(embedding, k, **kwargs)
        return [one for one, _ in found]

    def similarity_search_with_score_by_vector(
        self, embedding: list[float], k: int = 4, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """The documents nearest to a vector, with the cosine."""
        with in_langchain_terms():
            _, where = self._by_meaning(kwargs)
            self._stale.drop(strict=False)
            with self.index.snapshot():
                return self._scored(self.index.nearest(embedding, k, where))

    async def asimilarity_search_with_score_by_vector(
        self, embedding: list[float], k: int = 4, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """The same without blocking the event loop."""
        return await run_in_executor(
            None, self.similarity_search_with_score_by_vector, embedding, k, **kwargs
        )

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        **kwargs: Any,
    ) -> list[Document]:
        """Documents near to a query and unlike each other; `lambda_mult` from 0 (unlike) to 1."""
        with in_langchain_terms():
            encoder, _ = self._by_meaning(kwargs)
            vector = encoder.embed([query], query=True)[0].tolist()
        return self.max_marginal_relevance_search_by_vector(
            vector, k, fetch_k, lambda_mult, **kwargs
        )

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        **kwargs: Any,
    ) -> list[Document]:
        """Documents near to a vector and unlike each other."""
        with in_langchain_terms():
            _, where = self._by_meaning(kwargs)
            self._stale.drop(strict=False)
            with self.index.snapshot():
                found = self.index.nearest(embedding, max(k, fetch_k), where)
                vectors = self.index.vectors([str(one.id) for one in found])
                chosen = maximal_marginal_relevance(
                    np.asarray(embedding, dtype=np.float32),
                    [vectors[str(one.id)].tolist() for one in found],
                    lambda_mult=lambda_mult,
                    k=k,
                )
                return self._documents([found[at] for at in chosen])

    def _similarity_search_with_relevance_scores(
        self, query: str, k: int = 4, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """With the cosine from 0 to 1; BM25's scores have no such range."""
        with in_langchain_terms():
            if self._options(kwargs)[1] != "meaning":
                raise InputError(
                    "Only cosines have a range, and this search ranks otherwise. Open the store "
                    "with embedding= and use ranking='meaning', or search without a threshold."
                )
        found = self.similarity_search_with_score(query, k, **kwargs)
        return [(one, min(1.0, max(0.0, score))) for one, score in found]

    async def _asimilarity_search_with_relevance_scores(
        self, query: str, k: int = 4, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        return await run_in_executor(
            None, self._similarity_search_with_relevance_scores, query, k, **kwargs
        )

    # What calls say.

    def _options(self, given: Mapping[str, Any]) -> tuple[Where | None, Ranking]:
        _refuse({key: one for key, one in given.items() if key not in ("filter", "ranking")})
        ranking = given.get("ranking")
        chosen = self._ranking if ranking is None else self._checked(ranking)
        return self._where(given.get("filter")), chosen

    def _by_meaning(self, given: Mapping[str, Any]) -> tuple[Encoder, Where | None]:
        """What embeds, and the filter, of a search that compares vectors."""
        _refuse({key: one for key, one in given.items() if key != "filter"})
        if self.index.encoder is None:
            raise InputError(
                "This search compares vectors, and the store has no embeddings. Open it with "
                "embedding=, or use similarity_search."
            )
        return self.index.encoder, self._where(given.get("filter"))

    def _checked(self, ranking: Any) -> Ranking:
        if ranking not in ("meaning", "words", "hybrid"):
            raise InputError(
                f"ranking must be 'meaning', 'words' or 'hybrid', not {ranking!r:.80}. Leave it "
                "out for what the store has."
            )
        if ranking != "words" and self.index.encoder is None:
            raise InputError(
                f"The ranking {ranking!r} needs embeddings. Open the store with embedding=."
            )
        checked: Ranking = ranking
        return checked

    def _where(self, filter: Any) -> Where | None:
        if filter is None:
            return None
        if callable(filter):
            return lambda passage: bool(filter(*self._documents([passage])))
        if not isinstance(filter, Mapping):
            raise InputError(
                f"filter must be a mapping of metadata or a function, not "
                f"{type(filter).__name__}. Write filter={{'year': 1931}}."
            )
        inside = (key for one in filter.values() if isinstance(one, Mapping) for key in one)
        for name in (*filter, *inside):
            if str(name).startswith("$"):
                raise InputError(
                    f"A filter with the operator {name!r:.80} can't be used here. Write a "
                    "function: filter=lambda document: document.metadata['year'] > 1930."
                )
        missing = object()

        def equal(passage: Passage) -> bool:
            metadata = {"title": passage.title, **passage.metadata}
            return all(metadata.get(key, missing) == one for key, one in filter.items())

        return equal

    # Passages as documents.

    def _scored(self, found: Sequence[Passage]) -> list[tuple[Document, float]]:
        scores = [0.0 if one.score is None else one.score for one in found]
        return list(zip(self._documents(found), scores, strict=True))

    def _documents(self, passages: Sequence[Passage]) -> list[Document]:
        originals = self.index.originals([one.id for one in passages if one.id is not None])
        return [_document(one, originals.get(one.id or "")) for one in passages]


def _document(passage: Passage, original: Any) -> Document:
    """The document that a passage was; one from a file is given what `ChatRagWindows` looks for."""
    if not isinstance(original, dict) or _METADATA not in original:
        title = {} if passage.title is None else {"title": passage.title}
        metadata = {**passage.metadata, **title, **chunk_metadata(passage)}
        return Document(passage.text, id=passage.id, metadata=metadata)
    document = Document(passage.text, id=passage.id, metadata=original[_METADATA])
    if passage_of(document).before != passage.before:  # the index knows the chunks in front of it
        document.metadata.update(chunk_metadata(passage))
    return document


def _refuse(options: Mapping[str, Any]) -> None:
    if options:
        raise InputError(
            f"This store knows no argument {sorted(options)}. Searches take filter= and ranking=, "
            "additions ids=."
        )


class _Encoder:
    """LangChain's embeddings as an index asks for them, of length 1."""

    def __init__(self, embeddings: Embeddings) -> None:
        self.embeddings = embeddings
        named = getattr(embeddings, "model_name", None) or getattr(embeddings, "model", None)
        kind = type(embeddings).__name__
        self.name = f"{kind}({named})" if isinstance(named, str) else kind
        # Asked once: it may be a service that is paid by the call.
        self._probe = _normalized(embeddings.embed_documents(list(PROBE)))
        self.dimension = self._probe.shape[1]

    def embed(
        self, texts: Sequence[str], *, query: bool, progress: Progress | None = None
    ) -> Vectors:
        if not query and tuple(texts) == PROBE:
            return self._probe
        if query:
            made = [self.embeddings.embed_query(one) for one in texts]
        else:
            made = self.embeddings.embed_documents(list(texts))
        if progress is not None:
            progress(len(texts), len(texts))
        return _normalized(made)


class _OfEncoder(Embeddings):
    """An index's own model as LangChain's embeddings."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        made: list[list[float]] = self._encoder.embed(texts, query=False).tolist()
        return made

    def embed_query(self, text: str) -> list[float]:
        made: list[float] = self._encoder.embed([text], query=True)[0].tolist()
        return made


def _normalized(vectors: Sequence[Sequence[float]]) -> Vectors:
    made = np.asarray(vectors, dtype=np.float32)
    if made.ndim != 2 or not np.isfinite(made).all():
        raise InputError(
            f"The embeddings gave an array of the shape {made.shape} instead of a finite vector "
            "for each text. Check the embedding model."
        )
    norms = np.linalg.norm(made, axis=1, keepdims=True)
    norms[norms == 0] = 1.0
    return (made / norms).astype(np.float32)
