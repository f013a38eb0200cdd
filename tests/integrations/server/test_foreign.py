"""`serve --retriever module:name`: what frameworks rank is what the server answers from."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from rag_windows import InputError, RetrievalError, WindowedLM
from rag_windows_server import Settings, create_app
from rag_windows_server.command import FleetPart, ServeOptions, serve
from rag_windows_server.foreign import named_retriever
from tests.integrations.server.conftest import asking
from tests.integrations.server.test_chat import ask

MODULE = """
    from langchain_core.documents import Document
    from langchain_core.embeddings import DeterministicFakeEmbedding
    from langchain_core.retrievers import BaseRetriever as LangChainRetriever
    from langchain_core.vectorstores import InMemoryVectorStore
    from llama_index.core import MockEmbedding, VectorStoreIndex
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, TextNode
    from rag_windows import Passage
    from rag_windows_retrievers import BM25Retriever

    TEXTS = {f"d{n}": f"Text {n} of the shelf." for n in range(6)}
    documents = [Document(text, id=name) for name, text in TEXTS.items()]
    nodes = [TextNode(text=text, id_=name) for name, text in TEXTS.items()]

    class Fixed(LangChainRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            return documents

    class Listed(BaseRetriever):
        def _retrieve(self, bundle):
            return [NodeWithScore(node=one, score=1.0) for one in nodes]

    class Broken:
        def retrieve(self, query, k):
            raise ValueError("the store is away\\nmore")

    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
    store.add_documents(documents)
    langchain = Fixed()
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=4))
    llama_index = Listed()
    own = BM25Retriever([Passage(text, id=name) for name, text in TEXTS.items()])
    broken = Broken()

    class Held:
        store = store

    def make():
        return own

    number = 7
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module's folder, in which the command runs."""
    (tmp_path / "shelf.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "shelf", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    "name", ["store", "langchain", "index", "llama_index", "own", "make", "Held.store"]
)
def test_every_framework_is_asked_in_its_way(name: str) -> None:
    found = named_retriever(f"shelf:{name}").retrieve("text of the shelf", 3)
    assert len({one.id for one in found} & {f"d{number}" for number in range(6)}) == 3
    assert all(one.text == f"Text {(one.id or '')[1:]} of the shelf." for one in found)
    assert named_retriever(f"shelf:{name}").retrieve(" ", 3) == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("shelf", "must be MODULE:NAME, such as search:retriever"),
        ("shelf:", "must be MODULE:NAME"),
        ("nowhere:x", r"can't be found \(No module named 'nowhere'\)"),
        ("shelf:nothing", r"can't be found \(module 'shelf' has no attribute 'nothing'\)"),
        ("shelf:number", "names int, which can't be asked. Name a retriever"),
    ],
)
def test_a_wrong_name_is_one_sentence(name: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        named_retriever(name)


def test_a_retriever_that_fails_says_so_in_one_line() -> None:
    with pytest.raises(
        RetrievalError, match=r"shelf:broken failed \(ValueError: the store is away\)"
    ):
        named_retriever("shelf:broken").retrieve("text", 2)


async def test_the_server_answers_from_it(lm: WindowedLM) -> None:
    app = create_app(lm, Settings(top_k=2), named_retriever("shelf:own"))
    async with asking(app) as client:
        messages = [{"role": "user", "content": "text of the shelf?"}]
        answer = await ask(client, messages=messages)
    assert len(answer["choices"][0]["message"]["citations"]) == 2


def test_it_stands_in_the_place_of_documents() -> None:
    from rag_windows.cli import LoadOptions, SearchOptions

    options, alone = ServeOptions(port=0, retriever="shelf:own"), FleetPart()
    for search, model, fleet, why in (
        (SearchOptions(docs=["."]), "tiny-reader", alone, "Leave --docs and --index out"),
        (SearchOptions(), None, alone, "needs a model"),
        (SearchOptions(), "tiny-reader", FleetPart(replicas=2), "for one process"),
    ):
        with pytest.raises(InputError, match=why):
            serve.__wrapped__(  # type: ignore[attr-defined]  # what the command line calls
                search=search, model=LoadOptions(model=model), server=options, fleet=fleet
            )
