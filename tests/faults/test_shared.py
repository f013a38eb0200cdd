"""A store that machines share and that fails in every way, in a thousand rounds (`make faults`).

Must show: no wrong window, no error, no request that waits for long.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rag_windows import PassageCache, WindowedLM
from rag_windows.cache import remote, shared
from tests.rag_windows import small
from tests.rag_windows.cache.disk_cases import FULL, end_of, in_child, key_of, right
from tests.rag_windows.cache.shared_cases import between, fresh, labelled

ROUNDS = 1000 if FULL else 400
WITHIN_S = 0.03
NUMBERS = range(12)
TOKENS = 60
OPERATIONS = 2000 if FULL else 100


class StoreError(Exception):
    """What a library of a store raises: no OSError."""


class Unreliable:
    """A store whose calls are, by chance, late, cut, damaged, mixed up or refused.

    Attributes:
        chance: of a fault in a call.
        dead: whether every call fails.
    """

    def __init__(self, seed: int) -> None:
        self.chance, self.dead = 0.5, False
        self.faults: dict[str, int] = {}
        self._random = random.Random(seed)
        self._seen: list[bytes] = [b""]
        self._lock = threading.Lock()

    def __call__(self, name: str, plain: Any, *given: Any, **options: Any) -> Any:
        with self._lock:
            draw, kind = self._random.random(), self._random.choice(self.kinds(name))
            at = self._random.random()
            other = self._random.choice(self._seen)
            if draw < self.chance or self.dead:
                kind = "gone" if self.dead else kind
                self.faults[kind] = self.faults.get(kind, 0) + 1
            else:
                kind = "well"
        if kind == "late":
            time.sleep(2 * WITHIN_S)
        if kind == "gone":
            raise random.Random(draw).choice([ConnectionResetError(), StoreError("x"), OSError(5)])
        if kind == "forbidden":
            raise PermissionError("not yours")
        if name == "pipe_file":
            return self.write(kind, at, plain, *given)
        found = plain(*given, **options)
        if name != "cat_file":
            return found
        with self._lock:
            self._seen = [*self._seen[-40:], found]
        return self.changed(kind, at, found, other)

    def kinds(self, name: str) -> Sequence[str]:
        if name == "cat_file":
            return ("late", "gone", "forbidden", "cut", "longer", "flipped", "other", "nothing")
        return ("late", "gone", "forbidden", "full", "half")

    def write(self, kind: str, at: float, plain: Any, path: str, data: bytes) -> None:
        if kind == "full":
            raise OSError(28, "No space left on device")
        if kind == "half":  # dies in the midst, and reports success
            data = data[: int(at * len(data))]
        plain(path, data)

    def changed(self, kind: str, at: float, found: bytes, other: bytes) -> Any:
        place = int(at * len(found))
        if kind == "cut":
            return found[:place]
        if kind == "longer":
            return found + other[:64] + b"\0"
        if kind == "flipped":
            return found[:place] + bytes([found[place] ^ 1 << place % 8]) + found[place + 1 :]
        if kind == "other":
            return other
        if kind == "nothing":
            return None
        return found


@pytest.fixture(autouse=True)
def never_left_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pauses would spare the store most of the rounds."""
    monkeypatch.setattr(remote, "_STRIKES", 10**9)
    yield
    deadline = time.monotonic() + 20
    while any(one.name == "rag-windows-shared" for one in threading.enumerate()):
        assert time.monotonic() < deadline, "threads that are late end, too"
        time.sleep(0.01)


