"""How long a passage may be, in words or in a model's tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from rag_windows.errors import InputError
from rag_windows.prompt.builder import TooLittleRoomError, split

# Scripts without spaces count a word a character; a run of 40 characters without a space counts as
# a word too, so that no single "word" can be longer than a passage.
_WORD = re.compile(r"[぀-ヿ㐀-䶿一-鿿]|[^\s぀-ヿ㐀-䶿一-鿿]{1,40}")


def count_words(text: str) -> int:
    """Length of a text in words, as `split_document` counts them."""
    return sum(1 for _ in _WORD.finditer(text))


class Length(Protocol):
    """A measure of texts and a limit in it."""

    @property
    def limit(self) -> int:
        """The length that passages are filled up to."""
        ...

    @property
    def most(self) -> int:
        """The length of a passage that a short rest has joined."""
        ...

    def measure(self, text: str) -> int:
        """Length of a text."""
        ...

    def cut(self, text: str) -> Iterator[tuple[int, int]]:
        """Cut a text without borders into (start, end) within the limit, all visible text in it."""
        ...


@dataclass(frozen=True, slots=True)
class WordBudget:
    """A length in words; see `count_words`.

    Raises:
        InputError: the limit is below 1.
    """

    limit: int

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise InputError(f"A passage needs at least 1 word, not {self.limit}.")

    @property
    def most(self) -> int:
        """A quarter more."""
        return self.limit * 5 // 4

    def measure(self, text: str) -> int:
        """Number of words."""
        return count_words(text)

    def cut(self, text: str) -> Iterator[tuple[int, int]]:
        """Behind every `limit` words."""
        found = list(_WORD.finditer(text))
        for i in range(0, len(found), self.limit):
            part = found[i : i + self.limit]
            yield part[0].start(), part[-1].end()


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """A length in a model's tokens.

    Args:
        limit: tokens of a passage at most.
        count: text -> number of tokens, without special tokens; `SentenceEncoder.count` is one, and
            ``lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])`` another.

    Raises:
        InputError: the limit is below 1, or (while cutting) below one character's tokens.
    """

    limit: int
    count: Callable[[str], int]

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise InputError(f"A passage needs at least 1 token, not {self.limit}.")

    @property
    def most(self) -> int:
        """No more than the limit."""
        return self.limit

    def measure(self, text: str) -> int:
        """Number of tokens."""
        return self.count(text)

    def cut(self, text: str) -> Iterator[tuple[int, int]]:
        """Between words where they fit, else between characters."""
        try:
            parts = split(text, lambda part: range(self.count(part)), self.limit, self.count(text))
        except TooLittleRoomError as error:
            raise InputError(
                f"A passage of {self.limit} tokens can't hold a character of {error.size}; "
                "give it more tokens."
            ) from error
        for part in parts:
            found = text[part.start : part.end]
            if found.strip():
                lead = len(found) - len(found.lstrip())
                yield part.start + lead, part.start + len(found.rstrip())
