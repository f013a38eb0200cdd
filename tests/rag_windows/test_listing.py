"""Documents out of whatever retrieves them, and warming with them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rag_windows import InputError, Passage, PassageCache, WindowedLM
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


def langchain() -> Any:
    from langchain_core.documents import Document
    from langchain_core.embeddings import DeterministicFakeEmbedding
    from langchain_core.vectorstores import InMemoryVectorStore

    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=4))
    store.add_documents([Document(p.text, id=p.id, metadata=dict(p.metadata)) for p in PASSAGES])
    return store.as_retriever()


def llama_index() -> Any:
    from llama_index.core import MockEmbedding, VectorStoreIndex
    from llama_index.core.schema import TextNode

    hidden = {"excluded_llm_metadata_keys": ["source"]}
    nodes = [TextNode(id_=p.id, text=p.text, metadata=dict(p.metadata), **hidden) for p in PASSAGES]
    return VectorStoreIndex(nodes, embed_model=MockEmbedding(4)).as_retriever()


def hybrid() -> Any:
    return SimpleNamespace(retrievers=(ours(), ours()))


@pytest.mark.parametrize("make", [hybrid, langchain, llama_index])
def test_documents_of_what_retrieves(make: Callable[[], Any]) -> None:
    listed = sorted(passages_of(make()), key=lambda passage: passage.id or "")
    assert [(p.id, p.text, p.title) for p in listed] == sorted(
        (p.id, p.text, p.title) for p in PASSAGES
    )


def test_warming_from_a_retriever() -> None:
    cache = PassageCache("1MB")
    lm = WindowedLM(small.model(), small.tokenizer(), cache=cache)
    assert lm.warm_from_retriever(ours()).encoded == 3
    answer = lm.generate("What?", PASSAGES, max_new_tokens=1)
    assert answer.usage.cached_tokens > sum(len(window.ids) for window in answer.windows)
    with pytest.raises(InputError, match=r"Closed.*list of passages"):
        lm.warm_from_retriever(type("Closed", (), {"invoke": lambda self, query: []})())
