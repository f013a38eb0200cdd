"""Writing to the slow tiers beside the request that it came from."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from rag_windows.threads import in_children

Job = Callable[[bool], None]
"""Does the work if it gets True; else only gives back what the work holds."""

EXIT_S = 30.0
"""How long the end of the interpreter waits for what is not written yet."""


class Writer:
    """One thread that does jobs in order, with a bound on the bytes that wait.

    The thread starts with the first job and ends when nothing is left to do, so that a cache that
    is not used holds none, and a process that forks has a working one on both sides.

    Args:
        limit_bytes: most bytes that may wait; one job that is larger waits alone.
        linger_s: how long the thread waits for a further job before it ends.
    """

    def __init__(self, limit_bytes: int, linger_s: float = 2.0) -> None:
        self._state = _State(limit_bytes, linger_s)
        # Runs when the writer is dropped, and at the end of the interpreter.
        self._finalize = weakref.finalize(self, _State.finish, self._state, EXIT_S)

    @property
    def dropped(self) -> int:
        """Jobs that were not done because too much was waiting."""
        return self._state.dropped

    def submit(self, job: Job, nbytes: int, *, wait: bool = False) -> bool:
        """Hand over a job.

        Args:
            job: must not raise.
            nbytes: what it keeps in memory while it waits.
            wait: whether to wait for room; else a job that finds none is called with False.

        Returns:
            Whether the job was taken.
        """
        return self._state.submit(job, nbytes, wait=wait)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to do; False if that took too long."""
        return self._state.flush(timeout_s)

    def close(self) -> None:
        """Do what waits; later jobs are refused."""
        self._state.finish(None)


class _State:
    """What the thread and its writer share; the thread must not keep the writer alive."""

    def __init__(self, limit_bytes: int, linger_s: float) -> None:
        self.dropped = 0
        self._limit = limit_bytes
        self._linger_s = linger_s
        self._change = threading.Condition()
        self._jobs: deque[tuple[Job, int]] = deque()
        self._waiting_bytes = 0
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None
        in_children(self)

    def submit(self, job: Job, nbytes: int, *, wait: bool) -> bool:
        with self._change:
            while wait and not self._closed and not self._room(nbytes):
                self._change.wait()
            taken = not self._closed and self._room(nbytes)
            if taken:
                self._jobs.append((job, nbytes))
                self._waiting_bytes += nbytes
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="rag-windows-cache")
                    self._thread.daemon = True
                    self._thread.start()
                self._change.notify_all()
            else:
                self.dropped += 1
        if not taken:
            job(False)
        return taken

    def flush(self, timeout_s: float | None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._change:
            while self._jobs or self._busy:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._change.wait(left)
        return True

    def finish(self, timeout_s: float | None) -> None:
        self.flush(timeout_s)
        with self._change:
            self._closed = True
            self._change.notify_all()

    def _room(self, nbytes: int) -> bool:
        return not self._waiting_bytes or self._waiting_bytes + nbytes <= self._limit

    def after_fork(self) -> None:
        """A child has no such thread, and what waits is the parent's to write."""
        self.__init__(self._limit, self._linger_s)  # type: ignore[misc] # anew, on purpose

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._jobs:
                    waited = self._change.wait(self._linger_s)
                    if not self._jobs and (self._closed or not waited):
                        self._thread = None
                        return
                job, nbytes = self._jobs.popleft()
                self._busy = True
            done = False
            try:
                job(True)
                done = True
            finally:
                del job  # what it holds is free before the wait for the next one
                with self._change:
                    self._busy = False
                    self._waiting_bytes -= nbytes
                    if not done:
                        self._thread = None
                    self._change.notify_all()
