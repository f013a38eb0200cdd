"""Sizes and the default folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rag_windows import InputError
from rag_windows.cache.sizes import (
    default_folder,
    free_disk,
    free_memory,
    parse_size,
    show_size,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [(7, 7), ("7", 7), ("4GiB", 4 << 30), ("500MB", 500 * 10**6), (" 1.5 kib ", 1536), ("2b", 2)],
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_size(text, "memory") == size


def test_shares_of_what_is_free() -> None:
    assert parse_size("25%", "memory", 1000) == 250
    with pytest.raises(InputError, match="25%"):
        parse_size("25%", "memory")


@pytest.mark.parametrize("text", [0, -1, "", "x", "4 XB", "-3GB", True, 1.5, None, "101%", "1e3"])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(InputError, match="memory="):
        parse_size(text, "memory", 1000)


def test_sizes_for_people() -> None:
    assert [show_size(n) for n in (3, 2048, 5 << 20)] == ["3 B", "2.0 KiB", "5.0 MiB"]


def test_something_is_free(tmp_path: Path) -> None:
    assert 1 << 20 < free_memory() < 1 << 50
    assert free_disk(tmp_path / "not" / "yet" / "there") > 0


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAG_WINDOWS_CACHE_DIR", str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.delenv("RAG_WINDOWS_CACHE_DIR")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "rag-windows" / "windows"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "rag-windows" / "windows"
    monkeypatch.setattr("sys.platform", "darwin")
    assert default_folder() == tmp_path / "Library" / "Caches" / "rag-windows" / "windows"
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert default_folder() == tmp_path / "local" / "rag-windows" / "windows"
