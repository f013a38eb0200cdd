from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rag_windows.calibration import Profile
from rag_windows.methods import MateICL
from tests.blackbox.conftest import Run

FAST = ("--method", "mateicl", "--max-new-tokens", "4")


@pytest.fixture
def few_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two settings instead of eleven: what is tried is tested elsewhere."""
    monkeypatch.setattr(
        "rag_windows.calibration.calibrate.default_grid", lambda _: (MateICL(2.0), MateICL(4.0))
    )


@pytest.fixture
def examples(docs: Path) -> Path:
    path = docs.parent / "examples.jsonl"
    rows = [
        {"query": f"Who built the bridge at Halden, part {number}?", "kind": "single-hop"}
        for number in range(7)
    ]
    rows.append({"query": "Lamps?", "passages": ["Lamps.", "Lights."], "answer": "lights"})  # type: ignore[dict-item]  # rows differ, as in users' files
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.usefixtures("few_settings")
def test_a_profile_is_made_shown_drawn_and_used(run: Run, examples: Path, model: str) -> None:
    result = run(
        *("calibrate", "--examples", examples, "--docs", "docs", "--model", model),
        *("--out", "profile.json", "--plot", "heat.png", *FAST),
    )
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    profile = Profile.load("profile.json")
    assert (profile.examples, profile.default, profile.criteria) == (8, MateICL(), ("divergence",))
    assert profile.model.name == Path(model).name
    assert Path("heat.png").read_bytes().startswith(b"\x89PNG")
    for text in ("mateicl(schedule=2)", "default", profile.verdict[:40], "--profile profile.json"):
        assert text in result.stdout
    assert "8 examples" in result.stdout

    question = ("Who built the bridge at Halden?", "--docs", "docs", "--model", model)
    short = ("--max-new-tokens", "2", "--json", "--profile", "profile.json")
    asked = run("ask", *question, *short)
    assert asked.exit_code == 0, asked.stderr
    assert json.loads(asked.stdout)["method"] == "mateicl"
    assert asked.stderr.count("made for") == 0
    explicit = run("ask", *question, *short, "--method", "pcw")
    assert json.loads(explicit.stdout)["method"] == "pcw"


@pytest.mark.usefixtures("few_settings")
def test_json_is_the_profile(run: Run, examples: Path, model: str) -> None:
    result = run(
        *("calibrate", "--examples", examples, "--docs", "docs", "--model", model),
        *("--json", "--by", "agreement", *FAST, "--limit", "8", "--out", "profile.json"),
    )
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == json.loads(Path("profile.json").read_text())


def test_a_profile_of_another_model_is_told(run: Run, docs: Path, model: str) -> None:
    from tests.rag_windows.calibration.profiles import profile

    profile().save("profile.json")
    asked = run(
        *("chat", "--docs", "docs", "--model", model, "--profile", "profile.json"),
        *("--max-new-tokens", "2"),
        stdin="Who built the bridge?\n",
    )
    assert asked.exit_code == 0
    assert "Note: The profile was made for 'some/model'" in asked.stderr
    assert ", ape: passages encoded" in asked.stdout


@pytest.mark.usefixtures("few_settings")
def test_the_sample_questions_are_the_default(run: Run) -> None:
    result = run("calibrate", "--json", "--limit", "8", "--device", "cpu", "--no-cache", *FAST)
    assert result.exit_code == 0, result.stderr
    profile = json.loads(result.stdout)
    assert (profile["examples"], profile["criteria"][0]) == (8, "exact match")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--docs", "docs"], "--docs alone can't be calibrated on"),
        (["--examples", "examples.jsonl"], "Example 1 of 'examples.jsonl' has no passages"),
        (["--examples", "none.jsonl"], "can't be read"),
        (["--out", "no/profile.json"], "--out 'no/profile.json': the folder does not exist"),
        (["--plot", "docs"], "--plot 'docs': the folder does not exist, or this is one"),
    ],
)
def test_errors_come_before_the_model(
    run: Run, examples: Path, args: list[str], message: str
) -> None:
    result: Any = run("calibrate", "--model", "./no-such-model", *args)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_a_profile_and_numbers_are_refused_together(run: Run, docs: Path, model: str) -> None:
    from tests.rag_windows.calibration.profiles import profile

    profile().save("profile.json")
    for args, message in (
        (("--profile", "profile.json", "--rag-scale", "0.5"), "--profile brings the numbers"),
        (("--profile", "none.json"), "can't be read"),
    ):
        result = run("ask", "Who?", "--docs", "docs", "--model", model, *args)
        assert result.exit_code == 2
        assert message in result.stderr
