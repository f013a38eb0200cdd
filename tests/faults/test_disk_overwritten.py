"""Row: file truncated or overwritten while loaded.

Must show: no SIGBUS, tensors unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rag_windows.cache.disk_cases import (
    System,
    end_of,
    entry_of,
    entry_path,
    in_child,
    key_of,
    on,
    same_window,
    tier,
)

TOKENS = 60_000
"""Enough for many pages and several reads."""

ENTRY = entry_of(1, TOKENS)


def truncate(path: Path) -> None:
    os.truncate(path, 0)


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"\xff" * size)


def remove(path: Path) -> None:
    path.unlink()


DAMAGES = [truncate, shorten, overwrite, remove]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert tier(tmp_path, 1 << 30).put(key_of(1), ENTRY)
    return tmp_path


@pytest.mark.parametrize("damage", DAMAGES)
def test_after_it_was_loaded(folder: Path, damage: Callable[[Path], None]) -> None:
    def work() -> None:
        found = tier(folder, 1 << 30).get_many([key_of(1)])[key_of(1)]
        damage(entry_path(folder, 1))
        assert same_window(found.window, ENTRY.window)

    assert end_of(in_child(work)) == 0


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("at_read", [2, 3, 5])
def test_while_it_is_read(folder: Path, damage: Callable[[Path], None], at_read: int) -> None:
    with on(System()) as system:
        reader = tier(folder, 1 << 30)
        opening = len(system.calls)

        def on_call(number: int, name: str) -> None:
            if name == "preadv" and system.calls[opening:].count("preadv") == at_read:
                damage(entry_path(folder, 1))

        system.on_call = on_call
        found = reader.get_many([key_of(1)])
    if damage is remove:  # the file lives on until it is closed
        assert same_window(found[key_of(1)].window, ENTRY.window)
    else:
        assert found == {}
        assert reader.stats().quarantined == 1
