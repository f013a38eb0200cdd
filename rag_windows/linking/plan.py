"""How many tokens of each window are linked, and by which rule they are chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from rag_windows.errors import MethodError

if TYPE_CHECKING:
    from rag_windows.encoding import Encoder
    from rag_windows.kv import Window

Choose = Literal["first", "deviation"]
LinkTokens = int | float | Literal["all"]

_SLACK = 1e-9
"""A product such as 0.15 * 20 may stand a rounding error above the whole number it is."""


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """The step that `rag_windows.rescaling.Linked` adds to encoding.

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

    def link(
        self, encoder: Encoder, windows: Sequence[Window], prefix: Window | None
    ) -> tuple[list[Window], list[int]]:
        """Link the windows of one request; see `rag_windows.linking.linker.link`."""
        from rag_windows.linking.linker import link  # it imports what imports methods

        return link(encoder, windows, prefix, self)


def _in_domain(tokens: object) -> bool:
    if tokens == "all":
        return True
    if isinstance(tokens, bool) or not isinstance(tokens, int | float):
        return False
    return tokens >= 0 if isinstance(tokens, int) else 0.0 <= tokens <= 1.0
