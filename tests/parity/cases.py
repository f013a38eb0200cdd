"""The token layouts and rules that every architecture is checked with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from . import dense, zoo
from .dense import PLAIN, Rule
from .zoo import ids


@dataclass(frozen=True, slots=True)
class Case:
    """One call: token ids of the prefix, of every window, and of the query."""

    prefix: list[int]
    windows: list[list[int]]
    query: list[int]

    @property
    def flat(self) -> list[int]:
        """All tokens in the order given."""
        return [*self.prefix, *(t for window in self.windows for t in window), *self.query]


def case(prefix: int, windows: tuple[int, ...], query: int, seed: int = 7) -> Case:
    """A seeded case from lengths."""
    return Case(
        ids(prefix, seed),
        [ids(length, seed + 10 + i) for i, length in enumerate(windows)],
        ids(query, seed + 1),
    )


CASES: Mapping[str, Case] = {
    # One window longer than the sliding layers' reach, the query out of reach of the others.
    "ragged": case(5, (1, 7, 12, 33), 6),
    "no prefix": case(0, (12, 1, 33, 7), 5),
    # The prefix alone is longer than the sliding layers' reach.
    "long prefix": case(19, (3, 3, 9), 11),
    "one-token query": case(4, (6, 2), 1),
}
RULES: Mapping[str, Rule] = {
    "pcw": Rule(),
    "as used": Rule(0.7, 0.8),
    "as used, sharp": Rule(0.5, 1.2),
    "as printed": Rule(0.7, 0.8, "as printed"),
    "fixed ratio": Rule(0.7, 0.8, "fixed ratio"),
}


def expected(name: str, one: Case, rule: Rule = PLAIN, more: Sequence[int] = ()) -> Tensor:
    """The dense reference's logits of a case and of `more` tokens behind its query.

    They are those of the shared model `name`: (len(query) + len(more), vocab) fp32.
    """
    sliding, query = zoo.BY_NAME[name].sliding, [*one.query, *more]
    return dense.logits(zoo.shared(name), sliding, one.prefix, one.windows, query, rule)


def expected_steps(name: str, one: Case, rule: Rule, forced: Sequence[int]) -> Tensor:
    """(len(forced), vocab): of the tokens that predict the forced ones."""
    return expected(name, one, rule, forced[:-1])[len(one.query) - 1 :]


def plain(name: str, one: Case) -> Tensor:
    """(len(query), vocab) fp32 logits of the model without the engine, on all tokens in order."""
    return dense.plain_logits(zoo.shared(name), one.flat, len(one.query))
