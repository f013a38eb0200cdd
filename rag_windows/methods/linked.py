"""Windows of which a share of the tokens has seen the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from rag_windows.methods.ape import APE
from rag_windows.methods.auto import Auto
from rag_windows.methods.base import Alignment, Method, whole
from rag_windows.methods.composed import Composed

Choose = Literal["first", "deviation", "query", "last"]
LinkTokens = int | float | Literal["all"]


@dataclass(frozen=True, slots=True)
class Linked(Composed):
    """Between parallel and sequential: some tokens are encoded again in view of other windows.

    Windows are encoded behind the prefix, each at the positions it has in one long prompt, so that
    all together have to fit the model's context. Then the chosen tokens run through the model once
    more (selective recompute); in each layer their fresh keys and values replace the old ones, and
    they attend to the prefix and to every token before them, fresh or old. The query stands behind
    all of it and reads it by ``reader``.

    With ``tokens=0`` the result is exactly the reader's. If all tokens are chosen, the passages are
    encoded and read as `Sequential` does, whatever the reader. Tokens of the first window have seen
    everything before them already and are not run again.

    Attributes:
        tokens: an int is a number of tokens of each window, a float a share of them below 1.0,
            rounded up; "all" is every token. 1.0 is refused, as 1 is one token.
        choose: "first" is LegoLink (Hu et al., "EPIC", https://arxiv.org/abs/2410.15332): the first
            tokens of each window, which attract most of the attention that a window encoded by
            itself wastes on its own beginning. "deviation" is CacheBlend (Yao et al.,
            https://arxiv.org/abs/2405.16444): as many in all, whose keys in the second layer differ
            most from those they have with sight of all windows; it costs one more pass of all
            tokens through the first layer. "query" is ProphetKV (Wang et al.,
            https://arxiv.org/abs/2602.02579): as many in all, to which the query pays most
            attention when it reads the windows as they were encoded; see
            `rag_windows.steps.query_attention`. So the query is read twice, and each question
            over the same windows encodes tokens of its own again. "last" is ours: as "query", but
            only the attention of the query's last token counts, which writes the answer, and only
            in the middle half of the layers; a token counts as much as the one in front of it, too.
    """

    tokens: LinkTokens = 0.15
    choose: Choose = "first"

    name: ClassVar[str] = "linked"
    formula: ClassVar[str] = (
        "reader's, over windows with some tokens encoded in sight of the others"
    )
    paper: ClassVar[str] = "arXiv:2410.15332, arXiv:2405.16444, arXiv:2602.02579"

    def __post_init__(self) -> None:
        Composed.__post_init__(self)
        share = isinstance(self.tokens, float) and 0.0 <= self.tokens < 1.0
        self.require(
            "tokens",
            self.tokens == "all" or share or whole(self.tokens, 0),
            "a number of tokens from 0 on (an int), a share from 0.0 to below 1.0 (a float; 0.15 "
            "is a usual start) or 'all'",
        )
        self.require_one("choose", Choose)
        if self.reader.combination is not None:
            self.refuse("each of its windows answers alone; use ape or pcw as the reader.")
        if self.reader.selection is not None:
            self.refuse("it chooses windows once the query is known; use ape or pcw.")
        if self.reader.neighbours:
            self.refuse("its windows need room in front of them; use sink, ape or pcw.")
        if self.reader.alignment != "left":
            self.refuse("its windows end at one position; use mateicl, ape or pcw.")

    @property
    def alignment(self) -> Alignment:
        """One behind the other, unless nothing is linked."""
        return "in order" if self.tokens else self.reader.alignment

    @property
    def recompute(self) -> Linked | None:
        """Itself, unless nothing is linked."""
        return self if self.tokens else None

    def counts(self, lengths: Sequence[int]) -> list[int]:
        """Tokens to encode again in windows of these lengths; only "first" takes them so.

        Of the other choices their sum counts, over all windows but the first.
        """
        if self.tokens == "all":
            return list(lengths)
        if isinstance(self.tokens, int):
            return [min(self.tokens, length) for length in lengths]
        # A product such as 0.15 * 20 may stand a rounding error above the whole number it is.
        return [math.ceil(self.tokens * length - 1e-9) for length in lengths]

    def everything(self, lengths: Sequence[int]) -> bool:
        """Whether every token of such windows is linked: then they are one ordinary prompt."""
        return bool(lengths) and self.counts(lengths) == list(lengths)


def linked(method: Method, tokens: LinkTokens | None, choose: Choose = "first") -> Method:
    """A method with linked tokens; itself for None, and for `Sequential`, where all are.

    `Auto` chooses among passages. Linked, all of them are read, by `APE`.
    """
    if tokens is None:
        return method
    if isinstance(method, Auto):
        method = APE()
    link = Linked(tokens=tokens, choose=choose)
    return replace(link, reader=method) if method.windowed else method
