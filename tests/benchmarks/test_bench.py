"""The arithmetic of `rag-windows bench`; what it prints and keeps is in tests/blackbox."""

from __future__ import annotations

from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

import pytest

from rag_windows import InputError, PassageCache
from rag_windows_eval.benchmark import answers, workload
from rag_windows_eval.benchmark import result as results
from rag_windows_eval.benchmark import run as running
from tests.rag_windows import small


def test_texts_come_to_the_tokens_that_are_asked_for() -> None:
    lm = running.wrapped(results.BenchPlan(shape="tiny", dtype="float32"))
    asked = workload.BenchTexts(lm, 64, 8).workload()
    assert [len(ids) for ids in asked.windows] == [8] * 8
    assert len(asked.parts.prefix_ids) == len(asked.parts.query_ids) == 32
    assert len(asked.prompt) == 64 + 32 + 32
    answer = lm.generate(
        asked.question, asked.passages, prefix=asked.system, max_new_tokens=2, min_new_tokens=2
    )
    assert (answer.usage.windows, answer.usage.prompt_tokens) == (8, 128)
    # Words of a tokenizer that takes a token a byte come as close as they can.
    bytewise = workload.BenchTexts(small.lm(), 60, 20).workload()
    assert {len(ids) for ids in bytewise.windows} <= {19, 20}


def test_questions_share_half_of_their_windows() -> None:
    lm = running.wrapped(results.BenchPlan(shape="tiny", dtype="float32"))
    texts = workload.BenchTexts(lm, 64, 8)
    asked = texts.sharing(4)
    for one in asked:
        for other in asked:
            common = set(one.windows) & set(other.windows)
            assert len(common) == (8 if one is other else 4)
    assert len({tuple(one.windows) for one in asked}) == 4
    assert texts.workload() == texts.workload()


@pytest.mark.parametrize(
    ("shape", "size"), [("llama-0.25b", 0.25e9), ("qwen-0.5b", 0.5e9), ("llama-3.1-8b", 8e9)]
)
def test_the_shapes_have_the_sizes_of_their_names(shape: Any, size: float) -> None:
    model, tokenizer = workload.build(results.BenchPlan(shape=shape, device="meta"))
    assert len(tokenizer) == model.config.vocab_size
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=0.08)


def test_the_roofline_is_what_a_step_reads() -> None:
    model, _ = workload.build(results.BenchPlan(shape="tiny", dtype="float32"))
    assert workload.token_bytes(model) == 2 * 2 * 2 * 32 * 4
    whole, token = workload.weight_bytes(model), workload.token_bytes(model)
    # One row of the embedding table is read.
    assert workload.step_bytes(model, 10) == whole - 512 * 128 * 4 + 10 * token


@pytest.mark.slow
def test_an_accelerator_has_room_for_all_windows_that_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The CPU stands for it.
    monkeypatch.setattr(PassageCache, "accelerator_may_be_cpu", True)
    plan = results.BenchPlan("tiny", context=256, window=16, questions=5, device="cuda")
    lm = running.wrapped(replace(plan, device="cpu"))
    asked = workload.BenchTexts(lm, plan.context, plan.window).sharing(5)
    with answers.warm_cache(plan, lm) as cache:
        for one in asked:
            lm.with_cache(cache).encode_ids(one.parts.prefix_ids, one.windows)
        held = cache.stats().tiers["device"]
    windows = {ids for one in asked for ids in one.windows}
    assert held.entries == len(windows) + 1 == 8 + 5 * 8 + 1
    needed = (len(windows) * 16 + 32) * workload.token_bytes(lm.model)
    assert held.limit_bytes < 1.4 * needed


def test_a_cache_that_did_not_keep_all_windows_spoils_the_run() -> None:
    lm = running.wrapped(results.BenchPlan("tiny", dtype="float32"))
    with (
        pytest.raises(InputError, match=r"tier 'memory' could not hold .* 9,000 bytes"),
        answers.new_cache(memory=9000) as cache,
    ):
        lm.with_cache(cache).encode_ids([], [range(20, 30), range(30, 40)])


def test_a_process_that_fails_leaves_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*asked: object) -> None:
        raise BrokenProcessPool("it was killed")

    monkeypatch.setattr(running, "ProcessPoolExecutor", killed)
    sizes: dict[str, Any] = {"context": 64, "window": 32, "new_tokens": 2, "rounds": 1}
    plan = results.BenchPlan("tiny", dtype="float32", way=[results.COLD], **sizes)
    told: list[str] = []
    (row,) = running.run(plan, "rag-windows bench", told.append).rows
    assert row.peak_bytes is None
    assert "Peak memory of windows, cold was not measured: it was killed" in told


def test_figures_are_rounded_down_and_a_dash_where_there_are_none() -> None:
    assert results.percent(0.6499) == "64%"
    assert (results.number(0.012345), results.number(12345.6)) == ("0.0123", "12,346")
    assert results.times([2.999], [1.0]) == "2.99x"
    assert results.times([29.99], [1.0]) == "29.9x"
    assert results.times([2999.9], [1.0]) == "2,999x"
    assert results.times([], [1.0]) == results.times([1.0], []) == "-"
    assert results.spread([1.0], "s") == "1.00 s"


def test_a_cost_is_the_median_of_its_rounds_and_rounded_up() -> None:
    assert results.cost([1.0301]) == "1.031x"
    assert results.cost([1.1, 1.03, 1.0]) == "1.030x (1.000x to 1.100x)"
    assert results.cost([]) == "-"
