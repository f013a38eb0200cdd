"""What one call knows about its windows; it travels with the call, never on a module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

import torch

from rag_windows.attention.capture import Capture
from rag_windows.attention.mass import MassRecorder
from rag_windows.ensemble.members import Members
from rag_windows.errors import RagWindowsError
from rag_windows.rescaling import PCW, Method
from rag_windows.windows import PackedWindows, RowWindows


class Override(Protocol):
    """Attends in place of the hook, where a call needs more than segments and their merge."""

    def attend(
        self,
        layout: Layout,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of the tail's newest rows.

        Args:
            layout: of this call.
            layer: number of the layer.
            query: (batch, heads, rows, head dim).
            key: (batch, kv heads, tail, head dim).
            value: (batch, kv heads, tail, value dim).
            scale: multiplies the logits.
            softcap: caps them, or None.
            sinks: (heads,) logits of attention sinks, or None.

        Returns:
            (batch, heads, rows, value dim) in the query's dtype.
        """


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of one call stand, and what the query reads beside them.

    The *tail* is what the model itself is fed and what its HF cache holds: the prefix, then the
    query. The windows stand outside it.

    Attributes:
        prefix_length: tail tokens before the query, at positions ``0 .. prefix_length - 1``.
        query_start: position of the tail's first token behind the prefix.
        reach: per layer, how many positions a sliding layer sees (a token sees those less than
            ``reach`` positions before it), or None for full attention.
        windows: the context segment that every row reads, or None.
        beside: one more segment, of which each batch row reads its own window; or None.
        method: how the context segment is rescaled.
        query_bias: log of the method's weight on the query segment; 0 changes nothing.
        row_offsets: per batch row, added to the positions of its tail behind the prefix; or None.
        override: what attends instead of the hook, in every layer; or None.
        members: the windows of an ensemble, which stand ``beside`` its rows; or None.
        mass: where attention mass is recorded, or None to record nothing.
        capture: where each layer's own keys and values are kept, or None.
    """

    prefix_length: int
    query_start: int
    reach: tuple[int | None, ...]
    windows: PackedWindows | None = None
    method: Method = field(default_factory=PCW)
    beside: RowWindows | None = None
    query_bias: float = 0.0
    row_offsets: tuple[int, ...] | None = None
    override: Override | None = None
    members: Members | None = None
    mass: MassRecorder | None = None
    capture: Capture | None = None

    def position(self, index: int) -> int:
        """Position of the tail's ``index``-th token, in the batch row that stands first."""
        if index < self.prefix_length:
            return index
        return index - self.prefix_length + self.query_start

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Positions of the tail's first ``length`` tokens, int64.

        Returns:
            (length,), or (batch, length) where rows stand at positions of their own.
        """
        index = torch.arange(length, device=device)
        gap = self.query_start - self.prefix_length
        if self.row_offsets is None:
            return torch.where(index < self.prefix_length, index, index + gap)
        gaps = torch.tensor(self.row_offsets, device=device).unsqueeze(-1) + gap
        return torch.where(index < self.prefix_length, index, index + gaps)

    def furthest(self, length: int) -> int:
        """Largest position of the tail's last of ``length`` tokens in any batch row."""
        last = self.position(length - 1)
        return last if length <= self.prefix_length else last + max(self.row_offsets or (0,))


_CURRENT: ContextVar[Layout | None] = ContextVar("rag_windows_layout", default=None)


@contextmanager
def use_layout(layout: Layout) -> Iterator[None]:
    """Make ``layout`` the one that the attention hook sees in this thread or task."""
    token = _CURRENT.set(layout)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_layout() -> Layout:
    """The layout of the call in flight.

    Raises:
        RagWindowsError: there is none: a model was switched to "rag_windows" attention by hand.
    """
    layout = _CURRENT.get()
    if layout is None:
        raise RagWindowsError(
            "The 'rag_windows' attention was called outside of WindowedLM. Load the model with its "
            "usual attn_implementation and pass it to WindowedLM.from_pretrained."
        )
    return layout
