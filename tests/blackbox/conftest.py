"""Models, passages and a way to run the command, for tests that know public names only."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from rag_windows import Passage, WindowedLM
from rag_windows.cli.commands import app
from tests.rag_windows import small

ROOT = Path(__file__).parents[2]
QUESTION = "Where was Vara Zelmont born?"
ANSWER = "Sulava"

Run = Callable[..., Result]
Process = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds what another one encoded."""
    monkeypatch.setenv("RAG_WINDOWS_CACHE_DIR", str(tmp_path_factory.mktemp("windows")))


@pytest.fixture(scope="session")
def reader() -> WindowedLM:
    """The shipped `tiny-reader`, which answers QUESTION over `passages` with ANSWER."""
    return WindowedLM.from_pretrained("tiny-reader")


@pytest.fixture(scope="session")
def passages() -> list[Passage]:
    """Two passages, one of which answers QUESTION."""
    return [
        Passage("Aldan Pellby plays the lute. Aldan Pellby was born in Birholm.", title="Pellby"),
        Passage("Vara Zelmont plays the harp. Vara Zelmont was born in Sulava.", title="Zelmont"),
    ]


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved random Llama with a byte tokenizer and 1,024 positions; it never ends an answer."""
    folder = tmp_path_factory.mktemp("small-model")
    endless = copy.deepcopy(small.model())
    endless.generation_config.eos_token_id = endless.config.eos_token_id = None
    endless.save_pretrained(folder)
    small.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapter(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter's folder, without a tokenizer of its own."""
    peft = pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(small_folder)
    settings = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    peft.get_peft_model(base, settings).save_pretrained(folder)
    assert not (folder / "config.json").exists()
    return folder


@pytest.fixture(scope="session")
def small_lm() -> WindowedLM:
    """A random Llama with a byte tokenizer and 1,024 positions, method "ape"."""
    return small.lm()


def invoke(*args: str | Path, stdin: str | bytes | None = None) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)


@pytest.fixture
def run() -> Run:
    """As `invoke`: `run("ask", "Who?").exit_code, .stdout, .stderr`."""
    return invoke


@pytest.fixture
def python() -> Process:
    """Run code in a fresh interpreter that finds the sources: `python("import rag_windows")`."""

    def invoke(
        code: str, *, timeout: float = 120.0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(map(str, (ROOT, ROOT / "retrievers", *ROOT.glob("integrations/*"))))
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return invoke
