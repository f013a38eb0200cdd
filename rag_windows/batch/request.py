"""One question of a batch, as it is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from rag_windows.encoding import OnEncoded
from rag_windows.errors import InputError
from rag_windows.guard.settings import FallbackOption
from rag_windows.linking.plan import Choose, LinkTokens
from rag_windows.request import Messages, PassageLike
from rag_windows.rescaling import Method

if TYPE_CHECKING:
    from rag_windows.codebook.book import PassageBook


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The arguments of `WindowedLM.generate`.

    Attributes:
        query: see there, as of all others.
        passages: see there.
        prefix: see there.
        method: see there.
        max_new_tokens: see there.
        stop: see there.
        citations: see there.
        seed: see there.
        on_encoded: see there.
        link_tokens: see there.
        link_choose: see there.
        fallback: see there.
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
