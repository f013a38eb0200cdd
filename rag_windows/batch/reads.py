"""All reads of a pass of one kind, and what they give each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from rag_windows.attention.native.calling import call
from rag_windows.attention.native.items import Items, Reading
from rag_windows.batch.apart import most_tokens
from rag_windows.batch.ask import Ask, Part
from rag_windows.batch.read import Read


@dataclass(frozen=True, slots=True)
class _Column:
    """A result of each of some tokens.

    Attributes:
        tokens: (m,) int64, which tokens; None for all, in order.
        results: (m,) int64, their places among the results; None for all, in order.
    """

    tokens: torch.Tensor | None
    results: torch.Tensor | None


class Reads:
    """Reads, answered layer by layer, together where that saves time.

    A read has a result for each of its tokens; those of all reads stand one behind the other. Not
    for several threads at once.

    Attributes:
        reads: in order.

    Args:
        reads: of one pass; of windows, or of prefixes.
        tokens: of the pass.
    """

    def __init__(self, reads: Sequence[Read], tokens: int) -> None:
        self.reads = tuple(reads)
        self._tokens = tokens
        self._columns = _columns(self.reads, tokens)
        self._together: dict[int, list[int]] = {}
        self._items: dict[int, tuple[list[int], Items]] = {}

    def __bool__(self) -> bool:
        return bool(self.reads)

    def attend(self, ask: Ask) -> Part:
        """Attention of each token over all that it reads: exactly one softmax.

        Args:
            ask: a layer of a pass that this was made for; there is at least one read.

        Returns:
            Output and lse of every token of the pass; lse is ``-inf`` where it sees nothing.
        """
        output, lse = self._results(ask)
        if len(self._columns) == 1:
            column = self._columns[0]
            return self._placed(column, output, 0.0), self._placed(column, lse, -torch.inf)
        lses = [self._placed(column, lse, -torch.inf) for column in self._columns]
        whole = torch.logsumexp(torch.stack(lses), dim=0)
        finite = whole.masked_fill(whole == -torch.inf, 0.0)
        mixed = lse.new_zeros(self._tokens, *output.shape[1:])
        for column, part in zip(self._columns, lses, strict=True):
            placed = self._placed(column, output, 0.0).to(lse.dtype)
            mixed.addcmul_(placed, torch.exp(part - finite).unsqueeze(-1))
        return mixed, whole

    def _results(self, ask: Ask) -> Part:
        """All results, one read's behind the other's."""
        taken = self._taken_together(ask)
        if not taken:
            made = [ask.read(read) for read in self.reads]
        else:
            held = self._items.get(ask.layer)
            if held is None or held[0] != taken:
                items = _items(ask, [self.reads[index] for index in taken])
                held = self._items[ask.layer] = taken, items
            together = call(held[1], ask.query)
            made = [together]
            if len(taken) < len(self.reads):
                made = self._in_order(ask, taken, together)
        if len(made) == 1:
            return made[0]
        return torch.cat([one[0] for one in made]), torch.cat([one[1] for one in made])

    def _in_order(self, ask: Ask, taken: Sequence[int], together: Part) -> list[Part]:
        """Results of reads that were taken together, and of the others between them."""
        output, lse = together
        made: list[Part] = []
        at, chosen = 0, set(taken)
        for is_taken, group in groupby(range(len(self.reads)), chosen.__contains__):
            reads = [self.reads[index] for index in group]
            if not is_taken:
                made += [ask.read(read) for read in reads]
                continue
            end = at + sum(len(read.tokens) for read in reads)
            made.append((output[at:end], lse[at:end]))
            at = end
        return made

    def _taken_together(self, ask: Ask) -> list[int]:
        """Reads, by index, that one call of the kernel answers."""
        together = self._together.get(ask.layer)
        if together is None:
            together = self._together[ask.layer] = [
                index
                for index, read in enumerate(self.reads)
                if len(read.tokens)
                <= most_tokens(*read.stack.segments[ask.layer][0], ask.query.shape[1])
            ]
        if ask.reach is None:
            return together
        return [index for index in together if ask.sight.whole(self.reads[index], ask.reach)]

    def _placed(self, column: _Column, results: torch.Tensor, nothing: float) -> torch.Tensor:
        """A column's results (R, ...) by token, (tokens, ...)."""
        if column.results is not None:
            results = results[column.results.to(results.device)]
        if column.tokens is None:
            return results
        placed = results.new_full((self._tokens, *results.shape[1:]), nothing)
        placed[column.tokens.to(results.device)] = results
        return placed


def _items(ask: Ask, reads: Sequence[Read]) -> Items:
    return Items(
        [
            Reading(
                read.stack.segments[ask.layer],
                read.tokens.tolist(),
                ask.scale,
                ask.softcap,
                read.temperature,
            )
            for read in reads
        ]
    )


def _columns(reads: Sequence[Read], tokens: int) -> list[_Column]:
    """The first result of each token that has one, the second of each that has two, and so on."""
    if not reads:
        return []
    device = reads[0].tokens.device
    owners = torch.cat([read.tokens for read in reads]).cpu()
    results = torch.argsort(owners, stable=True)
    counts = torch.bincount(owners, minlength=tokens)
    firsts = counts.cumsum(0) - counts
    made = []
    for column in range(int(counts.max())):
        there = (counts > column).nonzero().squeeze(1)
        place = results[firsts[there] + column]
        in_order = torch.equal(place, torch.arange(len(results)))
        made.append(
            _Column(
                None if len(there) == tokens else there.to(device),
                None if in_order else place.to(device),
            )
        )
    return made
