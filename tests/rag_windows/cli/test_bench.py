"""`rag-windows bench` on its smallest shape."""

from __future__ import annotations

from pathlib import Path

import pytest

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
)


def test_a_run_prints_its_table_and_writes_it(run: Run, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    done = run("bench", *SMALL, "--way", "transformers", "--way", "windows, cold", "--out", out)
    assert done.exit_code == 0, done.stderr
    assert "### 64 tokens, windows of 16" in done.stdout
    assert "windows, from disk" not in done.stdout
    assert (tmp_path / "out" / "performance.md").read_text(encoding="utf-8") in done.stdout
    assert (tmp_path / "out" / "performance.png").stat().st_size > 5000
    again = run("bench", *SMALL, "--way", "windows, cold", "--compare", f"{out}/performance.json")
    assert "### What moved" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--shape", "huge"), "choose among"),
        (("--way", "windows"), "--way 'windows' is unknown"),
        (("--context", "100", "--window", "33"), "take multiples"),
        (("--method", "none"), "none"),
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
