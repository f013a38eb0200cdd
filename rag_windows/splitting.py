"""A text too long for one window, cut into parts that fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*")
_SENTENCE = re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？]")
_SPACE = re.compile(r"\s+")

_FULL = 0.85
"""A part that uses this share of its room is long enough; searching on costs more than it gains."""


@dataclass(frozen=True, slots=True)
class Part:
    """Characters ``start`` to ``end`` of the text, and the ids of the window they make."""

    start: int
    end: int
    ids: tuple[int, ...]


class TooLittleRoomError(ValueError):
    """The smallest window is larger than the limit; ``size`` is its number of tokens."""

    def __init__(self, size: int) -> None:
        super().__init__(f"the smallest window has {size} tokens")
        self.size = size


def split(text: str, encode: Callable[[str], Sequence[int]], limit: int, size: int) -> list[Part]:
    """Cut a text into parts whose windows hold at most ``limit`` tokens.

    Parts follow each other without a gap or an overlap. A cut falls behind the last paragraph that
    ends in the second half of what fits, else behind the last such sentence, else behind the last
    white space, else between any two characters. Each part is encoded a few times at its own size,
    so the work grows with the length of the text and not with its square.

    Args:
        text: the whole text.
        encode: part of the text -> ids of the whole window, header included.
        limit: greatest number of tokens in a window.
        size: number of tokens of the window that the whole text would make.

    Raises:
        TooLittleRoomError: a window with one character does not fit, or what stands around the text
            leaves less than an eighth of the window for it.
    """
    around = len(encode(""))
    room = limit - around
    if room < max(1, limit // 8):
        raise TooLittleRoomError(around)
    guess = max(1, int(len(text) * room / max(1, size - around)))
    parts: list[Part] = []
    start = 0
    while start < len(text):
        length, ids = _longest(text, start, guess, encode, limit, around)
        guess = max(1, length)
        if start + length < len(text):
            shorter = _boundary(text[start : start + length])
            if shorter < length:
                shorter_ids = encode(text[start : start + shorter])
                # Fewer characters rarely make more tokens, but they can.
                if len(shorter_ids) <= limit:
                    length, ids = shorter, shorter_ids
        parts.append(Part(start, start + length, tuple(ids)))
        start += length
    return parts


def _longest(
    text: str,
    start: int,
    guess: int,
    encode: Callable[[str], Sequence[int]],
    limit: int,
    around: int,
) -> tuple[int, Sequence[int]]:
    """About the greatest number of characters from ``start`` that fit, and their ids."""
    rest = len(text) - start
    fits, fitting = 0, encode("")
    too_long = rest + 1
    length = min(guess, rest)
    while True:
        ids = encode(text[start : start + length])
        used = len(ids) - around
        room = limit - around
        if len(ids) <= limit:
            fits, fitting = length, ids
            if length == rest or used >= _FULL * room:
                break
            ahead = int(length * 0.98 * room / used) if used > 0 else length * 2
            length = min(max(length + 1, ahead), length * 4, rest)
        else:
            too_long = length
            if length == 1:
                raise TooLittleRoomError(len(ids))
            length = max(1, min(length - 1, int(length * 0.95 * room / used)))
        if too_long <= fits + 1:
            break
        if not fits < length < too_long:
            length = (fits + too_long) // 2
    return fits, fitting


def _boundary(fitting: str) -> int:
    half = len(fitting) // 2
    for pattern in (_PARAGRAPH, _SENTENCE, _SPACE):
        ends = [match.end() for match in pattern.finditer(fitting, half)]
        if ends:
            return ends[-1]
    return len(fitting)
