"""One question of a batch, as it is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from rag_windows.encoding import OnEncoded
from rag_windows.errors import InputError
from rag_windows.guard import FallbackOption
from rag_windows.linking.plan import Choose, LinkTokens
from rag_windows.request import Messages, PassageLike
from rag_windows.rescaling import Method

if TYPE_CHECKING:
    from rag_windows.codebook.book import PassageBook


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The arguments of `WindowedLM.generate`, which tells more of them.

    Attributes:
        query: a question, or a conversation.
        passages: in any order, or a book of them that chooses those which are read.
        prefix: system prompt, or None.
        method: how windows are read; None for the model's default.
        max_new_tokens: of the answer at most; None for 128, or a ``generation_config``'s.
        stop: the text ends before any of these strings.
        citations: whether to measure each passage's attention mass.
        seed: for sampling, private to this question; None uses PyTorch's global generator.
        on_encoded: called while passages are encoded, with the windows done and all of them.
        link_tokens: tokens of each window that are encoded in sight of the others: a number, a
            share of the window, or "all"; None for the method's own.
        link_choose: which ones: "first" or those of largest "deviation".
        fallback: "sequential" or a `Guard`: when to read the passages one after the other; None
            for never.
        options: what `generate` takes as ``generate_kwargs``.
    """

    query: Messages
    passages: Sequence[PassageLike] | PassageBook = ()
    prefix: str | None = None
    method: str | Method | None = None
    max_new_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    citations: bool = True
    seed: int | None = None
    on_encoded: OnEncoded | None = None
    link_tokens: LinkTokens | None = None
    link_choose: Choose = "first"
    fallback: FallbackOption = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, request: BatchRequest | Mapping[str, Any]) -> BatchRequest:
        """A request from the keyword arguments of `WindowedLM.generate`.

        Raises:
            InputError: there is no query, or it is no request at all.
        """
        if isinstance(request, BatchRequest):
            return request
        if not isinstance(request, Mapping) or "query" not in request:
            raise InputError(
                "Each request must be a BatchRequest or a dict of generate's arguments with a "
                f"'query', got {type(request).__name__}."
            )
        own = {one.name for one in fields(cls)} - {"options"}
        named = {name: value for name, value in request.items() if name in own}
        options = {name: value for name, value in request.items() if name not in own}
        return cls(**named, options=options)
