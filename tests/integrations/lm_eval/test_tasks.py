"""Whole evaluations by the harness, on tasks of this folder and the embedded learner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

import lm_eval
import lm_eval.tasks
from lm_eval.utils import handle_non_serializable

import lm_eval_rag_windows

TASKS = Path(__file__).parent / "tasks"
ASKED = 10
SHOTS = 32


@pytest.fixture(scope="module")
def tasks() -> Any:
    return lm_eval.tasks.TaskManager(include_path=str(TASKS), include_defaults=False)


def evaluate(tasks: Any, names: list[str], arguments: str = "", **options: Any) -> dict[str, Any]:
    found = lm_eval.simple_evaluate(
        model=lm_eval_rag_windows.NAME,
        model_args=f"pretrained=tiny-learner,device=cpu{arguments}",
        tasks=names,
        task_manager=tasks,
        bootstrap_iters=0,
        apply_chat_template=True,
        fewshot_as_multiturn=False,
        **options,
    )
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_examples_in_windows_teach_and_no_examples_do_not(tasks: Any) -> None:
    names = ["made_up_labels", "made_up_answers"]
    shown = evaluate(tasks, names, ",method=ape", num_fewshot=SHOTS, limit=ASKED)
    assert shown["results"]["made_up_labels"]["acc,none"] >= 0.9
    assert shown["results"]["made_up_answers"]["exact_match,none"] >= 0.9
    told = shown["config"]["rag_windows"]
    # Four choices and one free answer each; every example was encoded for the first time only.
    assert told["requests_by_windows"] == {str(SHOTS): 5 * ASKED}
    assert told["windows_encoded"] <= SHOTS
    assert told["method"]["name"] == "ape"
    json.dumps(shown["config"], default=handle_non_serializable)
    blind = evaluate(tasks, names, ",method=ape", num_fewshot=0, limit=ASKED)
    assert blind["results"]["made_up_labels"]["acc,none"] <= 0.6
    assert blind["results"]["made_up_answers"]["exact_match,none"] <= 0.6
    assert blind["config"]["rag_windows"]["requests_by_windows"] == {"0": 5 * ASKED}


@pytest.mark.slow
def test_answers_are_kept_by_the_harness(tasks: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_fewshot": 8, "limit": 4, "use_cache": str(tmp_path / "kept")}
    names = ["made_up_labels", "made_up_answers", "made_up_text"]
    first = evaluate(tasks, names, ",method=ape", **options)
    again = evaluate(tasks, names, ",method=ape", **options)
    assert again["results"] == first["results"]
    assert again["config"]["rag_windows"]["requests_by_windows"] == {}
