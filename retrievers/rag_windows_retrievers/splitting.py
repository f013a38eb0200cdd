"""Documents into passages that fit a budget."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from rag_windows import Passage, with_neighbours
from rag_windows.errors import InputError
from rag_windows_retrievers.documents import (
    TITLE_WORDS,
    Document,
    count_words,
    joined,
    words_of,
)
from rag_windows_retrievers.structure import Structure, structure_of

DEFAULT_WORDS = 120

_SENTENCE = re.compile(r"[.!?…][\"”’')\]]*\s+(?=[^\sa-z])|[。！？][”’」』]*")
_LINE = re.compile(r"\n")
_SPACE = re.compile(r"\s")
_INSIDE = (_SENTENCE, _LINE, _SPACE)
"""Where a line or a paragraph is cut that is too long as a whole."""


def split_documents(
    documents: Document | Iterable[Document], *, words: int = DEFAULT_WORDS
) -> tuple[Passage, ...]:
    """`split_document` for each of them; one document may stand by itself."""
    listed = [documents] if isinstance(documents, Document) else documents
    return tuple(passage for one in listed for passage in split_document(one, words=words))


def split_document(document: Document, *, words: int = DEFAULT_WORDS) -> tuple[Passage, ...]:
    """Cut a document between blocks, then between lines that stand by themselves, then sentences.

    Blocks are paragraphs, lists, tables and code; a heading stays with what follows it. Rows of
    tables, entries of lists and logs, and lines of code stand by themselves; those with less
    indentation are separated first. What is still too long is cut between sentences, lines, words
    and at last characters. Neighbouring short pieces share a passage. All text between the first
    and the last visible character of the document is in exactly one passage, except blank space at
    the cuts; the header of a table is repeated in front of rows that were separated from it.

    Args:
        document: the document; its title and metadata go with every passage.
        words: of a passage's text at most, at least 1; the title is not counted. A word is a run of
            visible characters, or one character of a script that is written without spaces.

    Returns:
        Passages with ids ``{document.id}#{n}`` from 1 on; an id that the document's author stated
        stays as it is where one passage holds the whole document. Each knows its document, its
        index and the texts in front of it, see `rag_windows.with_neighbours`. ``metadata`` gains

        - ``start`` and ``end``: ``document.text[start:end]`` is the passage's text, but for a
            table's header that was repeated in front of it;
        - ``section``: the headings above the passage's beginning, such as ``Setup > Linux``, where
            a document has some below its title and several passages;
        - ``page`` and ``last_page``, from 1, where the document has pages;
        - ``title``: the document's, where passages carry a shorter one that ends in ``…``. Theirs
            has at most 32 words.

        A name that the document's own metadata have is theirs; ours is ``passage_start`` then.

    Raises:
        InputError: ``words`` is below 1, or it is no document.
    """
    if not isinstance(document, Document):
        raise InputError(
            f"A document must be a Document, not {type(document).__name__}. Take it from "
            "load_documents(...).documents, or make one: Document(text, id)."
        )
    if words < 1:
        raise InputError(f"A passage must have at least 1 word, not {words}.")
    title = None if document.title is None else _shortened(document.title)
    splitter = _Splitter(document.text, words)
    single = document.named and len(splitter.spans) == 1
    passages = (
        Passage(
            text=f"{span.header}{document.text[span.start : span.end]}",
            id=document.id if single else f"{document.id}#{number}",
            title=title,
            metadata=joined(document.metadata, _place(document, splitter, span, title)),
            document=document.id,
            index=number - 1,
        )
        for number, span in enumerate(splitter.spans, start=1)
    )
    return tuple(with_neighbours(passages))


def _place(
    document: Document, splitter: _Splitter, span: _Span, title: str | None
) -> dict[str, Any]:
    """What a passage's metadata say of its place in its document."""
    place: dict[str, Any] = {"start": span.start, "end": span.end}
    if document.pages:
        # Pages without text begin where the next one does.
        place["page"] = bisect_right(document.pages, span.start)
        place["last_page"] = bisect_right(document.pages, span.end - 1)
    elif section := splitter.section(span.start, document.title):
        place["section"] = section
    if title != document.title:
        place["title"] = document.title
    return place


def _shortened(title: str) -> str:
    """As much of a title as passages carry."""
    ends = [word.end() for word in itertools.islice(words_of(title), TITLE_WORDS + 1)]
    if len(ends) <= TITLE_WORDS:
        return title
    short = f"{title[: ends[TITLE_WORDS - 1]]}…"
    # Behind a script without spaces, the dots are a word of their own.
    return short if count_words(short) <= TITLE_WORDS else f"{title[: ends[TITLE_WORDS - 2]]}…"


