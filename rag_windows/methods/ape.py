"""Adaptive Parallel Encoding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from rag_windows.methods.base import Method, finite

Form = Literal["as used", "as printed", "fixed ratio"]


@dataclass(frozen=True, slots=True)
class APE(Method):
    """Parallel windows with a sharper softmax inside the context and less weight on it.

    Source: Yang et al., "APE: Faster and Longer Context-Augmented Generation via Adaptive Parallel
    Encoding", ICLR 2025, https://arxiv.org/abs/2502.05431. With ``l_C(T)`` the log-sum-exp of
    ``logits / T`` over all windows, the three forms of its rescaling are:

    ============= ====================== ==================================================
    form          context's ``l``        where it stands
    ============= ====================== ==================================================
    as used       ``S * l_C(T)``         in the paper's experiments and released code
    as printed    ``T * (l_C(T) + log S)``  in the paper's first derivation
    fixed ratio   ``l_C(T) + log S``     in the paper's ablation
    ============= ====================== ==================================================

    The formula printed for the experiments normalises only with the exponent ``+(S-1)``, which is
    "as used". In models that cap their logits, ``T`` divides the capped logits. An attention sink
    is a segment of its own and is not rescaled.

    Attributes:
        temperature: T > 0, divides the logits inside the context.
        scale: S > 0, the exponent of the context's weight ("as used") or a factor on it.
        form: which of the three.
    """

    temperature: float = 0.9
    scale: float = 0.9
    form: Form = "as used"

    name: ClassVar[str] = "ape"
    formula: ClassVar[str] = "l = S * l_C(T)"
    paper: ClassVar[str] = "arXiv:2502.05431"

    def __post_init__(self) -> None:
        wanted = "a finite number above 0 (the paper searches 0.1 to 1.0)"
        for name, value in (("temperature", self.temperature), ("scale", self.scale)):
            self.require(name, finite(value) and value > 0, wanted)
        self.require_one("form", Form)

    @classmethod
    def from_released(cls, temperature: float, scale: float) -> APE:
        """Convert the numbers of the authors' released code, where ``S * T`` is the exponent."""
        return cls(temperature=temperature, scale=scale * temperature, form="as used")

    @property
    def slope(self) -> float:
        """S, T or 1; see the class for the three formulas."""
        return {"as used": self.scale, "as printed": self.temperature}.get(self.form, 1.0)

    @property
    def shift(self) -> float:
        """0, T log S or log S."""
        return 0.0 if self.form == "as used" else self.slope * math.log(self.scale)
