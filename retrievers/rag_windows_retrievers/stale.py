"""Windows of documents that an index holds no more, removed from a passage cache."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from rag_windows.errors import CacheError, InputError
from rag_windows.threads import Lock
from rag_windows_retrievers.index import Index

if TYPE_CHECKING:
    from rag_windows import PassageCache, WindowedLM

_log = logging.getLogger(__name__)


class StaleWindows:
    """Removes windows of what an index has replaced or removed, whichever process did it.

    From the moment on at which this is made. A window may have seen its neighbours, so all those
    of a changed document go. Windows that other processes hold in memory are their own affair.

    Args:
        index: whose changes count.
        cache: a `PassageCache`, or a `WindowedLM`, whose cache is meant; None does nothing.

    Raises:
        InputError: `cache` is neither of them.
    """

    def __init__(self, index: Index, cache: PassageCache | WindowedLM | None) -> None:
        found: Any = cache
        if cache is not None and hasattr(cache, "cache"):
            found = cache.cache
        if found is not None and not hasattr(found, "invalidate"):
            raise InputError(
                f"cache must be a PassageCache or a WindowedLM, not {type(cache).__name__}. Give "
                "it the one that answers questions over these documents."
            )
        self._index, self._cache, self._lock = index, found, Lock()
        self._version = 0 if found is None else index.version

    def drop(self, *, strict: bool = True) -> None:
        """Remove the windows of what has changed since the last call.

        Args:
            strict: whether a shared store that can't be asked is an error; else a warning is
                logged. Either way the next call tries again.

        Raises:
            CacheError: the shared store can't be asked; what is here is removed.
            RetrievalError: the index can't be read.
        """
        if self._cache is None:
            return
        with self._lock:
            version, ids = self._index.stale_since(self._version)
            try:
                if ids is None:
                    self._cache.clear()
                elif ids:
                    self._cache.invalidate(ids)
            except CacheError as error:
                if strict:
                    raise
                _log.warning("Windows of removed documents are still stored: %s", error)
            else:
                self._version = version
