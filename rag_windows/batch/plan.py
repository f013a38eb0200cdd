"""Which tokens of a forward pass read what; it holds until rows come or go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from rag_windows.batch.read import Read
from rag_windows.batch.reads import Reads
from rag_windows.batch.row import Row
from rag_windows.batch.stacks import Stack
from rag_windows.rescaling import Method


@dataclass(slots=True)
class OwnMass:
    """Attention mass of cited rows on what is no window, summed over layers and passes.

    Attributes:
        rows: the cited ones, by index.
        tokens: (c,) int64, the places of the tokens that predict.
        prefix: (c,) fp32; None before the first layer.
        query: (c,) fp32; None before the first layer.
    """

    rows: list[int]
    tokens: torch.Tensor
    prefix: torch.Tensor | None = None
    query: torch.Tensor | None = None


@dataclass(slots=True)
class Plan:
    """One forward pass, or many of the same rows with a token each.

    Attributes:
        rows: in order; those that have a tail already stand first, with one token each.
        lengths: tokens of each.
        old: how many of the rows have a tail.
        newest: (rows,) int64, on the CPU: the place of each row's last token.
        prefixes: reads of prefixes; a token has at most one.
        contexts: reads of windows.
        methods: methods, and the tokens whose windows they rescale; None for every token.
        biases: (tokens,) fp32, or None where all are 0.
        own: of cited rows, or None without any.
    """

    rows: list[Row]
    lengths: list[int]
    old: int
    newest: torch.Tensor
    prefixes: Reads
    contexts: Reads
    methods: list[tuple[Method, torch.Tensor | None]]
    biases: torch.Tensor | None
    own: OwnMass | None
    flushed: bool = field(default=False)

    def masses(self) -> list[torch.Tensor | None]:
        """What was measured so far, for `restore`."""
        own = [] if self.own is None else [self.own.prefix, self.own.query]
        return [*own, *(read.mass for read in self.contexts.reads)]

    def restore(self, masses: Sequence[torch.Tensor | None]) -> None:
        """Forget what was measured since `masses` gave this."""
        rest = iter(masses)
        if self.own is not None:
            self.own.prefix, self.own.query = next(rest), next(rest)
        for read in self.contexts.reads:
            read.mass = next(rest)

    def flush(self) -> None:
        """Hand the attention mass to the rows, once."""
        if self.own is None or self.flushed:
            return
        self.flushed = True
        parts: list[dict[int, torch.Tensor]] = [{} for _ in self.rows]
        for read in self.contexts.reads:
            if read.mass is None:
                continue
            mass = read.mass.cpu()
            ends = list(accumulate(len(slot.spans) for slot in read.stack.slots))
            for place, index in enumerate(read.cited_rows):
                for slot, end in zip(read.stack.slots, ends, strict=True):
                    parts[index][id(slot)] = mass[place, end - len(slot.spans) : end]
        prefix = [] if self.own.prefix is None else self.own.prefix.tolist()
        query = [] if self.own.query is None else self.own.query.tolist()
        for index, of_prefix, of_query in zip(self.own.rows, prefix, query, strict=False):
            self.rows[index].add_mass(parts[index], of_prefix, of_query)


def plan(rows: Sequence[Row], old: int, stacks: Sequence[Stack], device: torch.device) -> Plan:
    """Plan a pass.

    Args:
        rows: that take part; the first ``old`` have a tail.
        old: see there.
        stacks: what they and others read.
        device: of the first layer.
    """
    lengths = [len(row.fed) for row in rows]
    ends = list(accumulate(lengths))
    owners = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))
    index = {row: number for number, row in enumerate(rows)}
    prefixes: list[Read] = []
    contexts: list[Read] = []
    for stack in stacks:
        reading = sorted(index[row] for row in stack.readers if row in index)
        heats = dict.fromkeys(1.0 if stack.prefix else rows[i].temperature for i in reading)
        for heat in heats:
            mine = [i for i in reading if stack.prefix or rows[i].temperature == heat]
            tokens = torch.cat([torch.arange(ends[i] - lengths[i], ends[i]) for i in mine])
            cited = [i for i in mine if rows[i].cited]
            last = torch.tensor([ends[i] - 1 for i in cited], dtype=torch.int64)
            read = Read(stack, heat, mine, tokens.to(device), last.to(device), cited)
            (prefixes if stack.prefix else contexts).append(read)
    cited = [i for i, row in enumerate(rows) if row.cited]
    last = torch.tensor([ends[i] - 1 for i in cited], dtype=torch.int64)
    return Plan(
        rows=list(rows),
        lengths=lengths,
        old=old,
        newest=torch.tensor(ends) - 1,
        prefixes=Reads(prefixes, ends[-1]),
        contexts=Reads(contexts, ends[-1]),
        methods=_methods(rows, owners, device),
        biases=_biases(rows, owners, device),
        own=OwnMass(cited, last.to(device)) if cited else None,
    )


def _methods(
    rows: Sequence[Row], owners: torch.Tensor, device: torch.device
) -> list[tuple[Method, torch.Tensor | None]]:
    reading: dict[Method, list[int]] = {}
    for index, row in enumerate(rows):
        if row.windowed:
            reading.setdefault(row.method, []).append(index)
    if len(reading) == 1 and len(next(iter(reading.values()))) == len(rows):
        return [(method, None) for method in reading]
    return [
        (method, torch.isin(owners, torch.tensor(mine)).nonzero().squeeze(1).to(device))
        for method, mine in reading.items()
    ]


def _biases(rows: Sequence[Row], owners: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    biases = torch.tensor([row.bias for row in rows])
    return biases[owners].to(device) if bool(biases.any()) else None
