"""Work that several threads want done is done by one of them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Generic, TypeVar

T = TypeVar("T")


class Flights(Generic[T]):
    """Claims on keys: the first thread to claim one leads, the others follow it.

    A leader must land every claim once, and retire those that landed with a value; a follower that
    gets none (the leader failed, was cancelled, or took too long) does the work itself. Leading
    before following keeps two requests that wait for parts of each other from waiting for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flying: dict[str, Future[T | None]] = {}

    def claim(self, keys: Iterable[str]) -> tuple[list[str], dict[str, Future[T | None]]]:
        """Claim keys.

        Returns:
            Those that this thread leads now, and those that another thread leads already.
        """
        mine: list[str] = []
        theirs: dict[str, Future[T | None]] = {}
        with self._lock:
            for key in dict.fromkeys(keys):
                flight = self._flying.get(key)
                if flight is None:
                    self._flying[key] = Future()
                    mine.append(key)
                else:
                    theirs[key] = flight
        return mine, theirs

    def land(self, key: str, value: T | None) -> None:
        """Tell followers what came of a claim; None tells them to do it themselves.

        With a value the claim stays until it is retired, so that whoever comes before the value
        can be found elsewhere gets it from here. Without one it ends at once.
        """
        with self._lock:
            flight = self._flying[key] if value is not None else self._flying.pop(key)
        flight.set_result(value)

    def retire(self, key: str) -> None:
        """End a claim that landed with a value: it is stored now, or never will be."""
        with self._lock:
            del self._flying[key]


def follow(flight: Future[T | None], timeout_s: float) -> T | None:
    """What a leader landed with; None if nothing, or not in time."""
    try:
        return flight.result(timeout_s)
    except FutureTimeoutError:
        return None
