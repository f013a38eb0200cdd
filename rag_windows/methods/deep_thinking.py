"""Deep-Thinking: windows that read themselves several times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from rag_windows.errors import MethodError
from rag_windows.methods.base import finite, whole
from rag_windows.methods.composed import Composed

Positions = Literal["continue", "reuse"]


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
      ``KV_t = KV_{t-1} + eta * m_t``, summed up in fp32 and read in the model's dtype.

    Without momentum this is ``KV_t = eta * G_t + (1 - eta) * KV_{t-1}``. ``steps=0`` leaves the
    windows as the reader has them. The released code counts pass 0 too: its ``kv_iter=15`` is
    ``steps=14`` here. Eta 0.01 and momentum 0.9 are its defaults; how many steps are best it finds
    on labelled data, and `rag-windows calibrate` does so.

    The query reads ``KV_steps`` at the positions of plain windows. "continue", as released, lets
    the tokens of a pass stand behind their window, at ``start + L .. start + 2L - 1`` for one of
    ``L`` tokens at ``start``; their keys, made for those positions, are mixed as they are into keys
    of ``start .. start + L - 1``. It needs ``L`` positions more than the window itself. "reuse"
    lets them stand where the window stands, so that only keys of equal positions are mixed.

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
        for name, good, hint in (
            ("steps", whole(self.steps, 0), "a whole number of passes, 0 or more"),
            ("eta", finite(self.eta) and 0 < self.eta <= 1, "above 0 and at most 1"),
            ("momentum", finite(self.momentum) and 0 <= self.momentum < 1, "at least 0, below 1"),
            (
                "positions",
                self.positions in get_args(Positions),
                f"one of {list(get_args(Positions))}",
            ),
        ):
            if not good:
                given = getattr(self, name)
                raise MethodError(f"deep-thinking {name} must be {hint}, got {given!r}.")
        if self.reader.recompute is not None:
            self.refuse(
                "linking comes after refining. Let linked stand outside: "
                "Linked(reader=DeepThinking())."
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
    def refinement(self) -> DeepThinking | None:
        """Itself; without steps the reader's own."""
        return self if self.steps else self.reader.refinement

    def reach(self, tokens: int) -> int:
        """How many positions from its start on a window of so many tokens takes."""
        return 2 * tokens if self.positions == "continue" else tokens
