"""The arithmetic of `rag-windows bench`; what it prints and keeps is in tests/blackbox."""

from __future__ import annotations

from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest

from rag_windows.benchmark import result as results
from rag_windows.benchmark import run as running


def test_questions_share_half_of_their_windows() -> None:
    asked = running.sharing(500, 4, 64, 8)
    for one in asked:
        for other in asked:
            common = set(one.windows) & set(other.windows)
            assert len(common) == (8 if one is other else 4)
    assert len({one.windows for one in asked}) == 4
    assert running.load(500, 64, 8) == running.load(500, 64, 8)


@pytest.mark.parametrize(
    ("shape", "size"), [("llama-0.25b", 0.25e9), ("qwen-0.5b", 0.5e9), ("llama-3.1-8b", 8e9)]
)
def test_the_shapes_have_the_sizes_of_their_names(shape: Any, size: float) -> None:
    model = running.build(results.Plan(shape=shape, device="meta"))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=0.08)


def test_the_floor_is_what_a_step_reads() -> None:
    model = running.build(results.Plan(shape="tiny", dtype="float32"))
    assert running.token_bytes(model) == 2 * 2 * 2 * 32 * 4
    whole = sum(parameter.nbytes for parameter in model.parameters())
    # One row of the embedding table is read.
    assert running.step_bytes(model, 10) == whole - 512 * 128 * 4 + 10 * running.token_bytes(model)


def test_a_process_that_fails_leaves_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*asked: object) -> None:
        raise BrokenProcessPool("it was killed")

    monkeypatch.setattr(running, "ProcessPoolExecutor", killed)
    sizes: dict[str, Any] = {"context": 64, "window": 32, "new_tokens": 2, "rounds": 1}
    plan = results.Plan("tiny", dtype="float32", way=[results.COLD], **sizes)
    told: list[str] = []
    (cell,) = running.run(plan, "rag-windows bench", told.append).cells
    assert cell.peak_bytes is None
    assert "Peak memory of windows, cold was not measured: it was killed" in told


def test_figures_are_rounded_down_and_a_dash_where_there_are_none() -> None:
    assert results.percent(0.6499) == "64%"
    assert (results.number(0.012345), results.number(12345.6)) == ("0.0123", "12,346")
    assert results.times([2.999], [1.0]) == "2.99x"
    assert results.times([], [1.0]) == results.times([1.0], []) == "-"
    assert results.spread([1.0], "s") == "1.00 s"
