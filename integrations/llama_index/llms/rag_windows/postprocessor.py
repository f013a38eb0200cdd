"""One node for each text, in a chosen order."""

from __future__ import annotations

import logging
import math
import unicodedata
from typing import Any, Literal

from llama_index.core.bridge.pydantic import Field
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle

from llama_index.llms.rag_windows.messages import passage_of_node
from llama_index.llms.rag_windows.synthesizer import annotated

logger = logging.getLogger(__name__)

DUPLICATES = "rag_windows_duplicates"
"""Metadata key on a node that stayed: a list of ``{"id", "score", "same"}``, one for each node that
was left out for it; ``same`` is "id" or "text"."""


class WindowOrderPostprocessor(BaseNodePostprocessor):
    """Leaves each text in once, with its best score, and puts the nodes in order.

    Nodes count as one if they share their node id, or their title and text up to letter case,
    spacing and compatible characters (Unicode NFKC). What is left out is logged, and listed on a
    copy of the node that stays, in its metadata under ``rag_windows_duplicates``. The caller's
    nodes are not changed.

    Attributes:
        order: "score", the best first (nodes without a score last); "score-ascending", its
            reverse; "document", as they stand in their documents, the documents in order of their
            best node; or "given".
    """

    order: Literal["score", "score-ascending", "document", "given"] = Field(
        default="score",
        description="How the nodes are ordered: score, score-ascending, document or given.",
    )

    @classmethod
    def class_name(cls) -> str:
        """Name in serialized form."""
        return "WindowOrderPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        # Nodes that count as one, each with what it shares with those before it: "id" or "text".
        groups: list[list[tuple[NodeWithScore, str]]] = []
        known: dict[Any, list[tuple[NodeWithScore, str]]] = {}
        for node in nodes:
            keys = {"id": ("id", node.node_id), **_text_key(node.node)}
            same = next((name for name, key in keys.items() if key in known), "")
            group = known[keys[same]] if same else []
            if not same:
                groups.append(group)
            group.append((node, same))
            for key in keys.values():
                known.setdefault(key, group)
        kept = [_best(group) for group in groups]
        if self.order == "given":
            return kept
        ordered = sorted(kept, key=_score, reverse=True)
        if self.order == "score-ascending":
            return ordered[::-1]
        if self.order == "score":
            return ordered
        documents: dict[str, list[NodeWithScore]] = {}
        for node in ordered:
            # A node without a source document is a document of its own.
            documents.setdefault(node.node.ref_doc_id or node.node_id, []).append(node)
        return [node for each in documents.values() for node in sorted(each, key=_start)]


def _best(group: list[tuple[NodeWithScore, str]]) -> NodeWithScore:
    """The node that stays, with a record of the others: the first of those that score best."""
    if len(group) == 1:
        return group[0][0]
    best = max(range(len(group)), key=lambda place: _score(group[place][0]))
    kept, shared = group[best]
    # The first node joined nothing; where it is left out, the reason is the winner's.
    dropped = [
        {"id": node.node_id, "score": node.score, "same": same or shared}
        for place, (node, same) in enumerate(group)
        if place != best
    ]
    for one in dropped:
        logger.info(
            "Node %s (score %s) is left out: node %s (score %s) has the same %s.",
            *(one["id"], one["score"], kept.node_id, kept.score, one["same"]),
        )
    return NodeWithScore(node=annotated(kept.node, {DUPLICATES: dropped}), score=kept.score)


def _text_key(node: BaseNode) -> dict[str, tuple[str, ...]]:
    """What nodes of equal title and text share; nothing for one without text."""
    texts = (node.get_content(metadata_mode=MetadataMode.NONE), passage_of_node(node).title or "")
    plain = [" ".join(unicodedata.normalize("NFKC", t).casefold().split()) for t in texts]
    return {"text": ("text", *plain)} if plain[0] else {}


def _score(node: NodeWithScore) -> float:
    if node.score is None or math.isnan(node.score):
        return -math.inf
    return node.score


def _start(node: NodeWithScore) -> float:
    start = getattr(node.node, "start_char_idx", None)
    return math.inf if start is None else start
