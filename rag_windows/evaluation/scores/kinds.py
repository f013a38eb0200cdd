"""The same scores for the examples of each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rag_windows.evaluation.example import Example
from rag_windows.evaluation.scores.alignment import check_aligned
from rag_windows.evaluation.task import Score

T = TypeVar("T")


def by_kind(
    examples: Sequence[Example],
    items: Sequence[T],
    score: Callable[[Sequence[Example], Sequence[T]], list[Score]],
) -> dict[str, list[Score]]:
    """Break scores down by `Example.kinds`.

    Every kind is scored anew, so that a metric which is no mean, such as BLEU, is right for it too.

    Args:
        examples: one of several kinds counts in each of them, one of no kind in none.
        items: one an example, in the same order: answers, records, or pairs of what is scored.
        score: gives the scores of some examples with their items.

    Returns:
        The scores for each kind, in the order in which kinds come first.

    Raises:
        InputError: another number of items than of examples, or what ``score`` raises.
    """
    check_aligned(examples, "items", items)
    chosen: dict[str, list[int]] = {}
    for index, example in enumerate(examples):
        for kind in dict.fromkeys(example.kinds):
            chosen.setdefault(kind, []).append(index)
    return {
        kind: score([examples[i] for i in indices], [items[i] for i in indices])
        for kind, indices in chosen.items()
    }
