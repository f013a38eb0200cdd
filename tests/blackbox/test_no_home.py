"""Where the default folder of the cache can't be had, a model answers all the same."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rag_windows import CacheError, DocumentError, InputError, PassageCache, WindowedLM
from rag_windows.cache import passage_cache
from rag_windows_retrievers import load_documents
from tests.blackbox.conftest import Run

Patch = pytest.MonkeyPatch


def no_home(monkeypatch: Patch, _: Path) -> None:
    def unknown(*_: object) -> None:
        raise KeyError("no such user")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("pwd.getpwnam", unknown)


def home_is_a_device(monkeypatch: Patch, _: Path) -> None:
    monkeypatch.setenv("HOME", "/dev/null")


def others_can_write(monkeypatch: Patch, tmp_path: Path) -> None:
    entries = tmp_path / "xdg" / "rag-windows" / "windows" / "entries"
    entries.mkdir(parents=True)
    entries.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture(params=[no_home, home_is_a_device, others_can_write], ids=lambda one: one.__name__)
def without(request: pytest.FixtureRequest, monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAG_WINDOWS_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    passage_cache._warn_once.cache_clear()
    request.param(monkeypatch, tmp_path)


@pytest.mark.usefixtures("without")
def test_cache_true_is_memory_only_and_says_so_once(
    caplog: pytest.LogCaptureFixture, small_folder: Path
) -> None:
    with caplog.at_level(logging.WARNING, "rag_windows"):
        for _ in range(2):
            lm = WindowedLM.from_pretrained(small_folder, cache=True)
            assert lm.cache is not None
            assert [*lm.cache.stats().tiers] == ["memory"]
            assert [*PassageCache.default(disk="1MB").stats().tiers] == ["memory"]
    (line,) = caplog.messages
    assert "cached in memory only (" in line
    assert line.endswith("). Name another one in RAG_WINDOWS_CACHE_DIR.")
    assert not Path("~").exists()


@pytest.mark.usefixtures("without")
def test_what_acts_on_the_folder_names_it(run: Run) -> None:
    result = run("cache", "stats")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.usefixtures("without")
def test_a_question_is_answered(run: Run, tmp_path: Path, small_folder: Path) -> None:
    (tmp_path / "notes.md").write_text("The bridge was built in 1931.")
    options = "--max-new-tokens", "2", "--model", small_folder, "--docs", tmp_path / "notes.md"
    result = run("ask", "When was the bridge built?", *options, "--json")
    assert result.exit_code == 0, result.stderr
    assert '"answer"' in result.stdout


NAMED: list[Callable[[], object]] = [
    lambda: PassageCache(path="~/windows"),
    lambda: PassageCache.default("~/windows"),
    lambda: PassageCache(path="~nobody-here/windows"),
    lambda: PassageCache(disk="1MB"),
]


@pytest.mark.parametrize("make", NAMED)
def test_a_named_folder_stays_an_error(make: Callable[[], object], monkeypatch: Patch) -> None:
    monkeypatch.delenv("RAG_WINDOWS_CACHE_DIR", raising=False)
    no_home(monkeypatch, Path())
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(CacheError, match=r"no such home folder\. Set HOME to one, or name a whole"):
        make()


def test_a_folder_in_the_environment_is_named(monkeypatch: Patch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAG_WINDOWS_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(CacheError, match="is not a folder"):
        PassageCache.default()
    no_home(monkeypatch, tmp_path)
    monkeypatch.setenv("RAG_WINDOWS_CACHE_DIR", "~/windows")
    with pytest.raises(CacheError, match="Set HOME"):
        PassageCache.default()


def test_paths_of_an_unknown_home_are_files_that_are_missing(
    monkeypatch: Patch, run: Run, small_folder: Path
) -> None:
    no_home(monkeypatch, Path())
    for name in ("~/notes", "~nobody-here/notes"):
        with pytest.raises(DocumentError, match="no such file or folder"):
            load_documents([name])
    lm = WindowedLM.from_pretrained(small_folder)
    with pytest.raises(CacheError, match="no such home folder"):
        lm.codebook(path="~/book")


def test_a_working_default_is_a_folder(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAG_WINDOWS_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    with PassageCache.default() as cache:
        assert [*cache.stats().tiers] == ["memory", "disk"]
        assert cache.path is not None
        assert os.path.commonpath([cache.path, tmp_path]) == str(tmp_path)
    with pytest.raises(InputError, match="not a size"):
        PassageCache.default(disk="much")
