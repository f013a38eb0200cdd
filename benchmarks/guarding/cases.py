"""Where windows lose, and where they don't: what the guard is asked about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from benchmarks.judgement.cases import Group, draw_groups
from rag_windows import APE, PCW, Codebook, ParallelEnsemble, Passage
from rag_windows.rescaling import Method

READER, LEARNER = "tiny-reader", "tiny-learner"
PER_CONTEXT = 4
"""Questions on one context; those of one context are not independent."""


@dataclass(frozen=True, slots=True)
class Case:
    """Questions of one kind, read in one way.

    Attributes:
        label: its name in the tables.
        model: an embedded reader.
        task: one of the judgement's.
        passages: of each context, before they are cut.
        method: how windows are read.
        cut: makes several passages of one, or None.
        max_window_tokens: longer passages become several windows; None for no limit.
    """

    label: str
    model: str
    task: str
    passages: int
    method: Method
    cut: Callable[[Passage], list[Passage]] | None = None
    max_window_tokens: int | None = None

    def groups(self, contexts: int, seed: int) -> Iterator[Group]:
        """So many contexts with their questions; equal arguments give equal groups."""
        # More questions than the contexts hold, so that none of them is cut short.
        for group in islice(draw_groups(self.task, self.passages, 10**9, seed), contexts):
            passages: Sequence[Passage] = group.passages
            if self.cut is not None:
                passages = [part for passage in passages for part in self.cut(passage)]
            yield replace(group, passages=tuple(passages), questions=group.questions[:PER_CONTEXT])


def sentences(passage: Passage) -> list[Passage]:
    """A passage of each sentence, without the title."""
    found = passage.text.removesuffix(".").split(". ")
    return [Passage(f"{sentence}.") for sentence in found]


def pairs(passage: Passage) -> list[Passage]:
    """A passage of every two lines."""
    lines = passage.text.split("\n")
    return [Passage("\n".join(lines[first : first + 2])) for first in range(0, len(lines), 2)]


CASES = (
    Case("single-hop, 8 passages", READER, "single-hop", 8, PCW()),
    Case("the same, windows of at most 12 tokens", READER, "single-hop", 8, PCW(), None, 12),
    Case("the same, each sentence a passage", READER, "single-hop", 8, PCW(), sentences),
    Case("the same, scale set to 1.5", READER, "single-hop", 8, APE(1.0, 1.5)),
    Case("the same, scale set to 0.8", READER, "single-hop", 8, APE(1.0, 0.8)),
    Case("single-hop, 32 passages", READER, "single-hop", 32, PCW()),
    Case("not-stated, 8 passages", READER, "not-stated", 8, PCW()),
    Case("single-hop, 4, ensemble", READER, "single-hop", 4, ParallelEnsemble(weights="retrieval")),
    Case("single-hop, 8, ensemble", READER, "single-hop", 8, ParallelEnsemble(weights="retrieval")),
    Case("two-hop, 4 passages", LEARNER, "two-hop", 4, PCW()),
    Case("two-hop, 8 passages", LEARNER, "two-hop", 8, PCW()),
    Case("two-hop, 8, codebook of 4", LEARNER, "two-hop", 8, Codebook(retrieve=4)),
    Case("classification, 2 passages", LEARNER, "classification", 2, PCW()),
    Case("classification, 16 of two examples", LEARNER, "classification", 4, PCW(), pairs),
)
"""Plain windows keep what one prompt knows in some; in others something takes it from them."""
