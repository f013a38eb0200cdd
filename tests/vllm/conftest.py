"""vLLM in this process, on one thread of the CPU, and the answers of this project's own engine."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# Read when vLLM is imported, and by the processes that it starts.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_NO_USAGE_STATS="1",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)


class Answers:
    """What `tests.vllm.engine_answers` has written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._told = json.loads((folder / "answers.json").read_text())

    def of(self, model: str, dtype: str, case: str) -> dict[str, Any]:
        return dict(self._told[f"{model} {dtype}"]["answers"][case])

    def identity(self, model: str, dtype: str) -> dict[str, str]:
        """The options by which vLLM finds the engine's entries."""
        names = "model_fingerprint", "tokenizer_fingerprint"
        told = self._told[f"{model} {dtype}"]["identity"]
        return dict(zip(names, told, strict=True))


@pytest.fixture(scope="session")
def answers() -> Answers:
    folder = os.environ.get("RAG_WINDOWS_ANSWERS")
    if find_spec("vllm") is None or folder is None:
        pytest.skip("make vllm runs these in vLLM's environment")
    return Answers(Path(folder))