def in_parts(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """In every second round entries are read in parts."""
    monkeypatch.setattr(shared, "_PART_BYTES", 2048 if number % 2 else 8 << 20)


@pytest.mark.slow
def test_the_tier_gives_right_entries_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    store, tier = Unreliable(1), shared.SharedTier(fresh())
    between(tier, store)
    draw = random.Random(2)
    found, slowest = 0, 0.0
    for number in range(ROUNDS):
        store.dead = number % 100 > 94
        in_parts(monkeypatch, number)
        asked = draw.sample(NUMBERS, 3)
        begun = time.perf_counter()
        got = tier.get_many([key_of(one) for one in asked], within_s=WITHIN_S)
        slowest = max(slowest, time.perf_counter() - begun)
        for one in asked:
            entry = got.get(key_of(one))
            if entry is not None:
                assert right(entry, one, TOKENS)
                found += 1
            elif draw.random() < 0.5:
                tier.put(key_of(one), labelled(one, TOKENS))
    assert found > ROUNDS / 2
    assert slowest < 2
    assert min(store.faults.values()) > ROUNDS / 50
    stats = tier.stats()
    assert min(stats.quarantined, stats.failed, stats.late, stats.stored) > ROUNDS / 20
    assert stats.hits == found


@cache
def reference() -> dict[tuple[int, ...], Any]:
    """Windows as they are without any cache."""
    return {one.ids: one for one in small.lm().encode_ids(PREFIX, WINDOWS).each}


PREFIX = tuple(range(10, 15))
WINDOWS = [tuple(range(20 + 3 * one, 24 + 4 * one)) for one in NUMBERS]


@pytest.mark.slow
def test_requests_get_right_windows_from_many_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round is a machine that has just started: all that it does not encode, it reads."""
    store, url = Unreliable(3), fresh()
    draw = random.Random(4)
    model = WindowedLM(small.model(), small.tokenizer())
    hits = encoded = 0
    for number in range(ROUNDS):
        store.dead = number % 100 > 94
        in_parts(monkeypatch, number)
        cache = PassageCache("100kB", shared=url, shared_wait=WITHIN_S)
        between(cache, store)
        lm = model.with_cache(cache)
        asked = draw.sample(WINDOWS, 3)
        made = lm.encode_ids(PREFIX, asked).each
        for ids, window in zip(asked, made, strict=True):
            wanted = reference()[ids]
            assert (window.ids, window.start) == (ids, wanted.start)
            for one, other in zip(
                (*window.keys, *window.values), (*wanted.keys, *wanted.values), strict=True
            ):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
        if draw.random() < 0.1:
            cache.flush(20)
        stats = cache.stats()
        hits, encoded = hits + stats.hits, encoded + stats.misses
    assert hits > ROUNDS / 2
    assert encoded > ROUNDS / 2
    assert min(store.faults.values()) > ROUNDS / 50


def mixed_operations(folder: Path, seed: int) -> None:
    draw, tier = random.Random(seed), shared.SharedTier(str(folder))
    for number in range(OPERATIONS):
        one, chance = draw.choice(NUMBERS), draw.random()
        if chance < 0.5:
            asked = [one, *draw.sample(NUMBERS, 2)]
            for key, entry in tier.get_many([key_of(number) for number in asked]).items():
                assert right(entry, next(one for one in asked if key_of(one) == key))
        elif chance < 0.9:
            assert tier.put(key_of(one), labelled(one))
        elif chance < 0.98:
            tier.remove([key_of(one)])
        elif number % 2:
            tier.prune(time.time())
        else:
            assert tier.verify()[1] == 0
    stats = tier.stats()
    assert stats.quarantined == stats.failed == stats.late == 0


def one_folder(folder: Path, seed: int) -> None:
    """Puts and removes the one entry of a folder, which so is made and removed all the time."""
    tier = shared.SharedTier(str(folder))
    for _ in range(OPERATIONS):
        assert tier.put(key_of(1), labelled(1))
        tier.remove([key_of(1)])


@pytest.mark.slow
def test_a_folder_that_others_remove_is_made_again(tmp_path: Path) -> None:
    children = [in_child(partial(one_folder, tmp_path, seed)) for seed in range(4)]
    assert [end_of(child) for child in children] == [0] * 4


def endless_operations(folder: Path, seed: int) -> None:
    while True:
        mixed_operations(folder, seed)


def test_processes_share_a_folder_and_one_of_them_is_killed(tmp_path: Path) -> None:
    """Nobody sees half a file, and what the dead leave behind goes."""
    children = [in_child(partial(endless_operations, tmp_path, 0))]
    children += [in_child(partial(mixed_operations, tmp_path, seed)) for seed in range(1, 4)]
    time.sleep(0.2)
    os.kill(children[0], signal.SIGKILL)
    assert [end_of(child) for child in children] == [-signal.SIGKILL, 0, 0, 0]
    tier = shared.SharedTier(str(tmp_path))
    tier.prune(time.time() + 100_000)
    held = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert not [name for name in held if name.endswith(".tmp") and "safetensors" in name]
    for number in NUMBERS:
        tier.put(key_of(number), labelled(number))
    found = tier.get_many([key_of(number) for number in NUMBERS])
    assert all(right(found[key_of(number)], number) for number in NUMBERS)
    assert tier.verify() == (len(NUMBERS), 0)
