"""Examples and what was made of them, entry by entry."""

from __future__ import annotations

from collections.abc import Sequence, Sized

from rag_windows.errors import InputError
from rag_windows.evaluation.example import Example


def check_aligned(examples: Sequence[Example], what: str, items: Sized) -> None:
    """Make sure that there is one item an example.

    Args:
        examples: what was asked.
        what: the items' name for the message, such as "answers".
        items: one an example, in the same order.

    Raises:
        InputError: there are more or fewer.
    """
    if len(items) != len(examples):
        raise InputError(
            f"{len(items)} {what} for {len(examples)} examples; give one an example, in order."
        )
