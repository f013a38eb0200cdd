"""The keys that a book searches, in blocks that never change."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from rag_windows.methods.key_search import KeySearch, page_owners

MOST_PASSAGES = 4096
"""Passages of one block at most, so that a change copies little."""


@dataclass(frozen=True, slots=True)
class Block:
    """The keys of some passages.

    Attributes:
        ids: of the passages.
        owners: (P,) int64, whose page each row is.
        rows: (P, width) fp32 in host memory, from `KeySearch.pages`.
    """

    ids: tuple[str, ...]
    owners: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, pages: Mapping[str, torch.Tensor]) -> Block:
        """A block of passages, at least one, by their ids."""
        owners = page_owners([len(rows) for rows in pages.values()])
        return cls(tuple(pages), owners, torch.cat(list(pages.values())))

    def without(self, ids: Collection[str]) -> Block | None:
        """The block without some passages; None if nothing is left."""
        kept = [index for index, one in enumerate(self.ids) if one not in ids]
        if len(kept) == len(self.ids):
            return self
        if not kept:
            return None
        places = torch.full((len(self.ids),), -1)
        places[kept] = torch.arange(len(kept))
        owners = places[self.owners]
        present = owners >= 0
        return Block(tuple(self.ids[i] for i in kept), owners[present], self.rows[present])


Blocks = tuple[Block, ...]


def with_pages(blocks: Blocks, pages: Mapping[str, torch.Tensor]) -> Blocks:
    """Blocks with more passages; small ones are joined, so that there are never many."""
    if not pages:
        return blocks
    grown = [*blocks, Block.of(pages)]
    while len(grown) > 1:
        first, second = grown[-2:]
        together = len(first.ids) + len(second.ids)
        if len(first.ids) > 2 * len(second.ids) or together > MOST_PASSAGES:
            break
        owners = torch.cat([first.owners, second.owners + len(first.ids)])
        joined = Block(first.ids + second.ids, owners, torch.cat([first.rows, second.rows]))
        grown[-2:] = [joined]
    return tuple(grown)


def without(blocks: Blocks, ids: Collection[str]) -> Blocks:
    """Blocks without some passages."""
    rest = (block.without(ids) for block in blocks)
    return tuple(block for block in rest if block is not None)


def rank(
    blocks: Blocks, search: KeySearch, tokens: torch.Tensor, order: Sequence[str], count: int
) -> list[tuple[str, float]]:
    """The most similar passages with their similarity, highest first.

    Args:
        blocks: to look in.
        search: how to compare.
        tokens: (T, width) of the query, from `KeySearch.tokens`.
        order: ids in the order in which equally similar ones are taken.
        count: how many.
    """
    found: list[tuple[str, float]] = []
    for block in blocks:
        alike = search.similarities(tokens, block.rows, block.owners, len(block.ids))
        kept = torch.topk(alike, min(count, len(alike))).values[-1]
        # All that are as similar as the last one, so that ties are broken by the order alone.
        near = torch.nonzero(alike >= kept).flatten().tolist()
        found += [(block.ids[index], float(alike[index])) for index in near]
    places = {one: place for place, one in enumerate(order)}
    found.sort(key=lambda one: (-one[1], places.get(one[0], len(places))))
    return found[:count]
