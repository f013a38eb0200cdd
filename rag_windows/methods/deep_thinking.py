"""Deep-Thinking: windows that read themselves several times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from rag_windows.errors import MethodError
from rag_windows.methods.base import finite
from rag_windows.methods.composed import Composed
from rag_windows.methods.steps import Positions, Refinement


@dataclass(frozen=True, slots=True)
class DeepThinking(Composed):
    """Windows whose keys and values are moved by reading themselves, then read by another method.

    Source: Yang et al., "Iterative Forward Tuning Boosts In-Context Learning in Language Models",
    https://arxiv.org/abs/2305.13016, section 3, and the code released with it. Keys and values of
    every layer are one state ``KV``; each window has its own and is refined by itself:

    - Pass 0 is the plain encoding: the window behind the prefix. ``KV_0`` is what it gives.
    - Pass t = 1..steps runs the window's tokens through the model again. They see the prefix, all
      of their window in ``KV_{t-1}``, and causally themselves; the keys and values that they make
      are ``G_t``. Then ``m_t = (G_t - KV_{t-1}) + momentum * m_{t-1}`` with ``m_0 = 0``, and
      ``KV_t = KV_{t-1} + eta * m_t``.

    Without momentum this is ``KV_t = eta * G_t + (1 - eta) * KV_{t-1}``. ``steps=0`` leaves the
    windows as the reader has them. The released code counts pass 0 too: its ``kv_iter=15`` is
    ``steps=14`` here. It takes eta 0.01 and momentum 0.9, which are the defaults here; how many
    steps are best it finds on labelled data, and `rag-windows calibrate` does so.

    The query reads ``KV_steps`` at the positions of plain windows. "continue", as released, lets
    the tokens of a pass stand behind their window, at ``start + L .. start + 2L - 1`` for one of
    ``L`` tokens at ``start``. Their keys are rotated for (or carry a learned embedding of) those
    positions and are mixed as they are into keys of ``start .. start + L - 1``. It needs ``L``
    positions more than the window itself, in which the model must be right. "reuse" lets them
    stand where the window stands, so that only keys of equal positions are mixed. In layers with a
    sliding window, positions decide what a pass can see.

    With `Sequential` as the reader all passages are one long window, which is the paper's own use.
    Any reader of windows will do; a cache keeps refined windows apart from plain ones and from
    those of other numbers, and a second question computes nothing anew.

    Attributes:
        steps: passes after the plain encoding, 0 or more; each costs a little more than encoding.
        eta: step size, above 0 and up to 1.
        momentum: 0 (none) up to, not including, 1.
        positions: "continue" or "reuse".

    Raises:
        MethodError: a number outside its domain, or a reader that links windows.
    """

    steps: int = 5
    eta: float = 0.01
    momentum: float = 0.9
    positions: Positions = "continue"

    name: ClassVar[str] = "deep-thinking"
    formula: ClassVar[str] = (
        "KV_t = KV_{t-1} + eta * m_t, m_t = KV(pass t) - KV_{t-1} + b * m_{t-1}"
    )
    paper: ClassVar[str] = "arXiv:2305.13016"
    reads_sequential: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Composed.__post_init__(self)
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 0:
            raise MethodError(
                f"deep-thinking steps must be a whole number of passes, 0 or more, got "
                f"{self.steps!r}; 5 is a start, the paper goes up to 14."
            )
        if not finite(self.eta) or not 0 < self.eta <= 1:
            raise MethodError(
                f"deep-thinking eta must be above 0 and at most 1, got {self.eta!r}; the paper "
                "takes 0.01, and steps=0 is the way to refine nothing."
            )
        if not finite(self.momentum) or not 0 <= self.momentum < 1:
            raise MethodError(
                f"deep-thinking momentum must be at least 0 and below 1, got {self.momentum!r}; "
                "the released code takes 0.9, and 0 is none."
            )
        if self.positions not in get_args(Positions):
            raise MethodError(
                f"deep-thinking positions must be one of {list(get_args(Positions))}, got "
                f"{self.positions!r}."
            )
        if self.reader.recompute is not None:
            raise MethodError(
                f"deep-thinking can't be combined with {self.reader.name} as its reader: linking "
                "comes after refining. Let linked stand outside: Linked(reader=DeepThinking())."
            )

    @property
    def encoding(self) -> str:
        """The reader's with all numbers of the refinement."""
        if not self.steps:
            return self.reader.encoding
        return (
            f"{self.reader.encoding}, deep-thinking steps={self.steps} eta={float(self.eta)!r} "
            f"momentum={float(self.momentum)!r} positions={self.positions}"
        )

    @property
    def refinement(self) -> Refinement | None:
        """The passes; the reader's own without steps."""
        if not self.steps:
            return self.reader.refinement
        return Refinement(self.steps, self.eta, self.momentum, self.positions)
