"""A book in the place of passages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rag_windows.codebook.book import PassageBook, codebook_of
from rag_windows.errors import InputError, MethodError
from rag_windows.methods import Method, resolve
from rag_windows.request import Messages, PassageLike

if TYPE_CHECKING:
    from rag_windows.engine import Engine


@dataclass(frozen=True, slots=True)
class Opened:
    """What a request reads, and how.

    Attributes:
        engine: of the model; with a book, the same with the book's cache.
        passages: those given, or those that the book chose.
        prefix: the request's, or the book's.
        method: the request's, or the book's; None for the model's own.
    """

    engine: Engine
    passages: Sequence[PassageLike]
    prefix: str | None
    method: str | Method | None


def opened(
    engine: Engine,
    query: Messages,
    passages: Sequence[PassageLike] | PassageBook,
    prefix: str | None,
    method: str | Method | None,
) -> Opened:
    """Let a book choose the passages for a query; passages stay as they are.

    Raises:
        InputError: a book of another model, or of another prefix.
        MethodError: a method that can't read what the book keeps.
    """
    if not isinstance(passages, PassageBook):
        return Opened(engine, passages, prefix, method)
    book = passages
    if book.lm.model is not engine.model:
        raise InputError("This book belongs to another model; ask the one that made it (book.lm).")
    chosen = book.method if method is None else resolve(method)
    _check(book, chosen)
    codebook = codebook_of(chosen) or book.codebook
    found = book.search(query, codebook.retrieve, prefix=prefix)
    return Opened(
        book.lm.engine,
        [one.passage for one in found],
        book.prefix if prefix is None else prefix,
        chosen,
    )


def _check(book: PassageBook, method: Method) -> None:
    """Refuse a method that would not find its windows in the book."""
    reason = None
    codebook = codebook_of(method)
    if not method.windowed:
        reason = "it reads passages one after the other, and a book keeps windows"
    elif method.alignment != book.method.alignment:
        reason = "its windows stand at other positions than the book's"
    elif method.encoding != book.method.encoding:
        reason = (
            f"its windows are encoded in another way ({method.encoding!r}) than the book's "
            f"({book.method.encoding!r})"
        )
    elif codebook is not None and codebook.search != book.codebook.search:
        reason = "it compares other keys than the book keeps"
    if reason is not None:
        raise MethodError(
            f"{method.name} can't read this book: {reason}. Use the book's own method, or make a "
            "book for this one."
        )
