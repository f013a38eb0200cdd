"""`rag-windows bench` on its smallest shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from rag_windows.benchmark import profile
from tests.rag_windows.cli.conftest import Run

SMALL = (
    "--shape",
    "tiny",
    "--context",
    "64",
    "--window",
    "16",
    "--rounds",
    "1",
    "--new-tokens",
    "2",
    "--no-memory",
)
PARTIAL = "performance.partial.jsonl"


def test_a_run_prints_its_table_and_writes_it(run: Run, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    done = run("bench", *SMALL, "--way", "transformers", "--way", "windows, cold", "--out", out)
    assert done.exit_code == 0, done.stderr
    assert "### 64 tokens, windows of 16" in done.stdout
    assert "windows, from disk" not in done.stdout
    assert (tmp_path / "out" / "performance.md").read_text(encoding="utf-8") in done.stdout
    assert (tmp_path / "out" / "performance.png").stat().st_size > 5000
    assert not (tmp_path / "out" / PARTIAL).exists()
    again = run("bench", *SMALL, "--way", "windows, cold", "--compare", f"{out}/performance.json")
    assert "### What moved" in again.stdout


def test_methods_lengths_and_dear_contexts_are_asked_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The profiler takes a second for a round of full length; that there is a row takes none.
    monkeypatch.setattr(profile, "_TOKENS", 3)
    monkeypatch.setattr(profile, "_ROUNDS", 1)
    done = run(
        "bench",
        *SMALL,
        *(
            "--context",
            "128",
            "--new-tokens",
            "5",
            "--rounds",
            "2",
            "--against",
            "pcw",
            "--profile",
        ),
        *("--dear-above", "64", "--dear-tokens", "3", "--questions", "2"),
        *("--question-context", "32", "--way", "transformers", "--way", "windows, cold"),
    )
    assert done.exit_code == 0, done.stderr
    assert "end of 2 tokens" in done.stdout
    assert "end of 5 tokens" in done.stdout
    assert "transformers: 1 of 2 rounds, 3 of 5 new tokens." in done.stdout
    assert "more than pcw" in done.stdout
    assert "| attention over windows |" in done.stdout
    assert "| 2 | 32 | together |" in done.stdout


def test_an_unfinished_run_of_other_settings_is_not_overwritten(run: Run, tmp_path: Path) -> None:
    path = tmp_path / PARTIAL
    path.write_text('{"settings": {}}\n', encoding="utf-8")
    done = run("bench", *SMALL, "--way", "windows, cold", "--out", str(tmp_path))
    assert done.exit_code == 2
    assert "an unfinished run with other settings" in done.stderr
    assert path.read_text(encoding="utf-8") == '{"settings": {}}\n'


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--shape", "huge"), "choose among"),
        (("--way", "windows"), "--way 'windows' is unknown"),
        (("--context", "100", "--window", "33"), "take multiples"),
        (("--method", "none"), "none"),
        (("--against", "none"), "none"),
        (("--question-context", "300"), "take multiples"),
        (("--device", "cuda"), "no CUDA device"),
        (("--compare", "missing.json"), "missing.json is no result"),
    ],
)
def test_bad_options_are_one_line_before_any_work(
    run: Run, arguments: tuple[str, ...], told: str
) -> None:
    done = run("bench", *arguments)
    assert done.exit_code == 2
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
