"""A compiler to compile kernels with, and kernels that are not compiled yet."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from rag_windows.attention.native import build, kernel, linear


@pytest.fixture
def real_compiler() -> list[str]:
    """The command of one that works here, with PyTorch's OpenMP."""
    command = build._compiler()
    if command is None or build._openmp() is None:
        pytest.skip("needs a C compiler, and PyTorch with OpenMP")
    return command


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing is compiled yet, and no compiler is named; where temporary files are made."""
    for module in (kernel, linear):
        monkeypatch.setattr(module, "_kernels", build.SingleFlight(module._checked))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv(build.VARIABLE, raising=False)
    made = tmp_path / "temporary files"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    monkeypatch.setenv("RAG_WINDOWS_CACHE_DIR", str(tmp_path / "cache"))
    return made
