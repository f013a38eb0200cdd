"""The line above a passage's text in its window."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rag_windows.errors import PromptError
from rag_windows.passage import Passage

HeaderFunction = Callable[[Passage, int], str]
"""Passage and its 1-based number among the passages as given -> header line, or an empty string."""

Header = str | HeaderFunction
"""A name of ``HEADERS``, or a function."""


def _none(passage: Passage, number: int) -> str:
    return ""


def _title(passage: Passage, number: int) -> str:
    return passage.title or ""


def _number(passage: Passage, number: int) -> str:
    return f"[{number}]"


def _number_and_title(passage: Passage, number: int) -> str:
    return f"[{number}] {passage.title}" if passage.title else f"[{number}]"


HEADERS: Mapping[str, HeaderFunction] = {
    "none": _none,
    "title": _title,
    "number": _number,
    "number+title": _number_and_title,
}
"""``number`` and ``number+title`` make a window depend on the passage's place among the others."""


def header_function(header: Header) -> HeaderFunction:
    """The function of a header's name, or the function itself.

    Raises:
        PromptError: the name is unknown.
    """
    if callable(header):
        return header
    if header not in HEADERS:
        raise PromptError(
            f"Unknown header {header!r}; use one of {', '.join(HEADERS)}, or a function of "
            "(passage, number) that returns the header line."
        )
    return HEADERS[header]
