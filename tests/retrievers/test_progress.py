from __future__ import annotations

import sys

import pytest

from rag_windows.errors import MissingExtraError
from rag_windows_retrievers import DenseRetriever, progress_bar
from tests.retrievers.small import CORPUS, WordEncoder


def test_a_bar_shows_only_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress_bar("Embedding") as progress:
        DenseRetriever(CORPUS, WordEncoder(), progress=progress)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar("Embedding") as progress:
        DenseRetriever(CORPUS, WordEncoder(), progress=progress)
    shown = capsys.readouterr().err
    assert "Embedding" in shown
    assert "5/5" in shown


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with (
        pytest.raises(MissingExtraError, match=r"tqdm.*\.\[retrievers\]"),
        progress_bar(""),
    ):
        pass
