"""How well a ranking finds the passages that right answers rest on."""

from __future__ import annotations

from collections.abc import Sequence

from rag_windows.errors import InputError
from rag_windows.evaluation.example import Example
from rag_windows.evaluation.scores.alignment import check_aligned
from rag_windows.evaluation.task import Score

DEPTHS = (1, 5, 20)
"""How many passages are looked at, unless told otherwise."""


def retrieval_scores(
    examples: Sequence[Example],
    rankings: Sequence[Sequence[str | None]],
    depths: Sequence[int] = DEPTHS,
) -> list[Score]:
    """Score rankings against `Example.evidence`. Examples without evidence don't count.

    - recall@k: share of an example's right passages among the first k.
    - hit@k: whether a right passage is among the first k.
    - mrr: 1 / rank of the first right passage, 0 where the ranking holds none.

    Args:
        examples: what was searched for.
        rankings: ids of passages, best first, one ranking an example; None for a passage without
            id, which is never right. What a ranking doesn't hold was not found.
        depths: the numbers of passages k.

    Returns:
        "recall@k" for each depth, then "hit@k" for each, then "mrr"; percent, and NaN where no
        example has evidence.

    Raises:
        InputError: another number of rankings than of examples, or a depth below 1.
    """
    check_aligned(examples, "rankings", rankings)
    if any(depth < 1 for depth in depths):
        raise InputError(f"Depths must be 1 or more, not {list(depths)}.")
    ranks: list[list[int] | None] = []
    for example, ranking in zip(examples, rankings, strict=True):
        ranks.append(_ranks(example.evidence, ranking) if example.evidence else None)
    scores: list[Score] = []
    for depth in depths:
        recall = [
            None if found is None else 100 * _within(found, depth) / len(example.evidence)
            for found, example in zip(ranks, examples, strict=True)
        ]
        scores.append(Score.mean(f"recall@{depth}", recall))
    for depth in depths:
        hits = [None if found is None else 100.0 * (_within(found, depth) > 0) for found in ranks]
        scores.append(Score.mean(f"hit@{depth}", hits))
    reciprocal = [None if one is None else 100 / one[0] if one else 0.0 for one in ranks]
    return [*scores, Score.mean("mrr", reciprocal)]


def _ranks(right: frozenset[str], ranking: Sequence[str | None]) -> list[int]:
    """Ranks from 1 of the right passages that are found, ascending; each passage once."""
    first: dict[str, int] = {}
    for rank, name in enumerate(ranking, start=1):
        if name in right and name is not None:
            first.setdefault(name, rank)
    return list(first.values())


def _within(ranks: Sequence[int], depth: int) -> int:
    return sum(rank <= depth for rank in ranks)
