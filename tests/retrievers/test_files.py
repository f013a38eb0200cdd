from __future__ import annotations

import os
from pathlib import Path

import pytest

from rag_windows.errors import DocumentError
from rag_windows_retrievers.files import Skipped, find_files


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def labels(*paths: str | Path, root: Path | None = None) -> list[str]:
    return [one.label for one in find_files(paths, root=root)[0]]


def test_folders_are_read_whole_and_in_order(here: Path) -> None:
    for name in ("docs/b.md", "docs/a.txt", "docs/deep/er/c.jsonl", "docs/Z.MD"):
        write(here / name)
    found, skipped = find_files(["docs"])
    assert [one.label for one in found] == [
        "docs/Z.MD",
        "docs/a.txt",
        "docs/b.md",
        "docs/deep/er/c.jsonl",
    ]
    assert [one.kind for one in found] == ["markdown", "text", "markdown", "jsonl"]
    assert skipped == []


def test_each_file_comes_once_and_in_the_order_given(here: Path) -> None:
    write(here / "docs/a.txt")
    write(here / "docs/b.txt")
    (here / "docs/same.txt").symlink_to("a.txt")
    assert labels("docs/b.txt", "docs", "docs/a.txt") == ["docs/b.txt", "docs/a.txt"]


def test_what_a_folder_leaves_out_is_told(here: Path) -> None:
    write(here / "docs/a.md")
    write(here / "docs/.hidden.md")
    write(here / "docs/.git/config.md")
    write(here / "docs/logo.png")
    write(here / "docs/empty.md", "")
    (here / "docs/binary.txt").write_bytes(b"a\x00b")
    write(here / "docs/huge.txt", "x" * 2000)
    (here / "docs/gone.md").symlink_to("nowhere")
    os.mkfifo(here / "docs/pipe.txt")
    found, skipped = find_files([Path("docs")], max_bytes=1000)
    assert [one.label for one in found] == ["docs/a.md"]
    assert {one.label: one.reason for one in skipped} == {
        "docs/.hidden.md": "hidden",
        "docs/.git": "hidden",
        "docs/logo.png": "not .txt, .md, .jsonl or .pdf",
        "docs/empty.md": "empty",
        "docs/binary.txt": "binary, not text",
        "docs/huge.txt": "0.002 MB, more than the 0.001 MB that are read",
        "docs/gone.md": "a broken link",
        "docs/pipe.txt": "not a regular file",
    }


def test_links_to_folders_are_followed_but_never_round(here: Path) -> None:
    write(here / "docs/a.md")
    write(here / "elsewhere/b.md")
    (here / "docs/linked").symlink_to(here / "elsewhere")
    (here / "docs/loop").symlink_to(".")
    (here / "elsewhere/up").symlink_to(here / "docs")
    found, skipped = find_files(["docs"])
    assert [one.label for one in found] == ["docs/a.md", "docs/linked/b.md"]
    assert {one.label for one in skipped} == {"docs/loop", "docs/linked/up"}


def test_patterns(here: Path) -> None:
    for name in ("docs/a.md", "docs/deep/b.md", "docs/deep/c.txt", "docs/.x/d.md"):
        write(here / name)
    # Following such links would take 2**40 steps.
    (here / "docs/one").symlink_to(".")
    (here / "docs/two").symlink_to(".")
    assert labels("docs/*.md") == ["docs/a.md"]
    assert labels("docs/**/*.md") == ["docs/a.md", "docs/deep/b.md"]
    assert labels("docs/d*") == ["docs/deep/b.md", "docs/deep/c.txt"]
    assert labels("docs/.x/*.md") == ["docs/.x/d.md"]
    assert labels(str(here / "docs/deep/*.txt")) == ["docs/deep/c.txt"]


def test_a_name_that_looks_like_a_pattern_but_exists(here: Path) -> None:
    write(here / "notes[1].txt")
    assert labels("notes[1].txt") == ["notes[1].txt"]


def test_labels_outside_the_working_folder_do_not_show_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    write(tmp_path / "corpus/deep/a.md")
    write(tmp_path / "other/b.md")
    assert labels(tmp_path / "corpus", tmp_path / "other/b.md") == ["corpus/deep/a.md", "b.md"]


def test_labels_may_have_another_root(here: Path) -> None:
    write(here / "docs/deep/a.md")
    assert labels("docs", root=Path("docs")) == ["deep/a.md"]
    assert labels("docs", root=here / "docs/deep") == ["a.md"]


def test_labels_are_unique(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    first, second = write(tmp_path / "x/docs/a.md"), write(tmp_path / "y/docs/a.md")
    assert labels(first.parent, second.parent) == ["docs/a.md", second.as_posix()]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.txt", "nothing.txt: no such file or folder; name files"),
        ("nothing/*.txt", "matches nothing"),
        ("a**b/*.txt", "a\\*\\*b"),
        ("logo.png", "logo.png: binary, not text; name .txt"),
        ("data.json", r"data.json: JSON in one piece is not read .*\.jsonl"),
        ("pipe", "pipe: not a regular file"),
        ("nul\x00", "null byte"),
        ("loop", "too many levels of symbolic links"),
        ("Why? " * 2000, "matches nothing|file name too long"),
    ],
)
def test_what_is_named_must_be_readable(here: Path, name: str, message: str) -> None:
    (here / "logo.png").write_bytes(b"\x89PNG\x00")
    write(here / "data.json", "[]")
    os.mkfifo(here / "pipe")
    (here / "loop").symlink_to("loop")
    with pytest.raises(DocumentError, match=message):
        find_files([name])


def test_a_named_file_of_any_suffix_is_text(here: Path) -> None:
    write(here / "README")
    write(here / ".notes.rst")
    assert [one.kind for one in find_files(["README", ".notes.rst"])[0]] == ["text", "text"]


def test_undecodable_names_become_printable(here: Path) -> None:
    (Path(os.fsencode(here).decode()) / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    assert labels(".") == ["caf\ufffd.txt"]


def test_skipped_is_a_value() -> None:
    assert Skipped("a", "b") == Skipped("a", "b")
