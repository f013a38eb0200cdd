"""Row: 8 processes x 5,000 mixed operations on one directory.

Must show: no torn read, size under the cap + one entry (files found at start count), no lock wait
over 5 s.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from rag_windows.cache import catalog
from tests.rag_windows.cache.disk_cases import (
    FULL,
    System,
    end_of,
    entry_of,
    folder_bytes,
    in_child,
    key_of,
    names,
    on,
    right,
    tier,
)

PROCESSES = 8
OPERATIONS = 5000 if FULL else 100
NUMBERS = 60
LONGEST_WAIT_S = 5.0


def size_of(number: int) -> int:
    """Tokens; entries differ in size."""
    return 3 + number % 5


def mixed_operations(folder: Path, limit: int, seed: int, count: int) -> None:
    draw = random.Random(seed)
    user = tier(folder, limit)
    longest_s = 0.0
    for _ in range(count):
        begun = time.monotonic()
        number = min(int(draw.expovariate(0.05)), NUMBERS - 1)
        chance = draw.random()
        if chance < 0.55:
            asked = [number, *(draw.randrange(NUMBERS) for _ in range(2))]
            found = user.get_many([key_of(n) for n in asked])
            for n in asked:
                if key_of(n) in found and not right(found[key_of(n)], n, size_of(n)):
                    raise AssertionError(f"entry {n} is wrong")
        elif chance < 0.93:
            user.put(key_of(number), entry_of(number, size_of(number)))
        elif chance < 0.97:
            user.remove([key_of(number)])
        elif chance < 0.98:
            user.prune(0.0)
        elif chance < 0.985:
            user.clear()
        else:
            release = user.try_lock(key_of(number))
            if release is not None:
                release()
        longest_s = max(longest_s, time.monotonic() - begun)
    stats = user.stats()
    if stats.quarantined or stats.failed:
        raise AssertionError(f"something went wrong: {stats}")
    if longest_s > LONGEST_WAIT_S:
        raise AssertionError(f"waited {longest_s} s")


@pytest.mark.slow
def test_mixed_operations(tmp_path: Path) -> None:
    first = tier(tmp_path)
    for number in range(NUMBERS):
        assert first.put(key_of(number), entry_of(number, size_of(number)))
    largest = max(path.stat().st_size for path in (tmp_path / "entries").iterdir())
    limit = folder_bytes(tmp_path) // 3  # what is found at the start is too much already
    children = [
        in_child(lambda seed=seed: mixed_operations(tmp_path, limit, seed, OPERATIONS))  # type: ignore[misc] # a default binds the loop's variable
        for seed in range(PROCESSES)
    ]
    most = 0
    started = False
    running = set(children)
    while running:
        for child in list(running):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                assert os.waitstatus_to_exitcode(status) == 0
                running.discard(child)
        taken = folder_bytes(tmp_path)
        started = started or taken <= limit  # the first to open has made room
        if started:
            most = max(most, taken)
        time.sleep(0.005)
    assert 0 < most <= limit + largest
    last = tier(tmp_path, limit)
    assert last.verify()[1] == 0
    assert not [name for name in names(tmp_path) if name.endswith(".tmp")]
    assert not list((tmp_path / "locks").iterdir())


@pytest.mark.slow
def test_a_stopped_holder_of_the_lock_delays_nobody_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, told = os.pipe()

    def on_call(number: int, name: str) -> None:
        if name == "rename":
            os.write(told, b"x")
            os.kill(os.getpid(), signal.SIGSTOP)

    def stop() -> bool:
        with on(System(on_call)):
            return tier(tmp_path).put(key_of(2), entry_of(2))

    assert tier(tmp_path).put(key_of(1), entry_of(1))
    child = in_child(stop)
    os.read(ready, 1)
    os.close(ready)
    os.close(told)
    assert catalog.WAIT_S < LONGEST_WAIT_S, "what it is unless told otherwise"
    monkeypatch.setattr(catalog, "WAIT_S", 0.3)
    user = tier(tmp_path)
    assert user.keys_with(["passage-1"]) == [key_of(1)], "as the files say"
    start = time.monotonic()
    assert right(user.get_many([key_of(1)])[key_of(1)], 1)
    assert not user.put(key_of(3), entry_of(3))
    assert 0.3 <= time.monotonic() - start < LONGEST_WAIT_S
    assert user.remove([key_of(1)]) == 1, "what shall go goes without the lock"
    os.kill(child, signal.SIGCONT)
    assert end_of(child) == 0
    assert user.put(key_of(3), entry_of(3))
    assert sorted(user.get_many([key_of(n) for n in (1, 2, 3)])) == sorted((key_of(2), key_of(3)))


def test_one_of_many_gets_a_keys_lock_and_a_dead_owners_is_free(tmp_path: Path) -> None:
    ready, told = os.pipe()

    def hold() -> None:
        kept = tier(tmp_path).try_lock(key_of(1))
        os.write(told, b"x" if kept is not None else b"-")
        signal.pause()

    child = in_child(hold)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    os.close(told)
    user = tier(tmp_path)
    assert user.try_lock(key_of(1)) is None
    os.kill(child, signal.SIGKILL)
    end_of(child)
    release = user.try_lock(key_of(1))
    assert release is not None
    assert user.try_lock(key_of(1)) is None, "threads of one process exclude each other, too"
    release()
    release()
    assert not list((tmp_path / "locks").iterdir())

    def work() -> None:
        own = tier(tmp_path)
        for _ in range(200 if FULL else 40):
            let_go = own.try_lock(key_of(1))
            if let_go is None:
                continue
            inside = tmp_path / "inside"
            inside.touch(exist_ok=False)  # raises if two are here at once
            inside.unlink()
            let_go()

    children = [in_child(work) for _ in range(4)]
    assert [end_of(child) for child in children] == [0] * 4
