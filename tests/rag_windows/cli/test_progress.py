"""How far work is, while a command does it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rag_windows import WindowedLM
from rag_windows.cli import progress
from rag_windows.cli.model_loading import reported_instead_of_bars
from tests.rag_windows import small


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


def test_weights_and_downloads_are_counted_and_no_bar_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small.model().save_pretrained(tmp_path)
    small.tokenizer().save_pretrained(tmp_path)
    capsys.readouterr()  # saving draws one
    told: list[tuple[int, int | None, str]] = []

    def counted(done: int, whole: int | None, unit: str = "", /) -> None:
        told.append((done, whole, unit))

    with reported_instead_of_bars(counted) as settings:
        WindowedLM.from_pretrained(tmp_path, **settings)
        weights = len(told)
        assert told == [(done, weights, "weights") for done in range(1, weights + 1)]
        # As huggingface_hub does where it downloads weights.
        with settings["tqdm_class"](total=100, unit="B", initial=10, desc="weights") as bar:
            bar.update(40)
    assert told[-1] == (50, 100, "B")
    assert capsys.readouterr().err == ""
