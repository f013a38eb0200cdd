"""Errors of the file system, which must not become errors of an answer."""

from __future__ import annotations

import logging
from types import TracebackType

from rag_windows.forks import Lock

logger = logging.getLogger(__name__)


class Trouble:
    """``with trouble:`` lets an `OSError` end the block quietly; the first one is logged.

    Args:
        path: the folder to name in the warning.
    """

    def __init__(self, path: str) -> None:
        self.count = 0
        self._path = path
        self._mutex = Lock()

    def tell(self, error: OSError) -> None:
        """Count an error; the first one is logged as a warning, the others as information."""
        with self._mutex:
            self.count += 1
            level = logging.WARNING if self.count == 1 else logging.INFO
        logger.log(
            level,
            "the passage cache in %s can't be used for now, answers stay right but slower: %s",
            self._path,
            error,
        )

    def __enter__(self) -> Trouble:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, OSError):
            return False
        self.tell(error)
        return True
