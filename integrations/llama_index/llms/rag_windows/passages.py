"""LlamaIndex's nodes and citable blocks as passages."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.base.llms.types import CitableBlock, TextBlock
from llama_index.core.schema import BaseNode, NodeWithScore

from rag_windows import Passage
from rag_windows.errors import InputError
from rag_windows.integration import passage_of


def passage_of_node(node: NodeWithScore | BaseNode) -> Passage:
    """The passage that a node becomes; id, score and metadata are kept.

    The text is what LlamaIndex shows a model (`MetadataMode.LLM`: text with the metadata that is
    not excluded), but for a title, which becomes the passage's own and heads its window. A title
    that ``excluded_llm_metadata_keys`` names is not shown.

    Raises:
        InputError: not a node.
    """
    inner = node.node if isinstance(node, NodeWithScore) else node
    if not isinstance(inner, BaseNode):
        raise InputError(
            f"nodes must hold NodeWithScore or nodes, not {type(node).__name__}; give texts and "
            "mappings as passages= instead."
        )
    return passage_of(node)


def passages_of_nodes(nodes: Sequence[NodeWithScore | BaseNode]) -> list[Passage]:
    """`passage_of_node` for a list.

    Raises:
        InputError: not a list of nodes.
    """
    if isinstance(nodes, str | NodeWithScore | BaseNode):
        raise InputError("nodes must be a list of nodes, not a single one; wrap it in [].")
    return [passage_of_node(node) for node in nodes]


def passage_of_block(block: CitableBlock) -> Passage:
    """The passage that a citable block becomes: ``source`` is its id, ``title`` its title.

    Raises:
        InputError: the block holds something else than text.
    """
    texts = []
    for part in block.content:
        if not isinstance(part, TextBlock):
            raise InputError(
                f"The citable block {block.title!r} holds a {type(part).__name__}; this model "
                "reads text only. Give its text as a TextBlock."
            )
        texts.append(part.text)
    return Passage(text="\n".join(texts), id=block.source or None, title=block.title or None)


def block_of_passage(passage: Passage) -> CitableBlock:
    """The reverse of `passage_of_block`; score and metadata have no place in a block."""
    return CitableBlock(
        title=passage.title or "", source=passage.id or "", content=[TextBlock(text=passage.text)]
    )
