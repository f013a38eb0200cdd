"""Work that several threads want done is done by one of them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

from rag_windows.forks import in_children

T = TypeVar("T")


class Flights(Generic[T]):
    """Claims on keys: the first thread to claim one leads, the others follow it.

    A leader must land every claim once, and retire those that landed with a value; a follower that
    gets none (the leader failed, was cancelled, or took too long) does the work itself. Leading
    before following keeps two requests that wait for parts of each other from waiting for ever.
    """

    def __init__(self) -> None:
        self.after_fork()
        in_children(self)

    def after_fork(self) -> None:
        """What others were leading never lands in a child."""
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
            flying = self._flying
            flight = flying.get(key) if value is not None else flying.pop(key, None)
        if flight is not None:  # else the parent's, in a child that was forked on the way
            flight.set_result(value)

    def retire(self, key: str) -> None:
        """End a claim that landed with a value: it is stored now, or never will be."""
        with self._lock:
            self._flying.pop(key, None)
