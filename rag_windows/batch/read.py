"""Some tokens of a pass that read the same windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rag_windows.batch.stacks import Stack


@dataclass(slots=True)
class Read:
    """Some tokens of a pass, which read one stack at one temperature.

    Attributes:
        stack: what they read.
        temperature: divides their logits.
        rows: theirs, by index.
        tokens: (m,) int64, their places in the pass.
        cited: (c,) int64, places of those whose attention mass is recorded.
        cited_rows: their rows, by index.
        mass: (c, parts) fp32, summed over layers and passes; None before the first.
    """

    stack: Stack
    temperature: float
    rows: list[int]
    tokens: torch.Tensor
    cited: torch.Tensor
    cited_rows: list[int]
    mass: torch.Tensor | None = None
