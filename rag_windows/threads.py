"""Threads and forks: locks that are free in a forked child, threads that end with the process."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet


class Forked(Protocol):
    """Something that a child must put in order before it uses it."""

    def after_fork(self) -> None:
        """Forget what the parent's threads were doing; called in the child, which has one thread.

        Whatever another thread was in the midst of changing may be half changed.
        """


_known: WeakSet[Forked] = WeakSet()


def in_children(one: Forked) -> None:
    """Have an object's `after_fork` called in every child that is forked while it lives."""
    _known.add(one)


class Lock:
    """A `threading.Lock` that is free in a forked child, unless the thread that forks holds it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        in_children(self)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *error: object) -> None:
        self._owner = None
        self._lock.release()

    def locked(self) -> bool:
        """Whether a thread holds it."""
        return self._lock.locked()

    def after_fork(self) -> None:
        """See `Forked`."""
        if self._owner != threading.get_ident():
            self._lock = threading.Lock()
            self._owner = None


def _put_in_order() -> None:
    for one in list(_known):
        one.after_fork()


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_put_in_order)


PATIENCE = 30.0
"""Seconds that a process which ends waits for its workers, once they were asked to stop."""


class Worker(threading.Thread):
    """A thread that generates; a process that ends stops it first.

    A thread cut off inside of a tensor operation aborts Python.

    Args:
        work: what it does.
        name: of the thread.
        stop: makes it end soon; called from any thread.
    """

    def __init__(self, work: Callable[[], None], name: str, stop: Callable[[], object]) -> None:
        super().__init__(target=work, name=name, daemon=True)
        self.stop = stop

    def start(self) -> None:
        """Start; RuntimeError if the system gives no more threads."""
        super().start()
        _workers.add(self)


_workers: WeakSet[Worker] = WeakSet()


@atexit.register
def _stop_workers() -> None:
    workers = [*_workers]
    for worker in workers:
        worker.stop()
    deadline = time.monotonic() + PATIENCE
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
