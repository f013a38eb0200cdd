"""What makes one distribution of rows, each of which reads one window."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from rag_windows.methods.base import Method

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RowLogits:
    """What the rows of some queries gave for some tokens, one behind the other.

    Attributes:
        logits: (queries, windows, tokens, vocabulary), fp32 at least: row i reads the prefix,
            window i and the query.
        prior: (queries, tokens, vocabulary): of the row that reads no window; None without one.
        fixed: (windows,) fp32: what `Combination.fixed` gave for these windows.
        memory: tensors, queries first, that a combination keeps from its first tokens to its last;
            it travels with the KV cache of the rows.
    """

    logits: torch.Tensor
    prior: torch.Tensor | None = None
    fixed: torch.Tensor | None = None
    memory: dict[str, torch.Tensor] = field(default_factory=dict)


class Combination(Method):
    """A method whose windows answer each in a row of its own, and how rows become one answer."""

    __slots__ = ()

    @property
    def combination(self) -> Self:
        """Itself."""
        return self

    @property
    @abstractmethod
    def prior(self) -> bool:
        """Whether `combine` needs a further row, which reads the query without any window."""

    @property
    def starts(self) -> bool:
        """Whether the first token that is asked for changes what follows it (see `RowLogits`)."""
        return False

    def check(self, scores: Sequence[float | None], names: Sequence[str]) -> None:
        """Refuse scores of windows that can't be used; ``names`` is how errors call them."""

    @abstractmethod
    def fixed(self, scores: Sequence[float], groups: Sequence[int]) -> torch.Tensor | None:
        """(windows,) fp32: weights from the windows' scores and passages only; None for none.

        ``scores`` has one for each window, or none at all.
        """

    @abstractmethod
    def combine(self, rows: RowLogits) -> tuple[torch.Tensor, torch.Tensor]:
        """One distribution for all rows, and the weight of each.

        Returns:
            Log-probabilities (queries, tokens, vocabulary), and the weight of each window for each
            token, (queries, windows, tokens), summing to one over windows: its share of the
            citations.
        """
