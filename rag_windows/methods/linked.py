"""Windows of which a share of the tokens has seen the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rag_windows.errors import MethodError
from rag_windows.methods.base import Alignment, Method
from rag_windows.methods.composed import Composed
from rag_windows.methods.steps import Choose, LinkTokens, Recompute


@dataclass(frozen=True, slots=True)
class Linked(Composed):
    """A step between parallel and sequential: some tokens of each window are encoded twice.

    Windows are encoded behind the prefix, each at the positions it has in one long prompt. Then the
    chosen tokens run through the model once more; in each layer their fresh keys and values replace
    the old ones, and they attend to the prefix and to every token before them, fresh or old. The
    query stands behind all of it and reads it by ``reader``.

    With ``tokens=0`` nothing of this happens: it is the reader, bit for bit. Where every token is
    linked, the passages are one ordinary prompt, encoded and read as `Sequential` does, whatever
    the reader. Because of the positions, all windows together have to fit the model's context.

    Which tokens: "first" is LegoLink (Hu et al., "EPIC", https://arxiv.org/abs/2410.15332):
    the first tokens of each window, which attract most of the attention that a window encoded
    alone wastes on its own beginning. "deviation" is CacheBlend (Yao et al.,
    https://arxiv.org/abs/2405.16444): as many tokens in all, of any window but the first, whose
    keys in the second layer differ most from those they have with sight of all windows; it costs
    one more pass of all tokens through the first layer. Tokens of the first window have seen all
    there is before them and are not run again.

    Attributes:
        tokens: an int is a number of tokens of each window; a float a share of them, 0.0 to 1.0,
            rounded up; "all" is 1.0.
        choose: "first" or "deviation".

    Raises:
        MethodError: numbers outside their domain, or a reader without windows that could be linked.
    """

    tokens: LinkTokens = 0.15
    choose: Choose = "first"

    name: ClassVar[str] = "linked"
    formula: ClassVar[str] = (
        "reader's, over windows with some tokens encoded in sight of the others"
    )
    paper: ClassVar[str] = "arXiv:2410.15332, arXiv:2405.16444"

    def __post_init__(self) -> None:
        Composed.__post_init__(self)
        self._plan()
        reason = _refusal(self.reader)
        if reason is not None:
            raise MethodError(f"linked can't be combined with {self.reader.name}: {reason}")

    def _plan(self) -> Recompute:
        return Recompute(self.tokens, self.choose)

    @property
    def alignment(self) -> Alignment:
        """One behind the other, unless nothing is linked."""
        return self.reader.alignment if self._plan().nothing else "in order"

    @property
    def recompute(self) -> Recompute | None:
        """The step, unless nothing is linked."""
        plan = self._plan()
        return None if plan.nothing else plan


def _refusal(reader: Method) -> str | None:
    """Why a reader's windows can't be linked, and what to do; None if they can."""
    if reader.combination is not None:
        return (
            "each of its windows answers alone, so none is to see another. Link windows that are "
            "read together, with ape or pcw as the reader."
        )
    if reader.selection is not None:
        return (
            "it chooses and fuses windows once the query is known, and linking needs them all and "
            "their order before. Give the passages that it would choose, and use ape or pcw."
        )
    if reader.alignment != "left":
        return (
            "its windows end at the same position, and linked ones stand one behind the other. "
            "Use mateicl for a weight on the query, or ape or pcw."
        )
    return None


def linked(method: Method, tokens: LinkTokens | None, choose: Choose = "first") -> Method:
    """A method with linked tokens; itself for None, and for `Sequential`, where all are.

    Raises:
        MethodError: see `Linked`.
    """
    if tokens is None:
        return method
    if not method.windowed:
        Recompute(tokens, choose)
        return method
    return Linked(tokens=tokens, choose=choose, reader=method)
