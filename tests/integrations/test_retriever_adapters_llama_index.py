"""Our retrievers in LlamaIndex."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.schema import NodeWithScore

from llama_index.llms.rag_windows import passage_of_node
from llama_index.retrievers.rag_windows import RagWindowsRetriever
from rag_windows import InputError, Passage
from rag_windows_retrievers import (
    BM25Retriever,
    ConversationalRetriever,
    DenseRetriever,
    HybridRetriever,
    Reranker,
    Retriever,
)
from tests.integrations.slow_retriever import Slow, longest_gap
from tests.retrievers.small import CORPUS, WordEncoder, save_cross_encoder

QUERY = "the old bridge of Halden and its harbour"

MADE: dict[str, Callable[[Path], Retriever]] = {
    "bm25": lambda _: BM25Retriever(CORPUS),
    "dense": lambda _: DenseRetriever(CORPUS, WordEncoder()),
    "hybrid": lambda _: HybridRetriever([BM25Retriever(CORPUS)]),
    "conversational": lambda _: ConversationalRetriever(BM25Retriever(CORPUS)),
    "reranker": lambda folder: Reranker(
        BM25Retriever(CORPUS), save_cross_encoder(folder), device="cpu"
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_nodes_are_what_the_retriever_found(name: str, tmp_path: Path) -> None:
    ours = MADE[name](tmp_path)
    found = ours.retrieve(QUERY, 3)
    assert len(found) == 3
    retriever = RagWindowsRetriever(ours, similarity_top_k=3)
    for nodes in (retriever.retrieve(QUERY), asyncio.run(retriever.aretrieve(QUERY))):
        assert all(type(node) is NodeWithScore for node in nodes)
        again = [passage_of_node(node) for node in nodes]
        for one, passage in zip(again, found, strict=True):
            assert (one.text, one.id, one.title) == (passage.text, passage.id, passage.title)
            assert one.score == pytest.approx(passage.score, abs=1e-5)
            assert passage.metadata.items() <= one.metadata.items()


def test_nothing_is_lost_to_equal_ids() -> None:
    corpus = [Passage("old bridge", "x"), Passage("bridge, new", "x"), Passage("a bridge")]
    retriever = RagWindowsRetriever(BM25Retriever(corpus))
    nodes = retriever.retrieve("bridge")
    assert {node.text for node in nodes} == {one.text for one in corpus}
    assert len({node.node_id for node in nodes}) == 3
    assert "x" in {node.node_id for node in nodes}
    assert [node.node_id for node in retriever.retrieve("bridge")] == [n.node_id for n in nodes]


def test_events_come_once() -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    retriever = RagWindowsRetriever(
        BM25Retriever(CORPUS), callback_manager=CallbackManager([debug])
    )
    retriever.retrieve(QUERY)
    assert len(debug.get_event_pairs(CBEventType.RETRIEVE)) == 1


def test_it_does_not_block_the_event_loop() -> None:
    retriever = RagWindowsRetriever(Slow())
    assert asyncio.run(longest_gap(lambda: retriever.aretrieve("q"))) < 0.5


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="k must be at least 1"):
        RagWindowsRetriever(BM25Retriever(CORPUS), similarity_top_k=0)
