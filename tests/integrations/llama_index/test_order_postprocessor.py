from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from llama_index.core.schema import MetadataMode, NodeRelationship, NodeWithScore, TextNode

from llama_index.llms.rag_windows.postprocessor import DUPLICATES, WindowOrderPostprocessor


def node(text: str, name: str, score: float | None = None, **fields: Any) -> NodeWithScore:
    return NodeWithScore(node=TextNode(text=text, id_=name, **fields), score=score)


def ids(nodes: list[NodeWithScore]) -> list[str]:
    return [one.node_id for one in nodes]


def test_best_scores_come_first_and_unknown_ones_last() -> None:
    nodes = [node("a", "a", 0.1), node("b", "b"), node("c", "c", 0.9), node("d", "d", 0.1)]
    assert ids(WindowOrderPostprocessor().postprocess_nodes(nodes)) == ["c", "a", "d", "b"]
    ascending = WindowOrderPostprocessor(order="score-ascending").postprocess_nodes(nodes)
    assert ids(ascending) == ["b", "d", "a", "c"]
    given = WindowOrderPostprocessor(order="given").postprocess_nodes(nodes)
    assert ids(given) == ["a", "b", "c", "d"]


def test_a_score_that_is_no_number_counts_as_unknown() -> None:
    nodes = [node("a", "a", float("nan")), node("b", "b", -3.0)]
    assert ids(WindowOrderPostprocessor().postprocess_nodes(nodes)) == ["b", "a"]


def test_document_order_follows_the_text_and_the_best_document() -> None:
    def part(name: str, document: str, start: int | None, score: float) -> NodeWithScore:
        source = {NodeRelationship.SOURCE: TextNode(id_=document).as_related_node_info()}
        return node(name, name, score, relationships=source, start_char_idx=start)

    nodes = [
        part("x2", "x", 50, 0.5),
        part("y1", "y", 0, 0.9),
        part("x1", "x", 10, 0.1),
        part("x-", "x", None, 0.8),
        node("alone", "alone", 0.6),
    ]
    found = WindowOrderPostprocessor(order="document").postprocess_nodes(nodes)
    assert ids(found) == ["y1", "x1", "x2", "x-", "alone"]


def test_duplicates_leave_the_best_score_and_a_record(caplog: pytest.LogCaptureFixture) -> None:
    nodes = [
        node("The  bridge was\nbuilt.", "a", 0.2),
        node("Another text.", "b", 0.5),
        node("the bridge WAS built.", "c", 0.7),
        node("Another text.", "b", 0.1),
    ]
    with caplog.at_level(logging.INFO):
        kept = WindowOrderPostprocessor().postprocess_nodes(nodes)
    assert [(one.node_id, one.score) for one in kept] == [("c", 0.7), ("b", 0.5)]
    assert kept[0].metadata[DUPLICATES] == [{"id": "a", "score": 0.2, "same": "text"}]
    assert kept[1].metadata[DUPLICATES] == [{"id": "b", "score": 0.1, "same": "id"}]
    assert "Node a (score 0.2) is left out" in caplog.text
    assert "Node b (score 0.1) is left out" in caplog.text


def test_the_callers_nodes_stay_as_they_are() -> None:
    nodes = [node("same", "a", 0.1, metadata={"page": 1}), node("same", "b", 0.9)]
    before = [one.model_dump() for one in nodes]
    kept = WindowOrderPostprocessor().postprocess_nodes(nodes)
    assert [one.model_dump() for one in nodes] == before
    assert ids(nodes) == ["a", "b"]
    # The record is for people: no model and no embedding gets to see it.
    assert kept[0].node.get_content(metadata_mode=MetadataMode.LLM) == "same"
    assert kept[0].node.get_content(metadata_mode=MetadataMode.EMBED) == "same"


def test_equal_texts_under_different_titles_are_different() -> None:
    nodes = [
        node("It opened in 1861.", "a", 0.2, metadata={"title": "Castle Armouth"}),
        node("It opened in 1861.", "b", 0.5, metadata={"title": "Marane Tannery"}),
        node("It opened in 1861.", "c", 0.1, metadata={"title": "castle  armouth"}),
    ]
    assert ids(WindowOrderPostprocessor().postprocess_nodes(nodes)) == ["b", "a"]


def test_one_node_twice_is_a_duplicate_of_itself() -> None:
    (kept,) = WindowOrderPostprocessor().postprocess_nodes([node("a", "a", 0.1)] * 2)
    assert kept.metadata[DUPLICATES] == [{"id": "a", "score": 0.1, "same": "id"}]


def test_nodes_without_text_are_not_each_others_duplicates() -> None:
    nodes = [node("", "a", 0.2), node(" \n", "b", 0.5)]
    assert ids(WindowOrderPostprocessor().postprocess_nodes(nodes)) == ["b", "a"]


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="document"):
        WindowOrderPostprocessor(order="alphabet")  # type: ignore[arg-type] # it is refused


def test_async_and_nothing_at_all() -> None:
    post = WindowOrderPostprocessor()
    assert post.postprocess_nodes([]) == []
    found = asyncio.run(post.apostprocess_nodes([node("a", "a", 0.1), node("b", "b", 0.2)]))
    assert ids(found) == ["b", "a"]
