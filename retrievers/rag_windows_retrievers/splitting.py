"""Documents into passages of about the same length."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

from rag_windows.passage import Passage
from rag_windows_retrievers.documents import Document
from rag_windows_retrievers.lengths import Length, TokenBudget, WordBudget

DEFAULT_WORDS = 120

_PARAGRAPH = re.compile(r"\n[ \t]*\n\s*")
_SENTENCE = re.compile(r"[.!?…][\"”’')\]]*\s+(?=[^\sa-z])|[。！？][”’」』]*")
_LINE = re.compile(r"\n")
_HEADING = re.compile(r"#{1,6}[ \t][^\n]*\Z")


def split_documents(
    documents: Iterable[Document],
    *,
    words: int = DEFAULT_WORDS,
    tokens: TokenBudget | None = None,
) -> tuple[Passage, ...]:
    """Split every document; see `split_document`."""
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
    length: Length = WordBudget(words) if tokens is None else tokens
    spans = list(_pack(document.text, length))
    keep = document.named and len(spans) == 1
    return tuple(
        Passage(
            text=document.text[start:end],
            id=document.id if keep else f"{document.id}#{number}",
            title=document.title,
            metadata={**document.metadata, "start": start, "end": end},
        )
        for number, (start, end) in enumerate(spans, start=1)
    )


def _pack(text: str, length: Length) -> Iterator[tuple[int, int]]:
    groups: list[tuple[int, int]] = []
    for start, end in _units(text, length):
        # Measured together: lengths in tokens do not add up.
        if groups and length.measure(text[groups[-1][0] : end]) <= length.limit:
            groups[-1] = (groups[-1][0], end)
        else:
            groups.append((start, end))
    if len(groups) > 1:
        (first, _), (start, end) = groups[-2:]
        short = length.measure(text[start:end]) * 4 < length.limit
        if short and length.measure(text[first:end]) <= length.most:
            groups[-2:] = [(first, end)]
    return iter(groups)


def _units(text: str, length: Length) -> Iterator[tuple[int, int]]:
    """Stretches within the limit that are not cut: (start, end)."""
    pending: int | None = None
    for start, end in _stretches(text, 0, len(text), _PARAGRAPH):
        first = start if pending is None else pending
        if _HEADING.match(text, start, end):
            # A heading belongs to what follows it.
            pending = first
        else:
            yield from _cut(text, first, end, length, (_SENTENCE, _LINE))
            pending = None
    if pending is not None:
        yield from _cut(text, pending, len(text.rstrip()), length, (_LINE,))


def _cut(
    text: str, start: int, end: int, length: Length, borders: tuple[re.Pattern[str], ...]
) -> Iterator[tuple[int, int]]:
    if length.measure(text[start:end]) <= length.limit:
        yield start, end
    elif borders:
        for first, last in _stretches(text, start, end, borders[0]):
            yield from _cut(text, first, last, length, borders[1:])
    else:
        for first, last in length.cut(text[start:end]):
            yield start + first, start + last


def _stretches(
    text: str, start: int, end: int, border: re.Pattern[str]
) -> Iterator[tuple[int, int]]:
    """Visible text between borders, without blank space around it."""
    cuts = [start, *(match.end() for match in border.finditer(text, start, end)), end]
    for first, last in itertools.pairwise(cuts):
        part = text[first:last]
        if part.strip():
            lead = len(part) - len(part.lstrip())
            yield first + lead, first + len(part.rstrip())
