"""Sizes, the default folder, and counters as Prometheus scrapes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rag_windows import InputError, PassageCache, folders
from rag_windows.cache import passage_cache as sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (7, 7),
        ("7", 7),
        ("4GiB", 4 << 30),
        ("500MB", 500 * 10**6),
        (" 1.5 kib ", 1536),
    ],
)
def test_sizes(text: Any, size: int) -> None:
    assert sizes.parse_size(text, "memory") == size
    assert sizes.parse_size("25%", "memory", 1000) == 250


@pytest.mark.parametrize("text", [0, -1, "", "x", "4 XB", "-3GB", True, 1.5, "101%", "1e3"])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(InputError, match="memory="):
        PassageCache(text)
    with pytest.raises(InputError, match="device_bytes="):
        PassageCache(device_bytes="25%")


def test_what_is_free(tmp_path: Path) -> None:
    assert 1 << 20 < sizes.free_memory() < 1 << 50
    assert sizes.free_disk(tmp_path / "not" / "yet" / "there") > 0


@pytest.mark.parametrize(
    ("most", "stat", "free"),
    [("5000", "active_file 9\ninactive_file 700\n", 1700), ("4100", "", 100), ("max", "", None)],
)
def test_a_container_s_limit_counts_but_not_files_that_nobody_uses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, most: str, stat: str, free: int | None
) -> None:
    (tmp_path / "memory.max").write_text(f"{most}\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text(stat)
    monkeypatch.setattr(sizes, "_GROUP", tmp_path)
    found = sizes.free_memory()
    assert found == free if free is not None else found > 1 << 20


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAG_WINDOWS_CACHE_DIR", str(tmp_path))
    assert folders.default_folder() == tmp_path
    monkeypatch.delenv("RAG_WINDOWS_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    for platform, xdg, base in (
        ("linux", str(tmp_path / "xdg"), "xdg"),
        ("linux", "relative", ".cache"),
        ("darwin", "", "Library/Caches"),
    ):
        monkeypatch.setattr("sys.platform", platform)
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
        assert folders.default_folder() == tmp_path / base / "rag-windows" / "windows"


def test_every_number_is_a_sample_of_its_own_and_a_label_holds_any_text(tmp_path: Path) -> None:
    with PassageCache("1MB", path=tmp_path / "w") as cache:
        lines = cache.metrics({"model": 'a "b"\\c\nd'}).splitlines()
        plain = cache.metrics()
        for name in ("tier", "__name__", "a-b", "", "1a", "ä"):
            with pytest.raises(InputError, match="label"):
                cache.metrics({name: "x"})
    kinds = dict(line.split()[2:] for line in lines if line.startswith("# TYPE "))
    samples = [line for line in lines if not line.startswith("#")]
    assert len(set(samples)) == len(samples) == 6 + 2 * 13
    own = r'\{model="a \\"b\\"\\\\c\\nd"(,tier="(?:memory|disk)")?\}'
    for line in samples:
        found = re.fullmatch(rf"(\w+){own} \d+", line)
        assert found is not None, line
        assert (kinds[found[1]] == "counter") == found[1].endswith("_total")
    assert "rag_windows_cache_saved_seconds_total 0\n" in plain
    assert 'rag_windows_cache_tier_limit_bytes{tier="memory"} 1000000\n' in plain
