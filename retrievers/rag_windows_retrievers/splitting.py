"""Documents into passages of about the same length."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

from rag_windows.errors import InputError
from rag_windows.passage import Passage
from rag_windows_retrievers.documents import Document

DEFAULT_WORDS = 120

# Scripts without spaces count a word a character; a run of 40 characters without a space counts as
# a word too, so that no single "word" can be longer than a passage.
_WORD = re.compile(r"[぀-ヿ㐀-䶿一-鿿]|[^\s぀-ヿ㐀-䶿一-鿿]{1,40}")
_PARAGRAPH = re.compile(r"\n[ \t]*\n\s*")
_SENTENCE = re.compile(r"[.!?…][\"”’')\]]*\s+(?=[^\sa-z])|[。！？][”’」』]*")
_LINE = re.compile(r"\n")
_HEADING = re.compile(r"#{1,6}[ \t]+[^\n]*\Z")


def split_documents(
    documents: Iterable[Document], *, words: int = DEFAULT_WORDS
) -> tuple[Passage, ...]:
    """Split every document; see `split_document`."""
    return tuple(passage for one in documents for passage in split_document(one, words=words))


def split_document(document: Document, *, words: int = DEFAULT_WORDS) -> tuple[Passage, ...]:
    """Cut a document at paragraph borders, then sentences, then lines, then words.

    Neighbouring short paragraphs share a passage. A last passage of less than a quarter joins the
    one before, which may then hold up to ``1.25 * words``. All text between the first and the last
    visible character of the document is in exactly one passage, except blank space at the cuts.

    Args:
        document: the document; its title and metadata go with every passage.
        words: aimed-at length, at least 1. A word is a run of visible characters, or one character
            of a script that is written without spaces.

    Returns:
        Passages with ids ``{document.id}#{n}`` from 1 on; an id that the document's author stated
        stays as it is where one passage holds the whole document. ``metadata`` gains ``start`` and
        ``end``, the passage's characters in `document.text`.

    Raises:
        InputError: ``words`` is below 1.
    """
    if words < 1:
        raise InputError(f"A passage needs at least 1 word, not {words}.")
    spans = list(_pack(document.text, words))
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


def count_words(text: str) -> int:
    """Length of a text in words, as `split_document` counts them."""
    return sum(1 for _ in _WORD.finditer(text))


def _pack(text: str, words: int) -> Iterator[tuple[int, int]]:
    groups: list[tuple[int, int, int]] = []
    for start, end, size in _units(text, words):
        if groups and groups[-1][2] + size <= words:
            groups[-1] = (groups[-1][0], end, groups[-1][2] + size)
        else:
            groups.append((start, end, size))
    if len(groups) > 1 and groups[-1][2] * 4 < words:
        (start, _, size), (_, end, rest) = groups[-2:]
        if (size + rest) * 4 <= words * 5:
            groups[-2:] = [(start, end, size + rest)]
    return ((start, end) for start, end, _ in groups)


def _units(text: str, words: int) -> Iterator[tuple[int, int, int]]:
    """Stretches of at most `words` words that are not cut: (start, end, words)."""
    pending: int | None = None
    for start, end in _stretches(text, 0, len(text), _PARAGRAPH):
        first = start if pending is None else pending
        if _HEADING.match(text, start, end):
            # A heading belongs to what follows it.
            pending = first
        else:
            yield from _cut(text, first, end, words, (_SENTENCE, _LINE))
            pending = None
    if pending is not None:
        yield from _cut(text, pending, len(text.rstrip()), words, (_LINE,))


def _cut(
    text: str, start: int, end: int, words: int, borders: tuple[re.Pattern[str], ...]
) -> Iterator[tuple[int, int, int]]:
    size = sum(1 for _ in _WORD.finditer(text, start, end))
    if size <= words:
        yield start, end, size
    elif borders:
        for first, last in _stretches(text, start, end, borders[0]):
            yield from _cut(text, first, last, words, borders[1:])
    else:
        found = list(_WORD.finditer(text, start, end))
        for i in range(0, size, words):
            part = found[i : i + words]
            yield part[0].start(), part[-1].end(), len(part)


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
