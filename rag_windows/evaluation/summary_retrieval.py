"""What the retriever found, so that a reader's loss is not mistaken for a retriever's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rag_windows.evaluation.example import Example
from rag_windows.evaluation.record import Record
from rag_windows.evaluation.scores.retrieval import retrieval_scores

Values = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Percent for each example; None for one without evidence, or that no arm could read.

    Attributes:
        recall: of its evidence.
        hit: 100 if at least one passage is evidence, else 0.
    """

    recall: Values
    hit: Values


def retrieved(
    examples: Sequence[Example], records: Mapping[str, Sequence[Record]], depth: int | None
) -> Retrieved | None:
    """Compare the passages that arms of one depth read with the evidence.

    All of them got the same ranking, and one that could not hold all of it left out its end, so the
    longest list is the ranking.

    Args:
        examples: any.
        records: by name of the arm, one an example in the same order; all arms of this depth.
        depth: passages at most; None for all that an example brings.

    Returns:
        None if nothing can be compared.
    """
    rankings = [_longest(answers) for answers in zip(*records.values(), strict=True)]
    usable = [
        place
        for place, (example, ranking) in enumerate(zip(examples, rankings, strict=True))
        if example.evidence and ranking is not None
    ]
    if not usable:
        return None
    found = [rankings[place] or () for place in usable]
    deep = max(1, depth or max(map(len, found)))
    recall, hit, _ = retrieval_scores([examples[place] for place in usable], found, (deep,))
    return Retrieved(
        _spread(usable, recall.values, len(examples)), _spread(usable, hit.values, len(examples))
    )


def _longest(answers: Sequence[Record]) -> tuple[str | None, ...] | None:
    read = [one.passages for one in answers if one.error is None]
    return tuple(passage.id for passage in max(read, key=len)) if read else None


def _spread(places: Sequence[int], values: Values, length: int) -> Values:
    known = dict(zip(places, values, strict=True))
    return tuple(known.get(place) for place in range(length))
