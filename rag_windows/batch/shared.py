"""One scheduler for all who ask the same model."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakValueDictionary

from rag_windows.batch.scheduler import Scheduler
from rag_windows.forks import Lock

if TYPE_CHECKING:
    from rag_windows.model import WindowedLM

_schedulers: WeakKeyDictionary[WindowedLM, WeakValueDictionary[int, Scheduler]] = (
    WeakKeyDictionary()
)
_lock = Lock()


def shared_scheduler(lm: WindowedLM, max_rows: int) -> Scheduler:
    """The scheduler with so many rows that everybody who asks this model gets now.

    Nothing is kept alive: one that answers nobody and that nobody holds is gone, and the next call
    makes another, which costs nothing. A model with another cache (``with_cache``) is another one.

    Raises:
        InputError: ``max_rows`` is below 1.
    """
    with _lock:
        by_rows = _schedulers.setdefault(lm, WeakValueDictionary())
        found = by_rows.get(max_rows)
        if found is None or found.closed:
            found = by_rows[max_rows] = lm.scheduler(max_rows=max_rows)
        return found
