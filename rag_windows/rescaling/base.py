"""What a method is: a change of the context segment's temperature and log-sum-exp."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch


class Method(ABC):
    """How the query reads the windows.

    For one head and one query row, segment ``s`` gives an output ``o_s`` and
    ``l_s = logsumexp`` of its logits. Attention over the union of the segments is exactly
    ``sum_s w_s o_s`` with ``w = softmax(l)``; a method changes only ``temperature`` inside the
    context segment (all windows together) and that segment's ``l``.

    Subclasses are frozen dataclasses, one a file. Class attributes ``name``, ``formula`` and
    ``paper`` describe them to users; ``windowed`` is False where passages are read one after the
    other instead of side by side; ``encoding`` names how windows are encoded for it, and a cache
    keeps windows of different encodings apart.
    """

    name: ClassVar[str]
    formula: ClassVar[str]
    paper: ClassVar[str]
    windowed: ClassVar[bool] = True
    encoding: ClassVar[str] = "behind the prefix"

    temperature: float = 1.0
    """Divides the logits inside the context; 1 leaves them as they are."""

    @abstractmethod
    def context_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """Rescale the context's log-sum-exp.

        Args:
            lse: ``logsumexp(logits / temperature)`` over all windows, fp32, any shape; ``-inf``
                where a row reaches no window.

        Returns:
            The value that enters the merge, same shape and dtype. ``-inf`` must stay ``-inf``.
        """
