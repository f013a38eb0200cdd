"""Nodes as passages for the model, as sources with their attention masses, and their order."""

from __future__ import annotations

import logging
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from llama_index.core.llms import ChatResponse
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle

from rag_windows import Passage
from rag_windows.errors import InputError
from rag_windows.integration import passage_of

logger = logging.getLogger(__name__)

ATTENTION_MASS = "attention_mass"
"""Metadata key: share of the attention that a node got while the answer was written, 0 to 1."""

NOTE = "rag_windows_note"
"""Metadata key: why a node made no window of its own, or several; set only where that happened."""

DROP, SUPPORTS = "answer_drop", "answer_supports"
"""Metadata keys, with citations="removal": what the answer loses without a node, in nats; and
whether it rests on it, "yes", "no" or "unsure"."""

STATEMENTS = "answer_statements"
"""Metadata key: ``{"start", "end", "text"}`` of each sentence of the answer that a node carried."""

_NOTED = (ATTENTION_MASS, DROP, SUPPORTS, STATEMENTS, NOTE)

DUPLICATES = "rag_windows_duplicates"
"""Metadata key on a node that stayed: ``{"id", "score"}`` of each node that was left out for it."""


def passage_of_node(node: NodeWithScore | BaseNode) -> Passage:
    """The passage that a node becomes; id, score and metadata stay.

    The text is what LlamaIndex shows a model (`MetadataMode.LLM`: text with the metadata that is
    not excluded), but for a title, which becomes the passage's own and heads its window. A title
    that ``excluded_llm_metadata_keys`` names is not shown.

    Raises:
        InputError: not a node.
    """
    if not isinstance(node.node if isinstance(node, NodeWithScore) else node, BaseNode):
        raise InputError(
            f"nodes must hold NodeWithScore or nodes, not {type(node).__name__}. Give texts and "
            "mappings as passages= instead."
        )
    return passage_of(node)


class SourceNode(NodeWithScore):
    """A node of one answer.

    The node inside is a copy with metadata of its own, so that what is noted there never reaches
    the retriever's node. The noted keys are excluded from what embeddings and models are shown.
    """

    @property
    def attention_mass(self) -> float | None:
        """Share of the attention; None until the answer is complete."""
        mass: float | None = self.node.metadata.get(ATTENTION_MASS)
        return mass


def annotated(node: BaseNode, notes: Mapping[str, Any], *keys: str) -> BaseNode:
    """A copy with more metadata, of which these and further keys are shown to no model."""
    copy = node.model_copy()
    # Assigned one by one: the copy still shares these containers with the original.
    copy.metadata = {**node.metadata, **notes}
    for name in ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys"):
        setattr(copy, name, list(dict.fromkeys([*getattr(node, name), *notes, *keys])))
    return copy


def as_sources(nodes: Iterable[NodeWithScore]) -> list[NodeWithScore]:
    """Copies to note an answer's citations on; a source that has none yet stands for itself."""
    sources: list[NodeWithScore] = []
    for one in nodes:
        if not isinstance(one, SourceNode) or ATTENTION_MASS in one.node.metadata:
            node = annotated(one.node, {}, *_NOTED)
            for key in _NOTED:
                node.metadata.pop(key, None)
            one = SourceNode(node=node, score=one.score)
        sources.append(one)
    return sources


def note(sources: Sequence[NodeWithScore] | None, response: ChatResponse) -> None:
    """Write an answer's citations and notes on its sources; a partial answer has none."""
    if not sources or not isinstance(response.raw, Mapping):
        return
    for citation in response.raw.get("citations") or ():
        metadata = sources[citation["passage"]].node.metadata
        metadata[ATTENTION_MASS] = citation["mass"]
        if citation["drop"] is not None:
            metadata |= {DROP: citation["drop"], SUPPORTS: citation["supports"]}
    for statement in response.raw.get("statements") or ():
        place = {name: statement[name] for name in ("start", "end", "text")}
        for citation in statement["citations"]:
            metadata = sources[citation["passage"]].node.metadata
            metadata.setdefault(STATEMENTS, []).append(place)
    for note in response.raw.get("notes") or ():
        logger.info("%s", note["message"])
        if note["passage"] is not None:
            sources[note["passage"]].node.metadata[NOTE] = note["message"]


class WindowOrderPostprocessor(BaseNodePostprocessor):
    """Leaves each text in once, with its best score, and puts the nodes in order.

    Nodes count as equal if they share their node id, or their title and text except for letter
    case, spacing and compatible characters (Unicode NFKC). Nodes that are left out are logged, and
    listed in the metadata of a copy of the remaining node, under ``rag_windows_duplicates``. The
    caller's nodes are not changed.

    Attributes:
        order: "score", the best first (nodes without a score last); "score-ascending", the best
            last; "document", in the order of their documents, of which the one with the best node
            comes first; or "given".
    """

    order: Literal["score", "score-ascending", "document", "given"] = "score"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        groups: list[list[NodeWithScore]] = []  # of nodes that count as one
        known: dict[Any, list[NodeWithScore]] = {}
        for node in nodes:
            keys = [("id", node.node_id), *_text_key(node.node)]
            group = next((known[key] for key in keys if key in known), [])
            if not group:
                groups.append(group)
            group.append(node)
            for key in keys:
                known.setdefault(key, group)
        unique = [_best(group) for group in groups]
        if self.order == "given":
            return unique
        ordered = sorted(unique, key=_score, reverse=True)
        if self.order == "score-ascending":
            return ordered[::-1]
        if self.order == "score":
            return ordered
        documents: dict[str, list[NodeWithScore]] = {}
        for node in ordered:
            # A node without a source document is a document of its own.
            documents.setdefault(node.node.ref_doc_id or node.node_id, []).append(node)
        return [node for each in documents.values() for node in sorted(each, key=_start)]


def _best(group: Sequence[NodeWithScore]) -> NodeWithScore:
    """The node that stays, with a record of the others: the first of those that score best."""
    best = max(group, key=_score)
    dropped = [{"id": one.node_id, "score": one.score} for one in group if one is not best]
    if not dropped:
        return best
    logger.info(
        "Nodes %s were left out, because they are the same as node %s.", dropped, best.node_id
    )
    return NodeWithScore(node=annotated(best.node, {DUPLICATES: dropped}), score=best.score)


def _text_key(node: BaseNode) -> list[tuple[str, ...]]:
    """What nodes of equal title and text share; nothing for one without text."""
    texts = (node.get_content(metadata_mode=MetadataMode.NONE), passage_of_node(node).title or "")
    plain = [" ".join(unicodedata.normalize("NFKC", t).casefold().split()) for t in texts]
    return [("text", *plain)] if plain[0] else []


def _score(node: NodeWithScore) -> float:
    if node.score is None or math.isnan(node.score):
        return -math.inf
    return node.score


def _start(node: NodeWithScore) -> float:
    start = getattr(node.node, "start_char_idx", None)
    return math.inf if start is None else start
