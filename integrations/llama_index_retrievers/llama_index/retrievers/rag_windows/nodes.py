"""Passages as nodes."""

from __future__ import annotations

from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode

from rag_windows import Passage
from rag_windows.integration import chunk_metadata


def node_of(passage: Passage, name: str | None = None) -> TextNode:
    """A node of a passage; of all that is known, a model is shown the title and the text.

    Args:
        passage: what becomes a node.
        name: its id, where the passage's own can't be taken.
    """
    metadata = {**passage.metadata, **chunk_metadata(passage)}
    hidden = [key for key in metadata if key != "title"]
    if passage.title is not None:
        metadata["title"] = passage.title
    source = {}
    if passage.document is not None:
        source[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=passage.document)
    return TextNode(
        id_=passage.id if name is None else name,
        text=passage.text,
        metadata=metadata,
        relationships=source,
        excluded_llm_metadata_keys=hidden,
        excluded_embed_metadata_keys=hidden,
    )
