"""The harness finds the model by name, in a fresh process and without loading it before."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from lm_eval import __main__ as theirs
from lm_eval.api.registry import Registry, get_model, model_registry

import lm_eval_rag_windows
from lm_eval_rag_windows.__main__ import main
from rag_windows import InputError

ROOT = Path(__file__).parents[3]

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
    path = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", FRESH], check=True, cwd=ROOT, env=environment)
    assert get_model("rag-windows") is lm_eval_rag_windows.RagWindowsLM
    with pytest.raises(AttributeError, match="nothing"):
        lm_eval_rag_windows.nothing  # noqa: B018  # asking is the test


def test_the_entry_point_leads_there_as_well() -> None:
    """Releases of the harness that read entry points put them into their registry like this."""
    (declared,) = entry_points(group="lm_eval.models", name="rag-windows") or [
        EntryPoint("rag-windows", "lm_eval_rag_windows.model:RagWindowsLM", "lm_eval.models")
    ]
    assert f'rag-windows = "{declared.value}"' in (ROOT / "pyproject.toml").read_text()
    registry: Registry = Registry("model")
    registry.register("rag-windows", target=declared)
    assert registry.get("rag-windows") is lm_eval_rag_windows.RagWindowsLM


def test_our_command_is_the_harness_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def asked() -> None:
        seen.append(("rag-windows" in model_registry, sys.argv))

    def fail() -> None:
        raise InputError("No such thing:\n\x1b[31mdo this.")

    monkeypatch.setattr(sys, "argv", ["lm_eval", "--model", "rag-windows"])
    monkeypatch.setattr(theirs, "cli_evaluate", asked)
    main()
    assert seen == [(True, ["lm_eval", "--model", "rag-windows"])]
    monkeypatch.setattr(theirs, "cli_evaluate", fail)
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith("Error: No such thing:")
    assert told.count("\n") == 1
    assert "\x1b" not in told
