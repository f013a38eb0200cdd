"""The labels to choose from, as tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rag_windows.errors import InputError
from rag_windows.learning.demonstration import Demonstration

_LEAST = 2.0**-23
"""Share of a label's probability that its longer versions leave it at least: fp32 knows no less."""


@dataclass(frozen=True, slots=True)
class Labels:
    """At least two labels.

    Attributes:
        names: as given.
        ids: their tokens, as they follow the query.
    """

    names: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls,
        labels: Sequence[str] | None,
        demonstrations: Sequence[Demonstration],
        encode: Callable[[str], Sequence[int]],
    ) -> Labels:
        """Check labels and tokenize them.

        Args:
            labels: or None for those of the demonstrations, in the order of their first one.
            demonstrations: theirs must be among the labels.
            encode: a label -> its ids behind a query.

        Raises:
            InputError: fewer than two labels, one that is blank or comes twice, also as tokens, or
                a demonstration with another label.
        """
        if isinstance(labels, str):
            raise InputError("labels must be a list of strings, not one string; wrap them in [].")
        if labels is None:
            labels = list(dict.fromkeys(one.label for one in demonstrations))
        for label in labels:
            if not isinstance(label, str) or not label.strip():
                raise InputError(f"A label must be a string that is not blank, not {label!r}.")
        if len(labels) < 2:
            raise InputError(f"At least two labels are needed to choose from, not {list(labels)}.")
        twice = next((label for i, label in enumerate(labels) if label in labels[:i]), None)
        if twice is not None:
            raise InputError(f"The label {twice!r} is given twice; name each label once.")
        for index, one in enumerate(demonstrations):
            if one.label not in labels:
                raise InputError(
                    f"Demonstration {index} has the label {one.label!r}, which is none of "
                    f"{list(labels)}; add it to the labels, or leave the demonstration out."
                )
        ids = [tuple(encode(label)) for label in labels]
        for index, tokens in enumerate(ids):
            if not tokens:
                raise InputError(f"The tokenizer has no tokens for the label {labels[index]!r}.")
            if tokens in ids[:index]:
                raise InputError(
                    f"The labels {labels[ids.index(tokens)]!r} and {labels[index]!r} are the same "
                    "tokens, so no score tells them apart; use other words."
                )
        return cls(tuple(labels), tuple(ids))

    def apart(self, sums: Sequence[float]) -> list[float]:
        """Log-probabilities of answers, where one label may begin with the whole of another.

        ``sums`` counts "art" whenever the answer is "article". Here each label gets what is
        not a longer label's: ``log(P(label) - sum of P(longer))`` over those longer labels that
        don't go on from a longer one themselves. Other labels keep their values.

        Args:
            sums: of each label, in nats.
        """
        values = list(sums)
        for index, own in enumerate(self.ids):
            longer = [i for i, ids in enumerate(self.ids) if _begins(ids, own)]
            nearest = [
                i for i in longer if not any(_begins(self.ids[i], self.ids[j]) for j in longer)
            ]
            if nearest:
                taken = sum(math.exp(sums[i] - sums[index]) for i in nearest)
                values[index] = sums[index] + math.log(max(1.0 - taken, _LEAST))
        return values


def _begins(ids: tuple[int, ...], start: tuple[int, ...]) -> bool:
    return len(ids) > len(start) and ids[: len(start)] == start
