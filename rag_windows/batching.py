"""Which windows share a forward pass."""

from __future__ import annotations

from collections.abc import Sequence

MAX_PADDING = 0.1
"""Share of a pass that may be padding, before windows go to the next one."""

FREE_PADDING = 4
"""Tokens of padding a window may always have: a pass of its own would cost more."""


def chunks(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group windows that are packed without padding, longest first.

    Args:
        lengths: tokens of each window.
        max_tokens: bound on the tokens of one chunk; a longer window is alone in its own.

    Returns:
        Indices into ``lengths``, each once; windows of equal length stand beside each other.
    """
    made: list[list[int]] = []
    held = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if made and held + lengths[index] <= max_tokens:
            made[-1].append(index)
            held += lengths[index]
        else:
            made.append([index])
            held = lengths[index]
    return made


def bucket_by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group windows of like length that are padded to the longest, longest first.

    Args:
        lengths: tokens of each window.
        max_tokens: bound on rows x longest row of one bucket; a longer window is alone in its own.

    Returns:
        Indices into ``lengths``, each once. In every bucket each window is at most
        ``max(FREE_PADDING, MAX_PADDING * longest)`` tokens shorter than the longest.
    """
    buckets: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = (
            bool(buckets)
            and longest - lengths[index] <= max(FREE_PADDING, MAX_PADDING * longest)
            and (len(buckets[-1]) + 1) * longest <= max_tokens
        )
        if fits:
            buckets[-1].append(index)
        else:
            buckets.append([index])
            longest = lengths[index]
    return buckets
