"""The harness finds the model by name, in a fresh process and without loading it before."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

ROOT = Path(__file__).parents[3]
GROUP = "lm_eval.models"

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
    subprocess.run([sys.executable, "-c", FRESH], check=True, cwd=ROOT, env=_environment())


def _environment() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "integrations")])}


def test_the_name_leads_to_the_class() -> None:
    from lm_eval.api.registry import get_model

    import lm_eval_rag_windows

    assert get_model("rag-windows") is lm_eval_rag_windows.RagWindowsLM
    with pytest.raises(AttributeError, match="nothing"):
        lm_eval_rag_windows.nothing  # noqa: B018  # asking is the test


def test_the_entry_point_leads_there_as_well() -> None:
    """Releases of the harness that read entry points put them into their registry like this."""
    from lm_eval.api.registry import Registry

    import lm_eval_rag_windows

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    value = declared[GROUP]["rag-windows"]
    registry: Registry = Registry("model")
    registry.register("rag-windows", target=EntryPoint("rag-windows", value, GROUP))
    assert registry.get("rag-windows") is lm_eval_rag_windows.RagWindowsLM


def test_our_command_is_the_harness_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval import __main__ as theirs
    from lm_eval.api.registry import model_registry

    from lm_eval_rag_windows.__main__ import main

    seen = []
    monkeypatch.setattr(
        theirs, "cli_evaluate", lambda: seen.append(("rag-windows" in model_registry, sys.argv))
    )
    monkeypatch.setattr(sys, "argv", ["lm_eval", "--model", "rag-windows"])
    main()
    assert seen == [(True, ["lm_eval", "--model", "rag-windows"])]


def test_our_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval import __main__ as theirs

    from lm_eval_rag_windows.__main__ import main
    from rag_windows.errors import InputError

    def fail() -> None:
        raise InputError("No such thing:\n\x1b[31mdo this.")

    monkeypatch.setattr(theirs, "cli_evaluate", fail)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("Error: No such thing:")
    assert told.count("\n") == 1
    assert "\x1b" not in told
