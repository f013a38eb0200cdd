"""The model as the keeper of passages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from rag_windows.cache.passage_cache import PassageCache
from rag_windows.cache.sizes import Size
from rag_windows.codebook.book import PassageBook, codebook_of
from rag_windows.codebook.preparing import OnPrepared
from rag_windows.errors import StopIterationTold
from rag_windows.request import Messages
from rag_windows.rescaling import Codebook, Method
from rag_windows.text_level import TextLM

if TYPE_CHECKING:
    from rag_windows.model import WindowedLM

WINDOWS = "windows"
"""Folder of a book's cache, in the book's own."""


class KeepingLM(TextLM):
    """A causal LM that keeps passages encoded; `WindowedLM` is what users hold."""

    @StopIterationTold()
    def codebook(
        self,
        method: str | Method | None = None,
        *,
        path: str | Path | None = None,
        prefix: str | None = None,
        conversation: Messages | None = None,
        memory: Size | None = "4GiB",
        disk: Size | None = None,
        salt: str | bytes | None = None,
        wait_s: float = 60.0,
        on_loaded: OnPrepared | None = None,
    ) -> PassageBook:
        """Make a store of encoded passages, or open the one in a folder.

        ::

            book = lm.codebook(Codebook(retrieve=4, reader=APE()), path="my-book")
            book.add(passages)
            lm.generate("Who crowned the queen?", book)

        Args:
            method: a `Codebook`, or one with a codebook as its reader; of any other method, and
                of the model's own for None, a codebook with that method as its reader.
            path: a folder in which the book is kept; None keeps it in memory alone.
            prefix: system prompt, as requests will have it.
            conversation: where requests hold a system message or tools, one such request.
            memory: host memory for windows, beside the keys that are searched.
            disk: disk space for windows, with a path; 50 GiB by default.
            salt: secret of a tenant; see `PassageCache`.
            wait_s: how long a change waits for one of another process on the same folder, in
                seconds; then it is a CacheError that names that process.
            on_loaded: called while a book is opened, with the passages done and all of them.

        Raises:
            InputError: a method or header whose windows depend on a request.
            CacheError: the folder can't be used, is damaged, or was made with something else.
        """
        chosen = self._method(method)
        if codebook_of(chosen) is None:
            chosen = Codebook(reader=chosen)
        folder = None if path is None else Path(path).expanduser()
        cache = PassageCache(
            memory,
            disk if folder is not None else None,
            None if folder is None else folder / WINDOWS,
            salt=salt,
        )
        return PassageBook(
            cast("WindowedLM", self.with_cache(cache)),
            cache,
            chosen,
            path=folder,
            prefix=prefix,
            conversation=conversation,
            wait_s=wait_s,
            on_loaded=on_loaded,
        )