class _Span(NamedTuple):
    """A passage to be: characters of the text, and a table's header in front of them."""

    start: int
    end: int
    header: str


class _Splitter:
    """The spans of one text, without blank space around them.

    Args:
        text: the whole text.
        words: of a span with its header.
    """

    def __init__(self, text: str, words: int) -> None:
        self.spans: list[_Span] = []
        self._text, self._words = text, words
        self._structure = Structure()
        whole = text.strip()
        start = text.find(whole)
        end = start + len(whole)
        if whole and self._fits(start, end, ""):
            self.spans.append(_Span(start, end, ""))
        elif whole:
            self._structure = structure_of(text)
            self._cuts = sorted(self._structure.borders)
            self._ranks = [self._structure.borders[cut] for cut in self._cuts]
            for first, last in self._pieces(start, end, _INSIDE):
                self._add(first, last, _INSIDE)

    def section(self, start: int, title: str | None) -> str:
        """The names of the headings above a place, the title's left out."""
        names = self._paths[bisect_right(self._paths, start, key=lambda one: one[0]) - 1][1]
        return " > ".join(name for name in names if name != title)

    @cached_property
    def _paths(self) -> list[tuple[int, tuple[str, ...]]]:
        """Of each heading, its place and the names from the one of the highest level down to it."""
        paths: list[tuple[int, tuple[str, ...]]] = [(-1, ())]
        above: list[tuple[int, str]] = []
        for heading in self._structure.headings:
            above = [one for one in above if one[0] < heading.level]
            above.append((heading.level, _shortened(heading.name)))
            paths.append((heading.start, tuple(name for _, name in above if name)))
        return paths

    def _fits(self, start: int, end: int, header: str) -> bool:
        return count_words(f"{header}{self._text[start:end]}") <= self._words

    def _add(self, start: int, end: int, inside: Sequence[re.Pattern[str]]) -> None:
        """Put a piece of the text into the last span, or a new one, or several."""
        last = self.spans[-1] if self.spans else None
        if last and self._fits(last.start, end, last.header):
            self.spans[-1] = last._replace(end=end)
            return
        header = self._header(start)
        # Better a row without its header than a torn one.
        row = inside is _INSIDE and not self._borders(start, end)
        for one in (header, "") if header and row else (header,):
            if self._fits(start, end, one):
                self.spans.append(_Span(start, end, one))
                return
        if self._borders(start, end):
            following = inside
        elif inside:
            following = inside[1:]
        else:
            self._cut_word(start, end, header)
            return
        for first, final in self._pieces(start, end, inside):
            self._add(first, final, following)

    def _borders(self, start: int, end: int) -> range:
        """Which of the structure's cuts are inside a piece."""
        return range(bisect_right(self._cuts, start), bisect_left(self._cuts, end))

    def _pieces(
        self, start: int, end: int, inside: Sequence[re.Pattern[str]]
    ) -> Iterator[tuple[int, int]]:
        """Visible text between the best places for a cut."""
        if borders := self._borders(start, end):
            best = min(self._ranks[one] for one in borders)
            cuts = [self._cuts[one] for one in borders if self._ranks[one] == best]
        else:
            ends = (match.end() for match in inside[0].finditer(self._text, start, end))
            cuts = [cut for cut in ends if inside[0] is _SPACE or not self._in_heading(cut)]
        for first, last in itertools.pairwise([start, *cuts, end]):
            if part := self._text[first:last].strip():
                first = self._text.index(part, first)
                yield first, first + len(part)

    def _in_heading(self, cut: int) -> bool:
        """Whether a place is inside a heading, or between it and what follows it."""
        bound = self._structure.bound
        at = bisect_left(bound, cut, key=lambda one: one[0]) - 1
        return at >= 0 and cut <= bound[at][1]

    def _header(self, start: int) -> str:
        """The header of the table whose rows a place is among, where it leaves them enough."""
        tables = self._structure.tables
        at = bisect_right(tables, start, key=lambda one: one.start) - 1
        if at < 0 or start >= tables[at].end:
            return ""
        header = f"{tables[at].header}\n"
        return header if 4 * count_words(header) <= 3 * self._words else ""

    def _cut_word(self, start: int, end: int, header: str) -> None:
        free = self._words - count_words(header)
        ends = [start + word.end() for word in words_of(self._text[start:end])]
        cuts = [start, *ends[free - 1 : -1 : free], end]
        self.spans += [_Span(*both, header) for both in itertools.pairwise(cuts)]
