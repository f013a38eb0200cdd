"""The steps that a method may add to encoding and reading, as the engine calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from rag_windows.context import EncodedContext
    from rag_windows.decoding import Decoder
    from rag_windows.encoding import Encoder
    from rag_windows.kv import Window


class Refinement(Protocol):
    """Changes encoded windows before they are read or stored.

    A refined window may depend on the model, the prefix, its own tokens and position, and the
    refinement's numbers, all of which `Method.encoding` must hold; on nothing else.
    """

    def refine(
        self, encoder: Encoder, windows: Sequence[Window], prefix: Window | None
    ) -> list[Window]:
        """Refine the windows of one batch.

        Args:
            encoder: `Encoder.run` makes further passes.
            windows: as encoded behind the prefix; of like lengths, each with its own position.
            prefix: what they were encoded behind, or None.

        Returns:
            As many windows in the same order, of the same ids, positions and shapes.
        """

    def positions(self, tokens: int) -> int:
        """How many positions, from its start on, a window of so many tokens takes in the passes."""


class Linking(Protocol):
    """Encodes some tokens of the windows again, with sight of other windows.

    The result depends on all windows and their order, so it is made for each request and never
    stored.
    """

    def everything(self, lengths: Sequence[int]) -> bool:
        """Whether every token of windows of these lengths is linked.

        Then they are encoded and read as one prompt, and `link` is not called.
        """

    def link(
        self, encoder: Encoder, windows: Sequence[Window], prefix: Window | None
    ) -> tuple[list[Window], list[int]]:
        """Link the windows of one request.

        Returns:
            As many windows in the same order, of the same ids; and of each one how many tokens were
            encoded again.
        """


class Selection(Protocol):
    """Narrows the windows to those that a query reads, once the query is known."""

    def select(
        self, context: EncodedContext, query_ids: Sequence[int], decoder: Decoder
    ) -> EncodedContext:
        """The context that this query reads; `EncodedContext.narrowed` makes it."""


class Combination(Protocol):
    """Makes one next-token distribution out of one a window."""

    @property
    def prior(self) -> bool:
        """Whether `combine` wants the distributions of the query without any window."""

    def check(self, scores: Sequence[float | None], names: Sequence[str]) -> None:
        """Refuse retrieval scores that it can't use, before any work.

        Args:
            scores: of each window.
            names: how errors call each.

        Raises:
            InputError: saying which, and what to do.
        """

    def fixed(self, scores: Sequence[float], groups: Sequence[int]) -> torch.Tensor | None:
        """(windows,) fp32 weights that no token changes, or None.

        Args:
            scores: retrieval score of each window, or none.
            groups: citation group of each window.
        """

    def weigh(self, logprobs: torch.Tensor, fixed: torch.Tensor | None) -> torch.Tensor:
        """Weight of each window for each token.

        Args:
            logprobs: (queries, windows, tokens, vocabulary), each row normalised.
            fixed: from `fixed`.

        Returns:
            (queries, windows, tokens), summing to one over the windows.
        """

    def combine(
        self, logprobs: torch.Tensor, weights: torch.Tensor, prior: torch.Tensor | None
    ) -> torch.Tensor:
        """Combine distributions.

        Args:
            logprobs: as in `weigh`.
            weights: from `weigh`.
            prior: (queries, tokens, vocabulary) without any window, or None.

        Returns:
            (queries, tokens, vocabulary) log-probabilities, normalised.
        """
