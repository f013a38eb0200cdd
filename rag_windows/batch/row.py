"""One question in a batch: what it reads, and what it has answered so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from rag_windows.batch.choosing import Chooser
from rag_windows.batch.slots import Slot
from rag_windows.context_parts import ContextParts
from rag_windows.rescaling import Method, query_bias


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
        method: how it reads the windows.
        bias: added to the log-sum-exp of its own tokens.
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
        "_groups",
        "_mass",
        "_n_groups",
        "bias",
        "chooser",
        "cited",
        "error",
        "fed",
        "method",
        "position",
        "slots",
        "windowed",
    )

    def __init__(self, asked: Asked, slots: Sequence[Slot], chooser: Chooser) -> None:
        context = asked.context
        self.windowed = bool(context.windows)
        self.slots = tuple(slots)
        # Without windows nothing else holds the prefix, so it is the beginning of the tail.
        self.fed = [*(() if self.windowed else context.prefix_ids), *asked.query_ids]
        self.position = context.query_start if self.windowed else 0
        self.method: Method = context.method
        self.bias = query_bias(context.method, len(context.windows)) if self.windowed else 0.0
        self.cited = asked.record_mass and self.windowed
        self.chooser = chooser
        self.error: BaseException | None = None
        self._groups = torch.tensor(context.groups, dtype=torch.int64)
        self._n_groups = context.n_groups
        # Of each part of each window, then of the prefix and of the row's own tokens.
        self._mass = torch.zeros(len(context.groups) + 2)
        for slot in self.slots:
            slot.readers.add(self)

    @property
    def temperature(self) -> float:
        """Divides the logits of its windows."""
        return self.method.temperature

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

    def add_mass(self, parts: dict[int, torch.Tensor], prefix: float, query: float) -> None:
        """Add to the attention mass, of which only the shares mean something.

        Args:
            parts: by ``id`` of a slot: (parts,) fp32.
            prefix: of the prefix.
            query: of the row's own tokens.
        """
        windows = [slot for slot in self.slots if not slot.prefix]
        ends = accumulate(len(slot.spans) for slot in windows)
        for slot, end in zip(windows, ends, strict=True):
            if id(slot) in parts:
                self._mass[end - len(slot.spans) : end] += parts[id(slot)]
        self._mass[-2] += prefix
        self._mass[-1] += query

    def masses(self) -> list[float] | None:
        """Shares of the citation groups, the prefix and the row's own tokens; None if unrecorded.

        They sum to one.
        """
        if not self.cited:
            return None
        groups = torch.zeros(self._n_groups).index_add_(0, self._groups, self._mass[:-2])
        whole = torch.cat([groups, self._mass[-2:]])
        return (whole / whole.sum()).tolist()
