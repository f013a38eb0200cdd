"""The numbers of the steps that a method may add to prefill and reading; the engine takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from rag_windows.errors import MethodError
from rag_windows.methods.key_search import KeySearch

Positions = Literal["continue", "reuse"]


@dataclass(frozen=True, slots=True)
class Refinement:
    """``KV_t = KV_{t-1} + eta * m_t``, ``m_t = (G_t - KV_{t-1}) + momentum * m_{t-1}``.

    For the meaning of the numbers and for what a pass ``G_t`` sees, see `DeepThinking`. The update
    is summed up in fp32 (in fp64 for fp64 models); each pass reads it rounded to the model's dtype,
    and so is what comes out.

    Attributes:
        steps: passes after the plain encoding, at least 1.
        eta: step size.
        momentum: share of the last pass's movement that goes on.
        at: where the tokens of a pass stand.
    """

    steps: int
    eta: float
    momentum: float
    at: Positions

    def positions(self, tokens: int) -> int:
        """How many positions from its start on a window of so many tokens takes."""
        return 2 * tokens if self.at == "continue" else tokens


Choose = Literal["first", "deviation"]
LinkTokens = int | float | Literal["all"]

_SLACK = 1e-9
"""A product such as 0.15 * 20 may stand a rounding error above the whole number it is."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """The step that `Linked` adds to encoding.

    Attributes:
        tokens: an int is a number of tokens of each window; a float a share of them, 0.0 to 1.0,
            rounded up to whole tokens; "all" is 1.0. Note that 1 is one token and 1.0 every token.
        choose: "first" takes the first tokens of each window; "deviation" takes, over all windows
            together, those whose keys change most.

    Raises:
        MethodError: a number outside its domain, or an unknown rule.
    """

    tokens: LinkTokens = 0.15
    choose: Choose = "first"

    def __post_init__(self) -> None:
        if not _in_domain(self.tokens):
            raise MethodError(
                f"link tokens must be a number of tokens from 0 on (an int), a share from 0.0 to "
                f"1.0 (a float) or 'all', got {self.tokens!r}; 0.15 is a usual start."
            )
        if self.choose not in get_args(Choose):
            raise MethodError(
                f"link choose must be one of {list(get_args(Choose))}, got {self.choose!r}."
            )

    @property
    def nothing(self) -> bool:
        """Whether no token is linked, whatever the windows."""
        return self.tokens != "all" and self.tokens == 0

    def counts(self, lengths: Sequence[int]) -> list[int]:
        """Tokens to link in windows of these lengths, by window.

        With "deviation" only their sum counts.
        """
        if self.tokens == "all":
            return list(lengths)
        if isinstance(self.tokens, int):
            return [min(self.tokens, length) for length in lengths]
        return [math.ceil(self.tokens * length - _SLACK) for length in lengths]

    def everything(self, lengths: Sequence[int]) -> bool:
        """Whether every token of such windows is linked: then they are one ordinary prompt."""
        return bool(lengths) and self.counts(lengths) == list(lengths)


def _in_domain(tokens: object) -> bool:
    if tokens == "all":
        return True
    if isinstance(tokens, bool) or not isinstance(tokens, int | float):
        return False
    return tokens >= 0 if isinstance(tokens, int) else 0.0 <= tokens <= 1.0


Fusion = Literal["concat", "mean", "sum"]


@dataclass(frozen=True, slots=True)
class Selection:
    """Chooses the passages whose keys are most like the query's, and fuses their windows.

    Attributes:
        retrieve: how many passages (citation groups); a passage is read with all its windows.
        search: how keys are compared.
        fusion: what becomes of the chosen windows.
    """

    retrieve: int
    search: KeySearch = field(default_factory=KeySearch)
    fusion: Fusion = "concat"
