"""The harness finds the model by name, in a fresh process and without loading it before."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from lm_eval import __main__ as harness
from lm_eval.api.registry import get_model

import lm_eval_rag_windows
from lm_eval_rag_windows.__main__ import main
from rag_windows import InputError

FRESH = """
import sys
import lm_eval_rag_windows
from lm_eval.api.registry import model_registry
assert "rag-windows" in model_registry
assert "hf" in model_registry, "the harness's own models are there, too"
assert "torch" not in sys.modules, "registering must not load anything"
lm_eval_rag_windows.register()
"""


def test_importing_the_package_registers_the_model() -> None:
    subprocess.run([sys.executable, "-c", FRESH], check=True)
    assert get_model("rag-windows") is lm_eval_rag_windows.RagWindowsLM


def test_the_entry_point_leads_there_as_well() -> None:
    (declared,) = entry_points(group="lm_eval.models", name="rag-windows") or [
        EntryPoint("rag-windows", "lm_eval_rag_windows.model:RagWindowsLM", "lm_eval.models")
    ]
    written = Path(__file__).parents[3] / "integrations" / "lm_eval" / "pyproject.toml"
    assert f'rag-windows = "{declared.value}"' in written.read_text()
    assert declared.load() is lm_eval_rag_windows.RagWindowsLM


def test_our_command_is_the_harness_own_with_errors_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise InputError("No such thing:\n\x1b[31mdo this.")

    monkeypatch.setattr(harness, "cli_evaluate", fail)
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith("Error: No such thing:")
    assert told.count("\n") == 1
    assert "\x1b" not in told
