from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rag_windows.errors import InputError, RetrievalError
from rag_windows_retrievers import store


def save(folder: Path, text: str, kind: str = "words") -> None:
    def fill(generation: Path) -> None:
        (generation / "a.txt").write_text(text)
        (generation / "b.txt").write_text(text)

    store.write(folder, kind, {"length": len(text)}, fill)


def load(generation: Path, settings: Mapping[str, Any]) -> str:
    a, b = ((generation / name).read_text() for name in ("a.txt", "b.txt"))
    if a != b or len(a) != settings["length"]:
        raise ValueError("torn")
    return a


def generations(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "index"
    assert not store.holds_index(folder)
    save(folder, "one")
    assert store.holds_index(folder)
    assert store.read(folder, "words", load) == "one"


def test_a_later_index_takes_the_place_and_the_room_of_an_earlier(tmp_path: Path) -> None:
    for text in ("one", "two", "three"):
        save(tmp_path, text)
    assert store.read(tmp_path, "words", load) == "three"
    assert len(generations(tmp_path)) == 1


def test_a_failing_write_leaves_the_old_index(tmp_path: Path) -> None:
    save(tmp_path, "one")

    def fail(generation: Path) -> None:
        (generation / "a.txt").write_text("half")
        raise InputError("no")

    with pytest.raises(InputError, match="no"):
        store.write(tmp_path, "words", {}, fail)
    assert store.read(tmp_path, "words", load) == "one"
    assert len(generations(tmp_path)) == 1


def test_a_failing_rename_leaves_the_old_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "one")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(RetrievalError, match="can't be written: no space left"):
            save(tmp_path, "two")
    assert store.read(tmp_path, "words", load) == "one"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["manifest.json"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda file, manifest: file.write_text("twx"),
        lambda file, manifest: file.write_text("tw"),
        lambda file, manifest: file.unlink(),
        lambda file, manifest: manifest.write_text("{"),
        lambda file, manifest: manifest.write_text("[]"),
        lambda file, manifest: manifest.write_text('{"format": 1, "kind": "words"}'),
    ],
)
def test_damage_is_told_and_can_be_written_over(tmp_path: Path, damage: Any) -> None:
    save(tmp_path, "two")
    damage(generations(tmp_path)[0] / "b.txt", tmp_path / "manifest.json")
    with pytest.raises(RetrievalError, match=r"damaged .*; delete it and build it anew"):
        store.read(tmp_path, "words", load)
    save(tmp_path, "new")
    assert store.read(tmp_path, "words", load) == "new"


def test_damage_that_looks_right_is_told(tmp_path: Path) -> None:
    save(tmp_path, "two")
    for file in generations(tmp_path)[0].iterdir():
        file.write_text("twx")
    with pytest.raises(RetrievalError, match=r"a\.txt is not what was written"):
        store.read(tmp_path, "words", load)


def test_no_index_and_other_indexes_are_told(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match="no index in"):
        store.read(tmp_path / "nothing", "words", load)
    save(tmp_path, "one", "vectors")
    with pytest.raises(RetrievalError, match="kind 'vectors', not 'words'"):
        store.read(tmp_path, "words", load)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    with pytest.raises(RetrievalError, match="format 99"):
        store.read(tmp_path, "vectors", load)


@pytest.mark.parametrize(
    ("key", "value"),
    [("generation", "../elsewhere"), ("files", {"../secret": {}}), ("files", {"/etc/passwd": {}})],
)
def test_a_manifest_leads_nowhere_else(tmp_path: Path, key: str, value: object) -> None:
    folder = tmp_path / "index"
    save(folder, "one")
    (tmp_path / "secret").write_text("secret")
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), key: value}))
    with pytest.raises(RetrievalError, match="names files elsewhere"):
        store.read(folder, "words", load)


def test_remains_of_a_crash_are_removed_when_they_are_old(tmp_path: Path) -> None:
    fresh, old = (tmp_path / f"generation-{letter * 16}" for letter in "ab")
    for path in (fresh, old, tmp_path / "mine"):
        path.mkdir()
    os.utime(old, (0, 0))
    save(tmp_path, "one")
    assert fresh.exists()
    assert not old.exists()
    assert (tmp_path / "mine").exists()


def test_readers_and_writers_do_not_disturb_each_other(tmp_path: Path) -> None:
    texts = {letter * 2000 for letter in "abcdefgh"}
    save(tmp_path, "a" * 2000)
    read: set[str] = set()
    failures: list[RetrievalError] = []
    done = threading.Event()

    def reader() -> None:
        while not done.is_set():
            try:
                read.add(store.read(tmp_path, "words", load))
            except RetrievalError as error:
                failures.append(error)

    readers = [threading.Thread(target=reader) for _ in range(3)]
    writers = [threading.Thread(target=save, args=(tmp_path, text)) for text in texts]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert failures == []
    assert read <= texts
    assert store.read(tmp_path, "words", load) in texts
