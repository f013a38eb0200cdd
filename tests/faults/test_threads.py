"""Fault: 16 threads storing, reading, evicting and clearing.

A Hypothesis state machine against a dict model. Each step hands every one of 16 threads a few
operations and starts them together. A read must return a miss or, whole and unmixed, an entry that
was stored under that key; afterwards each key must hold what some order of the operations leaves.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import ClassVar

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.faults.shelves import (
    KEYS,
    CacheShelf,
    DiskShelf,
    MemoryShelf,
    TierShelf,
    version_of,
)

THREADS = 16
FULL = os.environ.get("RAG_WINDOWS_FAULTS") == "full"
EVERY = range(len(KEYS))
KINDS = ("put", "put", "put", "get", "get", "get", "remove")
Operation = tuple[str, int, int]
"""What, on which key, with which version."""


def operation(byte: int, versions: dict[int, int], count: int) -> Operation:
    """What a byte stands for; each put of a key brings its next version."""
    if byte >= 250:
        return "clear", 0, 0
    number, kind = byte % len(KEYS), KINDS[byte // len(KEYS) % len(KINDS)]
    if kind == "put":
        versions[number] = (versions[number] + 1) % count
    return kind, number, versions[number]


class Threads(RuleBasedStateMachine):
    """Steps of operations that run at once; the model knows what each key may hold."""

    make: ClassVar[Callable[[], TierShelf]]
    pool: ClassVar[ThreadPoolExecutor]

    def __init__(self) -> None:
        super().__init__()
        self.shelf = type(self).make()
        self.model: dict[int, int] = {}
        self.versions = dict.fromkeys(EVERY, 0)

    @rule(program=st.binary(min_size=THREADS, max_size=2 * THREADS))
    def together(self, program: bytes) -> None:
        done = [operation(byte, self.versions, self.shelf.versions) for byte in program]
        barrier = threading.Barrier(THREADS, timeout=60)
        removing = any(kind in ("clear", "remove") for kind, _, _ in done)
        puts = Counter(number for kind, number, _ in done if kind == "put")
        # Storing may only fail for want of room, or because another thread came in between.
        sure = {
            number
            for number in EVERY
            if self.shelf.roomy and not (self.shelf.forgetful and (removing or puts[number] > 1))
        }
        work = [
            self.pool.submit(self.run_one, done[thread::THREADS], barrier, sure)
            for thread in range(THREADS)
        ]
        wait(work)
        reads = [read for future in work for read in future.result()]
        self.shelf.settle()
        for number, version in reads:
            stored = {v for kind, n, v in done if (kind, n) == ("put", number)}
            assert version in stored or version == self.model.get(number)
        found = self.shelf.get(EVERY)
        held = {number: version_of(number, entry) for number, entry in found.items()}
        for number in EVERY:
            assert held.get(number) in self.allowed(number, done, removing)
        self.model = held

    def run_one(
        self, work: list[Operation], barrier: threading.Barrier, sure: set[int]
    ) -> list[tuple[int, int]]:
        """One thread's share; returns what it read."""
        reads = []
        barrier.wait()
        for kind, number, version in work:
            if kind == "put":
                assert self.shelf.put(number, version) or number not in sure
            elif kind == "get":
                found = self.shelf.get([number, (number + 1) % len(KEYS)])
                reads += [(key, version_of(key, entry)) for key, entry in found.items()]
            elif kind == "remove":
                self.shelf.remove(number)
            else:
                self.shelf.clear()
        return reads

    def allowed(self, number: int, done: list[Operation], removing: bool) -> set[int | None]:
        """What a key may hold after a step."""
        before = self.model.get(number)
        writes = [
            [
                version if kind == "put" else None
                for kind, key, version in done[thread::THREADS]
                if kind == "clear" or (key == number and kind in ("put", "remove"))
            ]
            for thread in range(THREADS)
        ]
        # Whichever thread was last, the last thing that it did remains.
        last: set[int | None] = {own[-1] for own in writes if own} or {before}
        if not self.shelf.roomy:
            last |= {version for own in writes for version in own} | {before, None}
        if self.shelf.forgetful and removing:
            last.add(None)
        return last

    def teardown(self) -> None:
        self.shelf.close()


CASES: dict[str, tuple[Callable[[], TierShelf], int, int]] = {
    "memory": (partial(MemoryShelf, roomy=True), 500, 5000),
    "memory, evicting": (partial(MemoryShelf, roomy=False), 500, 5000),
    "memory, int8": (partial(MemoryShelf, roomy=True, store="int8"), 20, 500),
    "disk": (partial(DiskShelf, roomy=True), 10, 200),
    "cache": (partial(CacheShelf, roomy=True), 15, 300),
    "cache, evicting": (partial(CacheShelf, roomy=False), 15, 300),
}


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Threads take turns after 20 microseconds instead of 5 milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_switching")
@pytest.mark.parametrize("case", CASES)
def test_16_threads_against_a_dict(case: str) -> None:
    make, sampled, full = CASES[case]
    runs = int(os.environ.get("RAG_WINDOWS_THREAD_RUNS", full if FULL else sampled))
    with ThreadPoolExecutor(THREADS) as pool:
        run_state_machine_as_test(
            type("Threads", (Threads,), {"make": staticmethod(make), "pool": pool}),
            settings=settings(
                max_examples=runs,
                stateful_step_count=2,
                phases=[Phase.generate],  # what depends on timing can't be shrunk
            ),
        )
