"""The passage cache from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.blackbox.conftest import Run

QUESTION = "Who built the bridge at Halden?"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "windows"


def ask(run: Run, model: str, *args: str | Path) -> dict[str, Any]:
    result = run(
        "ask",
        QUESTION,
        "--docs",
        "docs",
        "--model",
        model,
        "--max-new-tokens",
        "2",
        "--json",
        *args,
    )
    assert result.exit_code == 0, result.stderr
    usage: dict[str, Any] = json.loads(result.stdout)["usage"]
    return usage


def told(run: Run, *args: str | Path) -> dict[str, Any]:
    result = run("cache", *args, "--json")
    assert result.exit_code == 0, result.stderr
    said: dict[str, Any] = json.loads(result.stdout)
    return said


def test_a_second_question_finds_the_first_ones_windows(
    run: Run, model: str, docs: Path, folder: Path
) -> None:
    assert ask(run, model, "--cache-dir", folder)["cached_tokens"] == 0
    second = ask(run, model, "--cache-dir", folder)
    assert second["cached_tokens"] > 50
    assert ask(run, model, "--no-cache", "--cache-dir", folder)["cached_tokens"] == 0


def test_the_cache_is_on_by_default(
    run: Run, model: str, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAG_WINDOWS_CACHE_DIR", str(tmp_path / "default"))
    ask(run, model)
    assert ask(run, model)["cached_tokens"] > 50
    assert (tmp_path / "default").is_dir()


def test_no_cache_writes_nothing(
    run: Run, model: str, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAG_WINDOWS_CACHE_DIR", str(tmp_path / "default"))
    ask(run, model, "--no-cache")
    assert not (tmp_path / "default").exists()


def test_warm_stats_verify_prune_clear(run: Run, model: str, docs: Path, folder: Path) -> None:
    place = ("--cache-dir", folder)
    warmed = told(run, "warm", "--docs", "docs", "--model", model, *place)
    assert warmed["encoded"] == warmed["passages"] > 3
    again = told(run, "warm", "--docs", "docs", "--model", model, *place)
    assert (again["encoded"], again["present"]) == (0, warmed["encoded"])
    assert ask(run, model, *place)["cached_tokens"] > 50
    held = told(run, "stats", *place)
    assert held["entries"] == warmed["encoded"] + 1
    assert held["folder"] == str(folder)
    assert 0 < held["bytes"] < held["limit_bytes"]
    assert told(run, "verify", *place) == {"checked": held["entries"], "quarantined": 0}
    assert told(run, "prune", *place)["removed"] == 0
    pruned = told(run, "prune", "--disk", str(held["bytes"] // 2), *place)
    assert 0 < pruned["entries"] < held["entries"]
    assert told(run, "clear", *place) == {"removed": pruned["entries"]}
    assert told(run, "stats", *place)["entries"] == 0


def test_in_words(run: Run, model: str, docs: Path, folder: Path) -> None:
    place = ("--cache-dir", folder)
    said = [
        run("cache", *args, *place).stdout
        for args in (
            ("warm", "--docs", "docs", "--model", model),
            ("stats",),
            ("verify",),
            ("prune",),
            ("clear",),
        )
    ]
    for line, words in zip(
        said, ("windows encoded", "windows, ", "windows read", "dropped", "forgotten"), strict=True
    ):
        assert words in line
        assert len(line.strip().splitlines()) == 1


def test_a_damaged_window_is_put_aside(run: Run, model: str, docs: Path, folder: Path) -> None:
    told(run, "warm", "--docs", "docs", "--model", model, "--cache-dir", folder)
    damaged = max(folder.rglob("*.safetensors"))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert told(run, "verify", "--cache-dir", folder)["quarantined"] == 1


def test_folders_that_can_not_be_used(
    run: Run, model: str, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = tmp_path / "file"
    taken.write_text("no folder")
    for args in (("cache", "stats"), ("ask", QUESTION, "--docs", "docs", "--model", model)):
        result = run(*args, "--cache-dir", taken)
        assert result.exit_code == 2
        assert result.stderr.startswith("Error: ")
        assert len(result.stderr.splitlines()) == 1
    monkeypatch.setenv("RAG_WINDOWS_CACHE_DIR", str(taken))
    result = run("ask", QUESTION, "--docs", "docs", "--model", model, "--max-new-tokens", "1")
    assert result.exit_code == 0
    assert "not cached" in result.stderr


@pytest.mark.parametrize("size", ["much", "-1GiB", "0"])
def test_sizes_that_are_none(run: Run, folder: Path, size: str) -> None:
    result = run("cache", "prune", "--disk", size, "--cache-dir", folder)
    assert result.exit_code == 2
    assert "disk=" in result.stderr
