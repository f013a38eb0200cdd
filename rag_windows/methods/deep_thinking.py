"""Deep-Thinking: windows that read themselves several times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rag_windows.methods.base import finite, whole
from rag_windows.methods.composed import Composed

Positions = Literal["continue", "reuse"]


@dataclass(frozen=True, slots=True)
class DeepThinking(Composed):
    """Windows that run through the model several more times, and are then read by another method.

    Source: Yang et al., "Iterative Forward Tuning Boosts In-Context Learning in Language Models",
    https://arxiv.org/abs/2305.13016, section 3, and the code released with it. Keys and values of
    every layer are one state ``KV``; each window has its own and is refined by itself:

    - Pass 0 is the plain encoding: the window behind the prefix. ``KV_0`` is what it gives.
    - Pass t = 1..steps runs the window's tokens through the model again. They see the prefix, all
      of their window in ``KV_{t-1}``, and causally themselves; the keys and values that they make
      are ``G_t``. Then ``m_t = (G_t - KV_{t-1}) + momentum * m_{t-1}`` with ``m_0 = 0``, and
      ``KV_t = KV_{t-1} + eta * m_t``, summed up in fp32 and read in the model's dtype.

    The released code counts pass 0 too: its ``kv_iter=15`` is ``steps=14`` here. Eta and momentum
    are its defaults; how many steps are best it finds on labelled data, as `rag-windows compare`
    does. With `Sequential` as the reader all passages are one long window, the paper's own use.

    Attributes:
        steps: passes after the plain encoding, 0 or more; each costs a little more than encoding.
        eta: step size, above 0 and up to 1.
        momentum: 0 (none) up to, not including, 1.
        positions: where the tokens of a pass stand. "continue", as released: behind their window,
            which needs as many positions again; "reuse": where the window stands, so that only
            keys of equal positions are mixed. The query reads them at the window's positions.
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
        eta, momentum = self.eta, self.momentum
        self.require("steps", whole(self.steps, 0), "a whole number of passes, 0 or more")
        self.require("eta", finite(eta) and 0 < eta <= 1, "above 0 and at most 1")
        self.require("momentum", finite(momentum) and 0 <= momentum < 1, "at least 0, below 1")
        self.require_one("positions", Positions)
        if self.reader.recompute is not None:
            self.refuse("linking comes after refining; use Linked(reader=DeepThinking()).")

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
