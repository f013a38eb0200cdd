"""The rows of a batch: what each reads, and what it has answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from rag_windows.batching.sampler import Sampler
from rag_windows.kv import Window
from rag_windows.methods import query_bias
from rag_windows.prefill import ContextParts


@dataclass(frozen=True, slots=True)
class Asked:
    """What a loop is asked at token level.

    Attributes:
        context: prefix and windows.
        query_ids: at least one token.
        options: of ``PreTrainedModel.generate``; those that `rag_windows.batching.sampler.served`
            lets pass, with ``max_new_tokens``.
        criteria: stopping criteria beside those in ``options``.
        seed: of a private generator, or None for PyTorch's global one.
        cited: whether attention weights are recorded.
        streamer: as in transformers, or None.
    """

    context: ContextParts
    query_ids: Sequence[int]
    options: dict[str, Any]
    criteria: Sequence[Any] = ()
    seed: int | None = None
    cited: bool = False
    streamer: BaseStreamer | None = field(default=None, repr=False)


class Row:
    """One row of the batch.

    Attributes:
        prefix: that it reads, or None.
        windows: that it reads.
        spans: of each window, the tokens of each of its parts that are cited by themselves.
        fed: tokens that the next forward pass takes: at first the whole query, then the newest.
        position: of the first of those.
        temperature: divides the logits of its windows.
        slope: of their log-sum-exp.
        shift: added to it then.
        query_bias: added to the log-sum-exp of its own tokens.
        cited: whether attention weights are recorded.
        weights: attention weights of each span, of the prefix and of the row's own tokens, summed
            over what was recorded; only their shares mean something.
        sampler: turns logits into tokens.
        error: what ended it, if something did.

    Args:
        asked: the question.
        sampler: of this row.
    """

    def __init__(self, asked: Asked, sampler: Sampler) -> None:
        context, method = asked.context, asked.context.method
        windowed = bool(context.windows)
        self.prefix: Window | None = context.prefix if windowed else None
        self.windows: tuple[Window, ...] = context.windows
        self.spans: list[tuple[int, ...]] = [(len(window.ids),) for window in context.windows]
        if len(context.windows) == 1:
            self.spans = [context.lengths]
        # Without windows nothing else holds the prefix, so it begins the row's own KV cache.
        self.fed = [*(() if windowed else context.prefix_ids), *asked.query_ids]
        self.position = context.query_start if windowed else 0
        self.temperature, self.slope, self.shift = method.temperature, method.slope, method.shift
        self.query_bias = query_bias(method, len(context.windows)) if windowed else 0.0
        self.cited = asked.cited and windowed
        self.weights = [0.0] * (len(context.groups) + 2)
        self.sampler = sampler
        self.error: BaseException | None = None
        self._groups = context.groups
        self._n_groups = context.n_groups

    @property
    def ended(self) -> bool:
        """Whether it needs no further token."""
        return self.error is not None or self.sampler.ended

    def leave(self) -> None:
        """Read nothing any more."""
        self.prefix, self.windows = None, ()

    def take(self, token: int) -> None:
        """Feed a token to the next pass, behind those fed before."""
        self.position += len(self.fed)
        self.fed = [token]

    def shares(self) -> list[float] | None:
        """Attention of the citation groups, the prefix and the row's own tokens, summing to one.

        None if it was not recorded.
        """
        if not self.cited:
            return None
        *spans, prefix, query = self.weights
        groups = torch.zeros(self._n_groups)
        groups.index_add_(0, torch.tensor(self._groups), torch.tensor(spans))
        whole = torch.cat([groups, torch.tensor([prefix, query])])
        return (whole / whole.sum()).tolist()
