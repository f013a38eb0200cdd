"""How far work is, while a command does it."""

from __future__ import annotations

import time

import pytest

from rag_windows.cli import progress


@pytest.mark.parametrize("counts", [[(4, 4)], [(1, 4), (4, 4)]])
def test_what_is_encoded_is_no_longer_called_so(
    counts: list[tuple[int, int]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A method may read the question over each passage for seconds before it answers."""
    monkeypatch.setenv("RAG_WINDOWS_PROGRESS_S", "0.01")
    with progress("Encoding the passages", "Reading the question") as counted:
        for done, whole in counts:
            counted(done, whole)
            time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("Reading the question: ")
    assert not any("4 of 4" in line for line in lines)
    began = any(line.startswith("Encoding the passages: 1 of 4, ") for line in lines)
    assert began == (len(counts) > 1)
