"""Answers of vLLM with the connector, beside those of this project's own engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.cases import CASES, MODELS, case, drawn
from tests.vllm.conftest import Answers
from tests.vllm.engines import encoding, engine, error, ordinary, reading, run, scheduler

TOLERANCE = 1e-4


@pytest.mark.parametrize("model", MODELS)
def test_float32_answers_are_the_engine_s_cold_warm_and_in_mixed_batches(
    answers: Answers, model: str
) -> None:
    plain = [ordinary(drawn(seed, 30 + seed)) for seed in range(3)]
    with engine(answers.folder / model) as llm:
        alone = [one.token_ids for one in run(llm, plain)]
        cold = []
        for one in CASES:
            run(llm, [*encoding(one), *plain])
            cold += run(llm, [reading(one)])
        mixed = run(llm, [*map(reading, CASES), *plain])
    warm, beside = mixed[: len(CASES)], mixed[len(CASES) :]
    assert [one.token_ids for one in beside] == alone
    for one, first, second in zip(CASES, cold, warm, strict=True):
        expected = answers.of(model, "float32", one.name)
        for got in (first, second):
            assert error(got, expected) < TOLERANCE, one.name
            assert got.token_ids == expected["ids"], one.name


def test_windows_change_the_answer(answers: Answers) -> None:
    """What the other tests compare is not what vLLM would say of the same tokens anyway."""
    with engine(answers.folder / "llama", connector=False) as llm:
        for one in CASES[:3]:
            (got,) = run(llm, [ordinary(one.ids)])
            assert error(got, answers.of("llama", "float32", one.name)) > 0.05


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_bfloat16_errors_are_those_of_the_engine_s_own_bfloat16(
    answers: Answers, model: str
) -> None:
    with engine(answers.folder / model, dtype="bfloat16", enable_prefix_caching=True) as llm:
        for one in CASES:
            run(llm, encoding(one))
        got = run(llm, [reading(one) for one in CASES])
    exact = [answers.of(model, "float32", one.name) for one in CASES]
    ours = [answers.of(model, "bfloat16", one.name)["logprobs"] for one in CASES]
    pairs = zip(exact, ours, strict=True)
    own = max(abs(a - b) for x, y in pairs for a, b in zip(x["logprobs"], y, strict=True))
    assert 0 < max(error(out, x) for out, x in zip(got, exact, strict=True)) < 2 * own


def test_prompts_longer_than_a_step_and_prefix_caching_change_nothing(answers: Answers) -> None:
    options: dict[str, Any] = {"enable_prefix_caching": True, "max_num_batched_tokens": 24}
    options["max_num_seqs"] = 8
    plain = [ordinary(one.ids) for one in CASES]
    with engine(answers.folder / "llama", **options) as llm:
        alone = [one.token_ids for one in run(llm, plain)]
        llm.reset_prefix_cache()
        for one in CASES:
            run(llm, encoding(one))
        # Twice, and beside ordinary requests of the same tokens: nobody finds another's blocks.
        for _ in range(2):
            got = run(llm, list(map(reading, CASES)))
            for one, out in zip(CASES, got, strict=True):
                assert error(out, answers.of("llama", "float32", one.name)) < TOLERANCE, one.name
            assert [one.token_ids for one in run(llm, plain)] == alone


def test_preempted_requests_load_their_windows_again(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [case(f"number {seed}", 11, [40, 25, 33], 3 + seed, 0.9) for seed in range(6)]
    options: dict[str, Any] = {
        "block_size": 32,
        "num_gpu_blocks_override": 26,
        "max_model_len": 512,
    }
    with engine(answers.folder / "llama", **options) as llm:
        run(llm, encoding(asked[0]))
        alone = [run(llm, [reading(one, 120)])[0].token_ids for one in asked]
        plan, preempted = scheduler(llm), []
        original = plan._preempt_request

        def counted(request: Any, *more: Any, **named: Any) -> Any:
            preempted.append(request.request_id)
            return original(request, *more, **named)

        monkeypatch.setattr(plan, "_preempt_request", counted)
        free = plan.kv_cache_manager.block_pool.get_num_free_blocks()
        together = run(llm, [reading(one, 120) for one in asked])
        assert preempted
        assert [one.token_ids for one in together] == alone
        assert plan.kv_cache_manager.block_pool.get_num_free_blocks() == free


def test_aborted_requests_leave_nothing_behind(answers: Answers) -> None:
    one = CASES[0]
    with engine(answers.folder / "llama") as llm:
        pool = scheduler(llm).kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        for steps in range(4):  # before, during and behind the load
            for number, (prompt, params) in enumerate([*encoding(one), reading(one, 50)]):
                llm.llm_engine.add_request(f"{steps}-{number}", prompt, params)
            for _ in range(steps):
                llm.llm_engine.step()
            names = [f"{steps}-{number}" for number in range(4)]
            llm.llm_engine.abort_request(names)
            while llm.llm_engine.has_unfinished_requests():
                llm.llm_engine.step()
            llm.llm_engine.step()
            assert pool.get_num_free_blocks() == free
        connector = scheduler(llm).connector
        assert not connector._asked
        assert not connector._encoding
        run(llm, encoding(one))
        (got,) = run(llm, [reading(one)])
    assert got.token_ids == answers.of("llama", "float32", one.name)["ids"]


def test_requests_that_make_no_sense_end_with_an_error_and_others_go_on(answers: Answers) -> None:
    one = CASES[0]
    with engine(answers.folder / "llama", enable_prefix_caching=True) as llm:
        prompt, params = reading(one)
        logged = sampled(params)
        bad = [
            (prompt, params),  # not encoded
            reading(one, windows=[400]),
            reading(one, temperature=0.0),
            reading(one, method="ape"),
            ({"prompt_token_ids": [5]}, params),
            (prompt, logged),
        ]
        got = run(llm, [*bad, ordinary(one.ids)])
        assert [out.finish_reason for out in got] == ["error"] * len(bad) + ["length"]
        assert all(not out.token_ids for out in got[:-1])
        run(llm, encoding(one))
        (right,) = run(llm, [reading(one)])
    assert error(right, answers.of("llama", "float32", one.name)) < TOLERANCE


def sampled(params: Any) -> Any:
    """The same with log-probabilities of the prompt."""
    made = params.clone()
    made.prompt_logprobs = 1
    return made


def test_entries_on_disk_outlive_the_engine_and_are_the_engine_s_own(
    answers: Answers, tmp_path: Path
) -> None:
    chosen = CASES[:4]
    extra = {"path": str(tmp_path), **answers.identity("llama", "float32")}
    with engine(answers.folder / "llama", extra) as llm:
        for one in chosen:
            run(llm, encoding(one))
    with engine(answers.folder / "llama", {**extra, "memory": None}) as llm:
        got = run(llm, [reading(one) for one in chosen])
    engine_s = answers.folder / "entries" / "float32"
    theirs = {"path": str(engine_s), "memory": None}
    with engine(answers.folder / "llama", {**extra, **theirs}) as llm:
        shared = run(llm, [reading(one) for one in CASES])
    for one, out in zip([*chosen, *CASES], [*got, *shared], strict=True):
        assert error(out, answers.of("llama", "float32", one.name)) < TOLERANCE, one.name
    written = {path.name for path in (tmp_path / "entries").iterdir()}
    assert written
    assert written <= {path.name for path in (engine_s / "entries").iterdir()}


def test_what_would_be_recomputed_silently_is_refused_at_the_start(answers: Answers) -> None:
    transfer = {"kv_load_failure_policy": "recompute"}
    with (
        pytest.raises(Exception, match="must be 'fail'"),
        engine(answers.folder / "llama", transfer=transfer),
    ):
        pass
