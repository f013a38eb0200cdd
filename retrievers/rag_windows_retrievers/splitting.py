"""Texts into parts that are short enough, cut where a reader would cut them."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rag_windows import Passage
from rag_windows.errors import InputError
from rag_windows_retrievers.documents import Document

DEFAULT_WORDS = 120

# Scripts without spaces count a word a character; a run of 40 characters without a space counts as
# a word too, so that no single "word" can be longer than a passage.
_LONGEST = 40
_WORD = re.compile(rf"[぀-ヿ㐀-䶿一-鿿]|[^\s぀-ヿ㐀-䶿一-鿿]{{1,{_LONGEST}}}")
_PARAGRAPH = re.compile(r"\n[ \t]*\n\s*")
_SENTENCE = re.compile(r"[.!?…][\"”’')\]]*\s+(?=[^\sa-z])|[。！？][”’」』]*")
_LINE = re.compile(r"\n")
_HEADING = re.compile(r"#{1,6}[ \t][^\n]*\Z")


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """How long a passage may be, in a model's tokens.

    Args:
        limit: tokens of a passage at most, at least 1, else an `InputError`.
        count: text -> number of tokens, without special tokens; `SentenceEncoder.count` is one, and
            ``lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])`` another.
    """

    limit: int
    count: Callable[[str], int]

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise InputError(f"A passage needs at least 1 token, not {self.limit}.")


def split_documents(
    documents: Iterable[Document],
    *,
    words: int = DEFAULT_WORDS,
    tokens: TokenBudget | None = None,
) -> tuple[Passage, ...]:
    """`split_document` for each of them."""
    return tuple(
        passage for one in documents for passage in split_document(one, words=words, tokens=tokens)
    )


def split_document(
    document: Document, *, words: int = DEFAULT_WORDS, tokens: TokenBudget | None = None
) -> tuple[Passage, ...]:
    """Cut a document at paragraph borders, then sentences, then lines, then words.

    Neighbouring short paragraphs share a passage. All text between the first and the last visible
    character of the document is in exactly one passage, except blank space at the cuts. Counted in
    words, a last passage of less than a quarter joins the one before, which may then hold up to
    ``1.25 * words``; a budget in tokens is never exceeded.

    Args:
        document: the document; its title and metadata go with every passage.
        words: aimed-at length, at least 1. A word is a run of visible characters, or one character
            of a script that is written without spaces.
        tokens: a limit in a model's tokens, instead of `words`. The title is not counted.

    Returns:
        Passages with ids ``{document.id}#{n}`` from 1 on; an id that the document's author stated
        stays as it is where one passage holds the whole document. ``metadata`` gains ``start`` and
        ``end``, the passage's characters in `document.text`.

    Raises:
        InputError: ``words`` is below 1, or the budget is too small for a single character.
    """
    text = document.text
    if tokens is not None:
        spans = fitting(text, tokens.count, tokens.limit)
    elif words < 1:
        raise InputError(f"A passage needs at least 1 word, not {words}.")
    else:
        spans = fitting(text, _count_words, words)
        if len(spans) > 1 and _count_words(text[slice(*spans[-1])]) * 4 < words:
            joined = spans[-2][0], spans[-1][1]
            if _count_words(text[slice(*joined)]) <= words * 5 // 4:
                spans[-2:] = [joined]
    keep = document.named and len(spans) == 1
    return tuple(
        Passage(
            text=text[start:end],
            id=document.id if keep else f"{document.id}#{number}",
            title=document.title,
            metadata={**document.metadata, "start": start, "end": end},
        )
        for number, (start, end) in enumerate(spans, start=1)
    )


def _count_words(text: str) -> int:
    return sum(1 for _ in _WORD.finditer(text))


def fitting(text: str, measure: Callable[[str], int], limit: int) -> list[tuple[int, int]]:
    """Stretches of a text as long as fit: (start, end), without blank space around them.

    Lengths need not add up. An `InputError` where a single character is longer.
    """
    spans: list[tuple[int, int]] = []
    for start, end in _units(text, measure, limit):
        if spans and measure(text[spans[-1][0] : end]) <= limit:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return spans


def _units(text: str, measure: Callable[[str], int], limit: int) -> Iterator[tuple[int, int]]:
    """Stretches that fit and are not cut."""

    def cut(start: int, end: int, *borders: re.Pattern[str]) -> Iterator[tuple[int, int]]:
        if measure(text[start:end]) <= limit:
            yield start, end
        elif borders:
            for first, last in _between(text, start, end, borders[0]):
                yield from cut(first, last, *borders[1:])
        else:
            yield from _longest_first(text, start, end, measure, limit)

    pending: int | None = None
    for start, end in _between(text, 0, len(text), _PARAGRAPH):
        first = start if pending is None else pending
        if _HEADING.match(text, start, end):
            # A heading belongs to what follows it.
            pending = first
        else:
            yield from cut(first, end, _SENTENCE, _LINE)
            pending = None
    if pending is not None:
        yield from cut(pending, len(text.rstrip()), _LINE)


def _between(text: str, start: int, end: int, border: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Visible text between borders."""
    cuts = [start, *(match.end() for match in border.finditer(text, start, end)), end]
    for first, last in itertools.pairwise(cuts):
        yield from _visible(text, first, last)


def _visible(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    part = text[start:end]
    if part.strip():
        yield start + len(part) - len(part.lstrip()), start + len(part.rstrip())


def _longest_first(
    text: str, start: int, end: int, measure: Callable[[str], int], limit: int
) -> Iterator[tuple[int, int]]:
    """As much as fits, again and again: cut between words where one ends in its second half."""

    def length(stop: int) -> int:
        return measure(text[start:stop])

    while start < end:
        stops = range(start + 1, min(end, start + _LONGEST * limit) + 1)
        fits = bisect_right(stops, limit, key=length)
        if not fits:
            raise InputError(
                f"A passage of {limit} tokens can't hold a character of {length(start + 1)}; "
                "give it more tokens."
            )
        stop = start + fits
        words = text[start:stop].rsplit(maxsplit=1)
        inside = stop < end and not (text[stop - 1].isspace() or text[stop].isspace())
        if inside and len(words) == 2 and len(words[0]) > fits // 2:
            stop = start + len(words[0])
        yield from _visible(text, start, stop)
        start = stop
