"""Windows of documents that an index holds no more, removed from passage caches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from rag_windows.errors import CacheError, InputError
from rag_windows.threads import Lock
from rag_windows_retrievers.index import Index

if TYPE_CHECKING:
    from rag_windows import PassageCache, WindowedLM

_log = logging.getLogger(__name__)

_AT_A_TIME = 500


class StaleWindows:
    """Removes windows of what an index has replaced or removed, whichever process did it.

    A window may have been encoded in sight of its neighbours, so all those of a changed document
    go. Windows in the memory of other processes stay there.

    Args:
        index: whose changes count.
        caches: a `PassageCache` for each tenant, or a `WindowedLM`, whose cache is meant; None is
            left out.
        version: of the index, up to which the caches have followed it; None is the present one.
        on_removed: called with the documents whose windows were removed; None for all documents.

    Attributes:
        version: as above, after the last call of `drop`.

    Raises:
        InputError: one of the caches is neither of them.
    """

    def __init__(
        self,
        index: Index,
        *caches: PassageCache | WindowedLM | None,
        version: int | None = None,
        on_removed: Callable[[Collection[str] | None], object] = lambda documents: None,
    ) -> None:
        found = map(_cache_of, caches)
        self._caches = [one for one in found if one is not None]
        self._index, self._on_removed, self._lock = index, on_removed, Lock()
        self.version = index.version if version is None else version
        self._pending: set[str] = set()
        self._everything = False

    def add(self, documents: Iterable[str]) -> None:
        """Remove the windows of these documents, too, with the next call of `drop`."""
        with self._lock:
            self._pending.update(documents)

    def waits(self, document: str | None = None) -> bool:
        """Whether windows have to be removed: of a document that is known to, or of any."""
        if document is not None:
            return document in self._pending
        changed = self._index.version != self.version
        return changed or self._everything or bool(self._pending)

    def drop(self, *, strict: bool = True) -> int:
        """Remove the windows of what has changed since the last call; returns how many there were.

        Args:
            strict: whether a shared store that can't be asked is an error; else a warning is
                logged. Either way the next call tries again.

        Raises:
            CacheError: the shared store can't be asked; what is here is removed.
            RetrievalError: the index can't be read.
        """
        with self._lock:
            now, stale = self._index.stale_since(self.version)
            # An index that was made anew counts its versions from one.
            self._everything |= stale is None or now < self.version
            self._pending.update(stale or ())
            self.version = now
            try:
                return self._drop()
            except CacheError as error:
                if strict:
                    raise
                _log.warning("Windows of removed documents are still stored: %s", error)
                return 0

    def _drop(self) -> int:
        if self._everything:
            for cache in self._caches[:1]:  # which clears those of all tenants
                cache.clear()
            self._everything = False
            self._on_removed(None)
        windows, failure, documents = 0, None, sorted(self._pending)
        for cache in self._caches:
            for start in range(0, len(documents), _AT_A_TIME):
                try:
                    windows += cache.invalidate(documents[start : start + _AT_A_TIME])
                except CacheError as error:  # the other windows must go all the same
                    failure = error
        self._on_removed(documents)
        if failure is not None:
            raise failure
        self._pending.clear()
        return windows


def _cache_of(given: Any) -> PassageCache | None:
    found: Any = getattr(given, "cache", given)
    if found is not None and not hasattr(found, "invalidate"):
        raise InputError(
            f"cache must be a PassageCache or a WindowedLM, not {type(given).__name__}. Give "
            "it the one that answers questions over these documents."
        )
    return found
