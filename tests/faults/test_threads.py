"""Fault: 16 threads storing, reading, evicting and clearing.

A Hypothesis state machine against a dict model. Each step hands every one of 16 threads a few
operations and starts them together. A read must return a miss or, whole and unmixed, an entry that
was stored under that key; afterwards each key must hold what some order of the operations leaves.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from rag_windows import PassageCache
from rag_windows.cache.arena import ArenaTier
from rag_windows.cache.memory import MemoryTier
from tests.rag_windows.cache.disk_cases import FULL, entry, key_of, tier

THREADS = 16
EVERY = range(6)
KEYS = [key_of(number) for number in EVERY]
VERSIONS = 16
ROOM, TIGHT, TIGHT_ARENA = 1_000_000, 8_000, 1_424
"""Bytes of memory for all entries, and for about half of them."""

KINDS = ("put", "put", "put", "get", "get", "get", "remove")
Operation = tuple[str, int, int]
"""What, on which key, with which version."""


def entry_of(number: int, version: int) -> Any:
    """Its ids, numbers and size say which it is."""
    value = float(100 * number + version)
    ids = number, version, *range(version % 3)
    tensors = [torch.full((2, len(ids), 2), value + layer) for layer in range(2)]
    return entry(ids, 1, tensors, 0.01 * (1 + number), (KEYS[number],), 0.0)


ENTRIES = {
    (number, version): entry_of(number, version) for number in EVERY for version in range(VERSIONS)
}


def version_of(number: int, entry: Any) -> int:
    """Which version of a key an entry is; fails unless every part of it is that one's."""
    window = entry.window
    # What was on disk does not know its ids, so the numbers tell.
    version = int(window.keys[0][0, 0, 0]) - 100 * number
    expected = ENTRIES[number, version].window
    assert window.ids in (expected.ids, (0,) * len(expected.ids))
    assert window.start == expected.start
    pairs = zip((*window.keys, *window.values), (*expected.keys, *expected.values), strict=True)
    assert all(torch.equal(got, wanted) for got, wanted in pairs)
    assert entry.labels == (KEYS[number],)
    return version


class Shelf:
    """A tier by itself, or the whole cache.

    Attributes:
        roomy: everything fits, so nothing may be missing that was not removed.
        versions: how many entries a key may stand for in turn; one where a key means one for ever.
        forgetful: what is being stored is undone by a removal at the same moment, or by another
            entry under the same key.
    """

    def __init__(self, kind: str, *, roomy: bool = True, store: str = "as computed") -> None:
        self.roomy, self._kind = roomy, kind
        self.versions = 1 if kind == "cache" else VERSIONS
        self.forgetful = kind not in ("memory", "arena")
        self._folder = tempfile.TemporaryDirectory(prefix="shelf-")
        memory, disk = ROOM if roomy else TIGHT, 10_000_000
        self._tier: Any
        if kind == "memory":
            self._tier = MemoryTier(memory, store)
        elif kind == "arena":
            self._tier = ArenaTier(ROOM if roomy else TIGHT_ARENA, torch.device("cpu"))
        elif kind == "disk":
            self._tier = tier(Path(self._folder.name), disk)
        else:
            self._tier = PassageCache(memory, disk=disk, path=self._folder.name)

    def put(self, number: int, version: int) -> bool:
        key, entry = KEYS[number], ENTRIES[number, version]
        if self._kind != "cache":
            return bool(self._tier.put(key, entry))
        self._tier.keep(key, entry, self._tier.epoch, wait=True)
        return True

    def get(self, numbers: Iterable[int]) -> dict[int, Any]:
        keys = [KEYS[number] for number in numbers]
        if self._kind != "cache":
            found = self._tier.get_many(keys)
        else:
            found = self._tier.quick(keys)
            found |= self._tier.from_disk([key for key in keys if key not in found])
        return {KEYS.index(key): entry for key, entry in found.items()}

    def remove(self, number: int) -> None:
        self._tier.remove([KEYS[number]])

    def clear(self) -> None:
        self._tier.clear()

    def settle(self) -> None:
        """Wait until nothing happens any more, and check what must then be true."""
        if self._kind == "cache":
            assert self._tier.flush(60.0)
            tiers = list(self._tier.stats().tiers.values())
        else:
            tiers = [self._tier.stats()]
            assert tiers[0].entries == sum(key in self._tier for key in KEYS)
            assert not (self.roomy and tiers[0].evictions)
        for stats in tiers:
            assert 0 <= stats.bytes <= stats.limit_bytes
            assert stats.quarantined == stats.failed == 0

    def close(self) -> None:
        self._tier.close()
        self._folder.cleanup()


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

    make: ClassVar[Callable[[], Shelf]]
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


CASES: dict[str, tuple[Callable[[], Shelf], int, int]] = {
    "memory": (partial(Shelf, "memory"), 500, 5000),
    "memory, evicting": (partial(Shelf, "memory", roomy=False), 500, 5000),
    "memory, int8": (partial(Shelf, "memory", store="int8"), 20, 500),
    "arena": (partial(Shelf, "arena"), 200, 5000),
    "arena, evicting": (partial(Shelf, "arena", roomy=False), 200, 5000),
    "disk": (partial(Shelf, "disk"), 10, 200),
    "cache": (partial(Shelf, "cache"), 15, 300),
    "cache, evicting": (partial(Shelf, "cache", roomy=False), 15, 300),
}


@pytest.mark.slow
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
