"""One question in a batch: what it reads, and what it has answered so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from rag_windows.attention.segments import Role
from rag_windows.batch.choosing import Chooser
from rag_windows.batch.slots import Slot
from rag_windows.context_parts import ContextParts
from rag_windows.rescaling import query_bias


@dataclass(frozen=True, slots=True)
class Asked:
    """What a loop is asked at token level.

    Attributes:
        context: prefix and windows.
        query_ids: at least one token.
        options: of ``PreTrainedModel.generate``; those that `served` lets pass.
        criteria: stopping criteria beside those in ``options``.
        seed: of a private generator, or None for PyTorch's global one.
        record_mass: whether to record attention mass.
        streamer: as in transformers, or None.
    """

    context: ContextParts
    query_ids: Sequence[int]
    options: dict[str, Any]
    criteria: Sequence[Any] = ()
    seed: int | None = None
    record_mass: bool = False
    streamer: BaseStreamer | None = field(default=None, repr=False)


class Row:
    """One row of the batch.

    Attributes:
        slots: what it reads: prefix and windows.
        fed: tokens that the next forward pass takes: at first the whole tail, then the newest.
        position: of the first of those.
        temperature: divides the logits of its windows.
        slope: of their log-sum-exp.
        shift: added to it then.
        query_bias: added to the log-sum-exp of its own tokens.
        windowed: whether it reads windows.
        cited: whether attention mass is recorded.
        chooser: turns logits into tokens.
        error: what ended it, if something did.

    Args:
        asked: the question.
        slots: the prefix's, if there is one, then one a window.
        chooser: of this row.
    """

    __slots__ = (
        "_first_spans",
        "_groups",
        "_mass",
        "_n_groups",
        "chooser",
        "cited",
        "error",
        "fed",
        "position",
        "query_bias",
        "shift",
        "slope",
        "slots",
        "temperature",
        "windowed",
    )

    def __init__(self, asked: Asked, slots: Sequence[Slot], chooser: Chooser) -> None:
        context = asked.context
        self.windowed = bool(context.windows)
        self.slots = tuple(slots)
        # Without windows nothing else holds the prefix, so it is the beginning of the tail.
        self.fed = [*(() if self.windowed else context.prefix_ids), *asked.query_ids]
        self.position = context.query_start if self.windowed else 0
        method = context.method
        self.temperature, self.slope, self.shift = method.temperature, method.slope, method.shift
        self.query_bias = query_bias(method, len(context.windows)) if self.windowed else 0.0
        self.cited = asked.record_mass and self.windowed
        self.chooser = chooser
        self.error: BaseException | None = None
        self._groups = torch.tensor(context.groups, dtype=torch.int64)
        self._n_groups = context.n_groups
        # Of each part of each window, then of the prefix and of the row's own tokens.
        self._mass = torch.zeros(len(context.groups) + 2)
        self._first_spans: dict[int, int] = {}
        spans = 0
        for slot in self.slots:
            slot.readers.add(self)
            if not slot.prefix:
                self._first_spans[id(slot)] = spans
                spans += len(slot.spans)

    @property
    def ended(self) -> bool:
        """Whether it needs no further token."""
        return self.error is not None or self.chooser.ended

    def leave(self) -> None:
        """Read nothing any more."""
        for slot in self.slots:
            slot.readers.discard(self)

    def take(self, token: int) -> None:
        """Feed a token to the next pass, behind those fed before."""
        self.position += len(self.fed)
        self.fed = [token]

    def add_context(self, slot: Slot, span: int, share: float) -> None:
        """Add to the attention weight of a span of a window; only the shares mean something."""
        self._mass[self._first_spans[id(slot)] + span] += share

    def add_weight(self, role: Role, share: float) -> None:
        """Add to the attention weight of the prefix or the query."""
        self._mass[-2 if role == "prefix" else -1] += share

    def masses(self) -> list[float] | None:
        """Shares of the citation groups, the prefix and the row's own tokens; None if unrecorded.

        They sum to one.
        """
        if not self.cited:
            return None
        groups = torch.zeros(self._n_groups).index_add_(0, self._groups, self._mass[:-2])
        whole = torch.cat([groups, self._mass[-2:]])
        return (whole / whole.sum()).tolist()
