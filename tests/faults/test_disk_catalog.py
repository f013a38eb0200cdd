"""Row: the catalog deleted, truncated, overwritten, of another format; a full disk; forks.

Must show: every window still found and right, the limit kept, `invalidate` never misses an entry.
"""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from rag_windows.cache import disk
from tests.rag_windows.cache.disk_cases import (
    STATEMENTS,
    System,
    TellingConnection,
    end_of,
    entry_of,
    entry_path,
    filled,
    folder_bytes,
    held,
    in_child,
    key_of,
    names,
    on,
    tier,
    warned,
)

NUMBERS = range(6)
KEYS = [key_of(number) for number in NUMBERS]


def database(folder: Path) -> Path:
    return folder / "catalog" / "windows.sqlite"


def told(folder: Path, statement: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(database(folder), isolation_level=None)) as connection:
        return connection.execute(statement).fetchall()


def rows(folder: Path) -> set[str]:
    """Files, as the catalog knows them."""
    return {f"{key}.safetensors" for (key,) in told(folder, "SELECT key FROM entries")}


def with_all(folder: Path, change: Callable[[bytes], bytes]) -> None:
    for path in (folder / "catalog").glob("windows.sqlite*"):
        if not path.name.endswith("-shm"):  # SQLite maps it: no other program may shorten it
            path.write_bytes(change(path.read_bytes()))


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "deleted": lambda folder: database(folder).unlink(),
    "all deleted": lambda folder: emptied(folder / "catalog"),
    "empty": lambda folder: with_all(folder, lambda data: b""),
    "cut": lambda folder: with_all(folder, lambda data: data[: len(data) // 2 + 7]),
    "garbage": lambda folder: with_all(folder, lambda data: os.urandom(len(data))),
    "zeros": lambda folder: with_all(folder, lambda data: b"\0" * len(data)),
    "another format": lambda folder: told(folder, "PRAGMA user_version = 7"),
    "no table": lambda folder: told(folder, "DROP TABLE labels"),
    "no numbers": lambda folder: told(folder, "UPDATE entries SET nbytes = 'many'"),
    "foreign keys": lambda folder: told(folder, "UPDATE entries SET key = '../' || key"),
    "a pipe": lambda folder: piped(database(folder)),
}


@pytest.mark.parametrize("opened", ["before", "after"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_whatever_happens_to_the_catalog(
    tmp_path: Path, damage: str, opened: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = filled(tmp_path, NUMBERS)
    limit = folder_bytes(tmp_path)
    if opened == "before":
        first.close()
        DAMAGES[damage](tmp_path)
        user = tier(tmp_path, limit)
    else:
        user = tier(tmp_path, limit)
        DAMAGES[damage](tmp_path)
    assert held(user, NUMBERS) == [*NUMBERS]
    # Every entry is found by its labels, and nothing else goes.
    assert sorted(user.keys_with(["passage-2"])) == [KEYS[2]]
    user.keys_with(["document"])  # a change that failed has made way for the next one
    assert sorted(user.keys_with(["document"])) == sorted(KEYS)
    assert user.remove([KEYS[2]]) == 1
    assert user.put(KEYS[2], entry_of(2)) or user.put(KEYS[2], entry_of(2))
    assert held(user, NUMBERS) == [*NUMBERS]
    for number in range(10, 20):
        user.get_many([key_of(number)] * 3)
        user.put(key_of(number), entry_of(number))
        assert folder_bytes(tmp_path) <= limit
    assert user.prune(0.0) == 0
    user.close()
    user = tier(tmp_path, limit)
    assert rows(tmp_path) == {*names(tmp_path)}
    assert user.verify()[1] == 0
    assert warned(caplog) <= 1


@pytest.mark.parametrize("damage", ["deleted", "garbage", "another format"])
def test_an_entry_whose_labels_are_lost_goes(tmp_path: Path, damage: str) -> None:
    user = filled(tmp_path, NUMBERS)
    before = entry_path(tmp_path, 1).read_bytes()
    user.add_labels(KEYS[1], ["copy", "document"])
    assert entry_path(tmp_path, 1).read_bytes() == before, "no file is rewritten"
    assert user.keys_with(["copy"]) == tier(tmp_path).keys_with(["copy"]) == [KEYS[1]]
    user.close()
    DAMAGES[damage](tmp_path)
    after = tier(tmp_path)
    assert after.keys_with(["copy"]) == []
    assert held(after, NUMBERS) == [0, 2, 3, 4, 5]


def test_an_entry_has_so_many_labels_at_most(tmp_path: Path) -> None:
    user = filled(tmp_path, range(1))
    user.add_labels(KEYS[0], [f"more-{number}" for number in range(30)])
    assert len(user.labels([KEYS[0]])[KEYS[0]]) == disk.MOST_LABELS
    user.add_labels(KEYS[1], ["of what is not there"])
    assert user.keys_with(["of what is not there"]) == []


def test_a_lookup_makes_no_statement_and_uses_are_written_together(tmp_path: Path) -> None:
    filled(tmp_path, NUMBERS)
    with on(System()) as system:
        user = tier(tmp_path)
        system.calls.clear()
        for _ in range(100):
            user.get_many(KEYS)
        assert not STATEMENTS & set(system.calls)
        user.labels([])
        assert system.calls.count("executemany") == 1
        uses = "SELECT DISTINCT uses FROM entries"
        assert told(tmp_path, uses) == [(101,)]
        user.get_many(KEYS)
        del user  # at the end the rest
    assert told(tmp_path, uses) == [(102,)]


def test_a_full_disk(tmp_path: Path) -> None:
    """No file can grow any more, the catalog's neither."""

    def work() -> bool:
        user = filled(tmp_path, NUMBERS)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
        assert not user.put(key_of(10), entry_of(10))
        assert held(user, NUMBERS) == [*NUMBERS]
        assert user.keys_with(["passage-3"]) == [KEYS[3]]
        assert user.remove([KEYS[3]]) == 1
        assert KEYS[3] not in user
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert user.put(key_of(10), entry_of(10))
        assert user.put(KEYS[3], entry_of(3))
        return user.stats().entries == len(NUMBERS) + 1

    assert end_of(in_child(work)) == 0


def test_where_a_write_ahead_log_is_not_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = TellingConnection.execute

    def old(self: TellingConnection, statement: str, *more: object) -> sqlite3.Cursor:
        if "WAL" in statement:
            raise sqlite3.OperationalError("locking protocol")
        return execute(self, statement, *more)

    monkeypatch.setattr(TellingConnection, "execute", old)
    with on(System()):
        filled(tmp_path, NUMBERS)
        assert [path.name for path in (tmp_path / "catalog").iterdir()] == ["windows.sqlite"]
        assert held(tier(tmp_path), NUMBERS) == [*NUMBERS]
        assert tier(tmp_path).keys_with(["passage-1"]) == [KEYS[1]]
