"""The program that has all methods answer the same questions, and what its figures rest on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import quality
from benchmarks.quality import METHODS, ask, estimate, fill_page, percent
from rag_windows.methods import resolve

QUICK = ["--questions", "4", "--passages", "8", "--jobs", "1", "--tasks", "single-hop"]
SOME = ["--methods", "sequential", "pcw", "ensemble, uniform"]


def test_a_run_writes_the_page_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    place = ["--out", str(tmp_path), "--results", str(results)]
    quality.main([*QUICK, *SOME, *place])
    page = (tmp_path / "methods.md").read_text(encoding="utf-8")
    assert "| pcw | 100.0 (100.0–100.0) |" in page
    assert "4 questions a cell." in page
    assert "3 cells, 12 answers" in page
    assert (tmp_path / "methods" / "single-hop-tiny-reader.png").stat().st_size > 10_000
    before = results.read_text(encoding="utf-8")
    cells = [json.loads(line) for line in before.splitlines()]
    assert {cell["label"] for cell in cells} == set(SOME[1:])
    # A line that was torn off is done again, everything else is there.
    results.write_text(before[:-30], encoding="utf-8")
    quality.main([*QUICK, *SOME, *place])
    assert len(quality.read_results(results)) == 3
    quality.main(["--draw", *place])
    assert (tmp_path / "methods.md").read_text(encoding="utf-8").count("| pcw |") == page.count(
        "| pcw |"
    )


def test_another_model_is_asked_and_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = ["--results", str(tmp_path / "results.jsonl")]
    quality.main([*QUICK[:-1], "kin", "--model", "tiny-reader", "--methods", "pcw", *results])
    assert "### kin, `tiny-reader`" in capsys.readouterr().out


def test_cells_are_seeded_and_citations_name_the_stating_passage() -> None:
    cell = ask("tiny-reader", "single-hop", 4, "ape", 5, seed=3)
    again = ask("tiny-reader", "single-hop", 4, "ape", 5, seed=3)
    assert (cell.right, cell.cited) == (again.right, again.cited)
    assert cell.right.count("1") >= 4
    assert cell.cited.count("1") >= cell.right.count("1") - 1
    assert 0 < cell.blind < 1


def test_every_row_is_a_method() -> None:
    for name in METHODS.values():
        assert resolve(name.format(further=7)).name


def test_shares_have_the_textbook_interval_and_retention_is_paired() -> None:
    marks = "1" * 300 + "0" * 100
    value, low, high = estimate(marks)
    half = 1.96 * np.sqrt(0.75 * 0.25 / 400)
    assert value == 0.75
    assert (low, high) == pytest.approx((0.75 - half, 0.75 + half), abs=0.008)
    assert estimate(marks, marks) == (1.0, 1.0, 1.0)
    assert percent((0.5, 0.4, 0.6), " ↑") == "50.0 ↑ (40.0–60.0)"


def test_page_and_figures_must_fit() -> None:
    page = "a\n<!-- figures: one -->\nold\n<!-- end of figures -->\nb\n"
    filled = fill_page(page, {"one": "new\n"})
    assert filled == "a\n<!-- figures: one -->\nnew\n<!-- end of figures -->\nb\n"
    with pytest.raises(ValueError, match="two"):
        fill_page(page, {"one": "", "two": ""})
