"""Row: names with ``../``, absolute paths, NUL, symlinked entries.

Must show: nothing touched outside the root; the folder is 0700.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rag_windows import CacheError
from tests.rag_windows.cache.disk_cases import (
    entry_of,
    entry_path,
    filled,
    held,
    key_of,
    tier,
)

HOSTILE = [
    *("", ".", "..", "../secret", "../../etc/passwd", "/etc/passwd", "a/b"),
    *("a" * 63, "a" * 65, "A" * 64, "g" * 64, "\0" * 64, "０" * 64, "x" * 100_000),
    *(key_of(1) + "\0", key_of(1) + "\n", key_of(1)[:-3] + "/..", "../" + key_of(1)[3:]),
    *(None, 5, b"a" * 64, ("a",)),
]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Files beside the cache that nobody may touch."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_text("secret")
    (tmp_path / "secret").write_text("secret")
    return folder


def snapshot(root: Path, without: Path) -> dict[str, tuple[int, int, bytes]]:
    found = {}
    for path in sorted(root.rglob("*")):
        if path == without or path.is_relative_to(without):
            continue
        state = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path)] = (state.st_mode, state.st_mtime_ns, content)
    return found


@pytest.mark.parametrize("key", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_keys(tmp_path: Path, outside: Path, key: str) -> None:
    cache = tmp_path / "cache"
    user = tier(cache)
    before = snapshot(tmp_path, cache), sorted(os.walk(cache))
    for call in (
        lambda: user.get_many([key_of(1), key]),
        lambda: user.put(key, entry_of(1)),
        lambda: user.remove([key]),
        lambda: key in user,
        lambda: user.try_lock(key),
    ):
        with pytest.raises(CacheError, match="64 lowercase"):
            call()
    assert (snapshot(tmp_path, cache), sorted(os.walk(cache))) == before


@pytest.mark.parametrize("kind", ["file", "entry", "nowhere", "folder"])
def test_symlinked_entries(tmp_path: Path, outside: Path, kind: str) -> None:
    cache = tmp_path / "cache"
    user = filled(cache, range(1, 3))
    whole = outside / "whole"
    entry_path(cache, 1).rename(whole)
    target = {
        "file": outside / "secret",
        "entry": whole,
        "nowhere": outside / "new",
        "folder": outside,
    }[kind]
    entry_path(cache, 1).symlink_to(target)
    before = snapshot(tmp_path, cache)
    for reader in (user, tier(cache)):
        assert held(reader, range(1, 3)) == [2]
        reader.verify()
        reader.prune(0.0)
        assert snapshot(tmp_path, cache) == before
    assert user.stats().quarantined == 1
    # A link that is there when the entry is written is replaced, not followed.
    entry_path(cache, 1).symlink_to(target)
    assert user.put(key_of(1), entry_of(1))
    assert not entry_path(cache, 1).is_symlink()
    assert held(user, range(1, 3)) == [1, 2]
    entry_path(cache, 3).symlink_to(target)
    user.remove([key_of(3)])
    user.clear()
    assert snapshot(tmp_path, cache) == before


@pytest.mark.parametrize("name", ["entries", "locks", "catalog"])
def test_symlinked_folders_are_refused(
    tmp_path: Path, outside: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / name).symlink_to(outside)
    before = snapshot(tmp_path, cache)
    user = tier(cache)
    assert not user.put(key_of(1), entry_of(1))
    assert held(user, range(2)) == []
    user.clear()
    assert snapshot(tmp_path, cache) == before
    assert len(caplog.records) >= 1


@pytest.mark.parametrize("name", ["catalog/windows.sqlite", f"locks/{key_of(1)}"])
@pytest.mark.parametrize("target", ["made", "secret"])
def test_symlinked_locks_and_catalogs_are_not_followed(
    tmp_path: Path, outside: Path, name: str, target: str
) -> None:
    cache = tmp_path / "cache"
    tier(cache).close()
    (cache / name).unlink(missing_ok=True)
    (cache / name).symlink_to(outside / target)
    before = snapshot(tmp_path, cache)
    user = tier(cache)
    release = user.try_lock(key_of(1))
    assert release is not None
    release()
    user.put(key_of(1), entry_of(1))
    user.prune(0.0)
    assert snapshot(tmp_path, cache) == before


def test_pipes_and_folders_of_an_entrys_name(tmp_path: Path) -> None:
    user = filled(tmp_path, range(3, 4))
    os.mkfifo(entry_path(tmp_path, 1))
    entry_path(tmp_path, 2).mkdir()
    assert held(user, range(4)) == [3]
    assert user.stats().quarantined == 1
    assert user.put(key_of(1), entry_of(1))
    assert not user.put(key_of(2), entry_of(2))
    assert held(user, range(4)) == [1, 3]
    user.clear()
    assert entry_path(tmp_path, 2).is_dir(), "nobody's to remove"


@pytest.mark.parametrize("there", [False, True])
def test_only_its_owner_gets_in(tmp_path: Path, there: bool) -> None:
    cache = tmp_path / "cache"
    old = os.umask(0)
    try:
        if there:
            cache.mkdir(mode=0o777)
        filled(cache, range(2))
    finally:
        os.umask(old)
    for path in [cache, *cache.rglob("*")]:
        if path.parent.name != "catalog":  # a folder that nobody else can open
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_other_things_are_left_as_they_are(tmp_path: Path, outside: Path) -> None:
    outside.chmod(0o755)
    before = (outside / "secret").stat()
    user = filled(outside, range(2))
    for name in ("notes.txt", "model.safetensors", key_of(1), key_of(1) + ".safetensors.bak"):
        (outside / "entries" / name).write_text("mine")
    user.verify()
    user.clear()
    user.prune(0.0)
    tier(outside, 10)
    assert len(list((outside / "entries").iterdir())) == 4
    assert (outside / "secret").stat().st_mtime_ns == before.st_mtime_ns
    assert stat.S_IMODE(outside.stat().st_mode) == 0o755
    assert stat.S_IMODE((outside / "entries").stat().st_mode) == 0o700


def test_a_path_that_is_a_file_or_open_to_others(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(CacheError, match="not a folder"):
        tier(tmp_path / "file")
    tier(tmp_path / "open").close()
    (tmp_path / "open" / "entries").chmod(0o777)
    with pytest.raises(CacheError, match="Other users can write"):
        tier(tmp_path / "open")
