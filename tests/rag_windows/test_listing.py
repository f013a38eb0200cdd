"""Documents out of whatever retrieves them, and warming with them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rag_windows import InputError, Passage, WindowedLM
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.passage import passages_of
from tests.rag_windows import small

PASSAGES = [
    Passage("The first.", id="one"),
    Passage("The second.", id="two"),
    Passage("The third.", id="report#3", metadata={"source": "report.txt"}),
]


def ours() -> Any:
    from rag_windows_retrievers import BM25Retriever

    return BM25Retriever(PASSAGES)


def langchain_vector_store() -> Any:
    from langchain_core.embeddings import DeterministicFakeEmbedding
    from langchain_core.vectorstores import InMemoryVectorStore

    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=4))
    store.add_documents(langchain_documents())
    return store


def langchain_documents() -> list[Any]:
    from langchain_core.documents import Document

    return [Document(p.text, id=p.id, metadata=dict(p.metadata)) for p in PASSAGES]


def llama_index() -> Any:
    from llama_index.core import MockEmbedding, VectorStoreIndex
    from llama_index.core.schema import TextNode

    hidden = {"excluded_llm_metadata_keys": ["source"]}
    nodes = [TextNode(id_=p.id, text=p.text, metadata=dict(p.metadata), **hidden) for p in PASSAGES]
    return VectorStoreIndex(nodes, embed_model=MockEmbedding(4))


SOURCES: dict[str, tuple[str, Callable[[], Any]]] = {
    "ours": ("bm25s", ours),
    "hybrid": ("bm25s", lambda: SimpleNamespace(retrievers=(ours(), ours()))),
    "langchain store": ("langchain_core", langchain_vector_store),
    "langchain retriever": ("langchain_core", lambda: langchain_vector_store().as_retriever()),
    "langchain list": ("langchain_core", lambda: SimpleNamespace(docs=langchain_documents())),
    "llama-index": ("llama_index.core", llama_index),
    "llama-index retriever": ("llama_index.core", lambda: llama_index().as_retriever()),
}


@pytest.mark.parametrize("name", SOURCES)
def test_documents_of_what_retrieves(name: str) -> None:
    module, make = SOURCES[name]
    pytest.importorskip(module)
    listed = sorted(passages_of(make()), key=lambda passage: passage.id or "")
    assert [(p.id, p.text, p.title) for p in listed] == sorted(
        (p.id, p.text, p.title) for p in PASSAGES
    )
    assert all(isinstance(passage, Passage) for passage in listed)


def test_warming_from_a_retriever() -> None:
    pytest.importorskip("bm25s")
    cache = PassageCache("1MB")
    lm = WindowedLM(small.model(), small.tokenizer(), cache=cache)
    assert lm.warm_from_retriever(ours()).encoded == 3
    answer = lm.generate("What?", PASSAGES, max_new_tokens=1)
    assert answer.usage.cached_tokens > sum(len(window.ids) for window in answer.windows)
    assert cache.invalidate("report") == 1


def test_what_can_not_be_listed() -> None:
    with pytest.raises(InputError, match=r"Closed.*list of passages"):
        passages_of(type("Closed", (), {"invoke": lambda self, query: []})())
