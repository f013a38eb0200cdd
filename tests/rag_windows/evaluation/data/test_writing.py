from __future__ import annotations

import os
from pathlib import Path

import pytest

from rag_windows import DataError
from rag_windows.evaluation.files import safe_name, write_whole


def test_writes_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    write_whole(path, "one")
    write_whole(path, "two é \ud83d")
    assert path.read_text(encoding="utf-8") == "two é �"
    assert os.listdir(path.parent) == ["a.json"]


def test_the_old_file_stays_if_the_new_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"a\.json: it can't be written \(No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_folder_in_the_way_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it can't be written"):
        write_whole(tmp_path, "x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="it can't be written"):
        write_whole(tmp_path / "file" / "a.json", "x")


@pytest.mark.parametrize("name", ["ape@20", "deep-thinking+ape", "T=0.9_S"])
def test_plain_names_stay(name: str) -> None:
    assert safe_name(name) == name


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "..", ".hidden", "", "a/b", "a\\b", "x" * 300, "a\0\x1b", "é"]
)
def test_odd_names_lead_nowhere(name: str, tmp_path: Path) -> None:
    made = safe_name(name)
    assert made == Path(made).name
    assert not made.startswith(".")
    assert len(made) <= 120
    assert made.isascii()
    write_whole(tmp_path / made, "x")
    assert os.listdir(tmp_path) == [made]


def test_different_names_stay_different() -> None:
    names = ["a/b", "a\\b", "a_b", "a b", "é", "è", "x" * 200, "x" * 201]
    assert len({safe_name(name) for name in names}) == len(names)
