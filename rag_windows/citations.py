"""Citations of an answer and of its sentences, by attention and by removal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from rag_windows.passage import Passage
from rag_windows.results import Citation, Statement, Support, by_mass, carried
from rag_windows.sentences import sentences
from rag_windows.steps.removal import Removal

TokenWeights = Sequence[Sequence[float]]
"""Of each token of an answer, attention of the citation groups, the prefix and the query."""

SUPPORT_NATS = 2.0
"""An answer rests on what makes it likelier by so many nats; benchmarks/results/citations.md."""


def is_supported(gain: float) -> bool:
    """Whether an answer rests on passages that raise its log-probability by so much, in nats."""
    return gain >= SUPPORT_NATS


def shares_of(weights: TokenWeights) -> list[float]:
    """Shares of all tokens together, summing to one."""
    total = torch.tensor(weights, dtype=torch.float64).sum(dim=0)
    shares: list[float] = (total / total.sum()).tolist()
    return shares


def cited(
    passages: Sequence[Passage], weights: TokenWeights | None, removal: Removal | None
) -> tuple[tuple[Citation, ...], float | None, float | None]:
    """A citation for each passage, and the shares of prefix and query; None if not measured."""
    shares: list[float | None] = [None, None] if not weights else [*shares_of(weights)]
    *groups, prefix, query = shares
    masses = [one or 0.0 for one in groups] + [0.0] * (len(passages) - len(groups))
    made = tuple(
        Citation(number, passage.id, masses[number]) for number, passage in enumerate(passages)
    )
    return _judged(made, removal, slice(None)), prefix, query


def statements(
    text: str,
    spans: Sequence[tuple[int, int]],
    passages: Sequence[Passage],
    weights: TokenWeights,
    removal: Removal | None,
) -> tuple[Statement, ...]:
    """The sentences of an answer with what carried their tokens.

    Args:
        text: the answer.
        spans: where each token's part of it begins and ends.
        weights: of the same tokens.
    """
    found = []
    places = [_first_letter(text, *span) for span in spans[: len(weights)]]
    for start, end in sentences(text):
        own = [token for token, at in enumerate(places) if at is not None and start <= at < end]
        citations: tuple[Citation, ...] = ()
        if own:
            shares = shares_of([weights[token] for token in own])[:-2]
            made = tuple(Citation(i, passages[i].id, mass) for i, mass in enumerate(shares))
            citations = carried(_judged(made, removal, own))
        found.append(Statement(start, end, text[start:end], citations))
    return tuple(found)


def _first_letter(text: str, start: int, end: int) -> int | None:
    """Place of the first character that is no space; None if there is none."""
    places = range(max(0, start), min(end, len(text)))
    return next((at for at in places if not text[at].isspace()), None)


def _judged(
    citations: Iterable[Citation], removal: Removal | None, tokens: Sequence[int] | slice
) -> tuple[Citation, ...]:
    """Citations with what some of the answer's tokens lose without each passage."""
    if removal is None:
        return tuple(citations)
    drops = {group: float(drop[tokens].sum()) for group, drop in removal.drops.items()}
    return judged(citations, drops, float(removal.gain[tokens].sum()), removal.read)


def judged(
    citations: Iterable[Citation],
    drops: Mapping[int, float],
    gain: float,
    read: Collection[int],
) -> tuple[Citation, ...]:
    """Citations with what an answer loses without each passage, and what follows from it.

    "yes" from `SUPPORT_NATS` on. If no passage reaches that, although all together do, it may be
    that several say the same: those that the answer loses something without, and that got as much
    attention as `carried` asks for, are "unsure".

    Args:
        citations: one for each passage.
        drops: in nats, of the passages that were left out.
        gain: what the answer gains by all passages together, in nats.
        read: the passages that were read; the others lose nothing.
    """
    given = tuple(citations)
    supported = is_supported(gain)
    shared = supported and not any(drop >= SUPPORT_NATS for drop in drops.values())
    close = {one.passage for one in by_mass(given)} if shared else set()

    def of(one: Citation) -> Citation:
        drop = drops.get(one.passage, None if one.passage in read else 0.0)
        if drop is None:
            return one
        supports: Support = "yes" if supported and drop >= SUPPORT_NATS else "no"
        if one.passage in close and drop > 0:
            supports = "unsure"
        return replace(one, drop=drop, supports=supports)

    return tuple(map(of, given))
