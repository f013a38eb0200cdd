"""Whether the passes that refine a window fit the model's positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rag_windows.errors import LimitError

if TYPE_CHECKING:
    from rag_windows.rescaling import Refinement


def check_room(
    refinement: Refinement,
    starts: Sequence[int],
    lengths: Sequence[int],
    limit: int | None,
    name: Callable[[int], str],
    shorten: str = "give windows of at most {} tokens",
) -> None:
    """Refuse windows whose further passes would stand beyond the model's positions.

    Args:
        refinement: of the method.
        starts: position of each window's first token.
        lengths: tokens of each window.
        limit: positions that the model has, or None for no limit.
        name: how the error calls a window, by its index.
        shorten: what else helps, with a place for the number of tokens that fit.

    Raises:
        LimitError: naming the first window that does not fit, and what to do.
    """
    if limit is None:
        return
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        needed = refinement.positions(length)
        if needed > length and start + needed > limit:
            fitting = max(0, (limit - start) * length // needed)
            raise LimitError(
                f"{name(index)} has {length} tokens from position {start} on, and the passes that "
                f"refine it stand behind it: they reach {start + needed} positions, and the model "
                f"has {limit}. Use positions='reuse', or {shorten.format(fitting)}."
            )
