"""Which demonstrations are shown, and in what order."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rag_windows.evaluation.icl.item import Item


def drawn(items: Sequence[Item], seed: int, *, balanced: bool) -> list[Item]:
    """All items in the order in which they are shown: the first n make n demonstrations.

    Args:
        items: in the order of the file.
        seed: of a private generator; the same everywhere.
        balanced: rounds of one item a label, in an order drawn anew for each round, until the
            labels run out one by one. False: in any order.
    """
    rng = random.Random(seed)
    order = rng.sample(range(len(items)), len(items))
    if not balanced:
        return [items[index] for index in order]
    by_label: dict[str, list[Item]] = {}
    for index in order:
        by_label.setdefault(items[index].label, []).append(items[index])
    # Not in the order of the draw, so that every label leads as often as another.
    names = sorted(by_label)
    made: list[Item] = []
    for number in range(max(map(len, by_label.values()), default=0)):
        row = [by_label[name][number] for name in names if number < len(by_label[name])]
        made += rng.sample(row, len(row))
    return made
