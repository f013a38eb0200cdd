"""One node for each text, in a chosen order."""

from __future__ import annotations

import logging
import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from llama_index.core.bridge.pydantic import Field
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle

from llama_index.llms.rag_windows.messages import passage_of_node
from llama_index.llms.rag_windows.source_nodes import annotated

logger = logging.getLogger(__name__)

DUPLICATES = "rag_windows_duplicates"
"""Metadata key on a node that stayed: a list of ``{"id", "score", "same"}``, one for each node that
was left out for it; ``same`` is "id" or "text"."""

Order = Literal["score", "score-ascending", "document", "given"]


@dataclass(slots=True)
class _Group:
    """Nodes that count as one; the first member stays unless another one scores better."""

    members: list[NodeWithScore]
    same: list[str] = field(default_factory=lambda: [""])

    def result(self) -> NodeWithScore:
        best = max(
            range(len(self.members)), key=lambda index: (_score(self.members[index]), -index)
        )
        kept = self.members[best]
        if len(self.members) == 1:
            return kept
        # The first member joined nothing; where it is left out, the reason is the winner's.
        reasons = [*self.same]
        reasons[0] = self.same[best]
        dropped = [
            {"id": node.node_id, "score": node.score, "same": reasons[index]}
            for index, node in enumerate(self.members)
            if index != best
        ]
        for one in dropped:
            logger.info(
                "Node %s (score %s) is left out: node %s (score %s) has the same %s.",
                *(one["id"], one["score"], kept.node_id, kept.score, one["same"]),
            )
        node = annotated(kept.node, {DUPLICATES: dropped})
        return NodeWithScore(node=node, score=kept.score)


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

    order: Order = Field(
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
        kept = [group.result() for group in _groups(nodes)]
        if self.order == "given":
            return kept
        ordered = sorted(kept, key=_score, reverse=True)
        if self.order == "score-ascending":
            return ordered[::-1]
        if self.order == "document":
            return _by_document(ordered)
        return ordered


def _groups(nodes: Iterable[NodeWithScore]) -> list[_Group]:
    groups: list[_Group] = []
    by_id: dict[str, _Group] = {}
    by_text: dict[Any, _Group] = {}
    for node in nodes:
        text = _text(node.node)
        group, same = by_id.get(node.node_id), "id"
        if group is None and text is not None:
            group, same = by_text.get(text), "text"
        if group is None:
            group = _Group([node])
            groups.append(group)
        else:
            group.members.append(node)
            group.same.append(same)
        by_id.setdefault(node.node_id, group)
        if text is not None:
            by_text.setdefault(text, group)
    return groups


def _text(node: BaseNode) -> tuple[str, str] | None:
    """What two equal nodes share; None for a node without text, which equals no other one."""
    text = _normalized(node.get_content(metadata_mode=MetadataMode.NONE))
    return (_normalized(passage_of_node(node).title or ""), text) if text else None


def _normalized(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _score(node: NodeWithScore) -> float:
    if node.score is None or math.isnan(node.score):
        return -math.inf
    return node.score


def _by_document(ordered: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    documents: dict[str, list[NodeWithScore]] = {}
    for node in ordered:
        # A node without a source document is a document of its own.
        documents.setdefault(node.node.ref_doc_id or node.node_id, []).append(node)
    return [node for nodes in documents.values() for node in sorted(nodes, key=_start)]


def _start(node: NodeWithScore) -> float:
    start = getattr(node.node, "start_char_idx", None)
    return math.inf if start is None else start
