"""A text that is longer than a model reads at once, as parts that it reads whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rag_windows.errors import InputError
from rag_windows.prompt.builder import TooLittleRoomError, split

Encode = Callable[[str], Sequence[int]]


def fitting_parts(text: str, header: str, encode: Encode, limit: int | None) -> list[str]:
    """Cut a text so that no token of it is lost to a model's limit.

    Cuts fall behind paragraphs, sentences, white space or, where none of these is near, between
    two characters; see `rag_windows.prompt.builder.split`.

    Args:
        text: any text.
        header: repeated before each part, unless that leaves no room.
        encode: text -> token ids as the model gets them, special tokens included.
        limit: tokens that the model reads; None for a model without a limit.

    Returns:
        The whole text where it fits, else its parts in order; one at least.

    Raises:
        InputError: the model reads too few tokens for any text.
    """
    whole = header + text
    if limit is None or (size := len(encode(whole))) <= limit:
        return [whole]
    try:
        parts = split(text, lambda part: encode(header + part), limit, size)
        return [header + text[part.start : part.end] for part in parts]
    except TooLittleRoomError as error:
        if header:
            return fitting_parts(whole, "", encode, limit)
        raise InputError(
            f"The model reads {limit} tokens at once, and {error.size} are needed at least; "
            "choose a model with a longer input."
        ) from error
