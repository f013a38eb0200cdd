"""Source nodes of one answer: copies that carry how much attention each node got."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llama_index.core.llms import ChatResponse
from llama_index.core.schema import BaseNode, NodeWithScore

logger = logging.getLogger(__name__)

ATTENTION_MASS = "attention_mass"
"""Metadata key: share of the attention that a node got while the answer was written, 0 to 1."""

NOTE = "rag_windows_note"
"""Metadata key: why a node made no window of its own, or several; set only where that happened."""


class SourceNode(NodeWithScore):
    """A node of one answer.

    The node inside is a copy with metadata of its own, so that what is noted there never reaches
    the retriever's node. The noted keys are excluded from what embeddings and models are shown.
    """

    @classmethod
    def class_name(cls) -> str:
        """Name in serialized form."""
        return "SourceNode"

    @property
    def attention_mass(self) -> float | None:
        """Share of the attention; None until the answer is complete."""
        mass: float | None = self.node.metadata.get(ATTENTION_MASS)
        return mass


def annotated(node: BaseNode, notes: Mapping[str, Any]) -> BaseNode:
    """A copy of a node with more metadata, which neither models nor embeddings are shown."""
    copy = node.model_copy()
    # Assigned one by one: the copy still shares these containers with the original.
    copy.metadata = {**node.metadata, **notes}
    for name in ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys"):
        before = list(getattr(node, name))
        setattr(copy, name, [*before, *(key for key in notes if key not in before)])
    return copy


def as_sources(nodes: Iterable[NodeWithScore]) -> list[SourceNode]:
    """Copies to note an answer's masses on; a source that has none yet stands for itself."""
    sources = []
    for one in nodes:
        if not isinstance(one, SourceNode) or ATTENTION_MASS in one.node.metadata:
            node = annotated(one.node, {ATTENTION_MASS: None, NOTE: None})
            for key in (ATTENTION_MASS, NOTE):
                del node.metadata[key]
            one = SourceNode(node=node, score=one.score)
        sources.append(one)
    return sources


def note_answer(sources: Sequence[SourceNode], response: ChatResponse) -> None:
    """Write an answer's attention masses and notes on its sources; a partial answer has none."""
    if not sources or not isinstance(response.raw, Mapping):
        return
    for citation in response.raw.get("citations") or ():
        sources[citation["passage"]].node.metadata[ATTENTION_MASS] = citation["mass"]
    for note in response.raw.get("notes") or ():
        logger.info("%s", note["message"])
        sources[note["passage"]].node.metadata[NOTE] = note["message"]
