"""The figures of benchmarks/recall.py, on a file small enough to check by hand."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rag_windows.evaluation.inscit import InscitTask
from rag_windows_retrievers import BM25Retriever, last_turns

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "recall.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("inscit_recall", SCRIPT)
    if spec is None or spec.loader is None:
        raise ImportError(SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["inscit_recall"] = module
    spec.loader.exec_module(module)
    return module


def evidence(name: str) -> dict[str, Any]:
    text = {"A": "bridge bridge", "B": "bridge harbour", "C": "lakes"}[name]
    return {"passage_id": name, "passage_text": text, "passage_titles": ["T", name]}


def turn(context: list[str], *labels: str) -> dict[str, Any]:
    return {
        "context": context,
        "labels": [
            {
                "responseType": "directAnswer",
                "response": "",
                "evidence": [evidence(name) for name in label],
            }
            for label in labels
        ],
    }


def test_figures_are_what_they_say(script: ModuleType, tmp_path: Path) -> None:
    turns = [
        turn(["bridge"], "A"),
        turn(["bridge", "Yes.", "bridge?"], "B", "BC"),
        turn(["why"], ""),
    ]
    (tmp_path / "dev.json").write_text(json.dumps({"one": {"turns": turns}}))
    task = InscitTask.read(tmp_path / "dev.json")
    found = [one for one in task.examples if one.evidence]
    assert len(found) == 2
    figures = {
        one.name: one.value
        for one in script.measure(BM25Retriever(task.pool), last_turns(0), found)
    }
    # A, B is found both times: first rank 1 of 1, then rank 2 for one of two.
    assert figures == {
        **{"recall@1": 50.0, "recall@5": 75.0, "recall@20": 75.0},
        **{"hit@1": 50.0, "hit@5": 100.0, "hit@20": 100.0},
        "mrr": 75.0,
    }
