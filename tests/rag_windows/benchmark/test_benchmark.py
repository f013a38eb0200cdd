"""The benchmark's arithmetic, and what is compared with what."""

from __future__ import annotations

import dataclasses
import math
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_windows import DataError, InputError, WindowedLM
from rag_windows.benchmark import run as running
from rag_windows.benchmark.result import (
    COLD,
    MEMORY,
    PREFIX_KEPT,
    SEQUENTIAL,
    WAYS,
    Place,
    Rates,
    Result,
    changes,
    exponent,
    markdown,
    median,
    number,
    percent,
    spread,
    times,
)
from rag_windows.benchmark.run import GreedyDecoder, Roofline, measure_roofline, profile_step, run
from rag_windows.benchmark.workload import (
    SHAPES,
    Plan,
    Timing,
    lengths,
    load,
    sharing,
    token_bytes,
)

PLAN = Plan(
    shape="tiny",
    dtype="float32",
    contexts=(128, 256),
    windows=(32,),
    ragged=True,
    tokens=(2, 4),
    rounds=2,
    against=("pcw", "structured-prompting"),
    questions=(3,),
    slow_above=128,
    slow_tokens=3,
    memory=False,
)
TINY = Plan(shape="tiny", dtype="float32")


@pytest.fixture(scope="module")
def result() -> Result:
    return run(PLAN, "rag-windows bench --shape tiny")


@given(st.integers(2, 40), st.integers(1, 30), st.booleans(), st.integers(0, 99))
def test_windows_make_up_the_context(window: int, count: int, ragged: bool, seed: int) -> None:
    sizes = lengths(Place(window * count, window, ragged), seed)
    assert sum(sizes) == window * count
    assert len(sizes) == count
    assert min(sizes) > 0
    assert ragged or set(sizes) == {window}


def test_questions_share_half_of_their_windows() -> None:
    place = Place(64, 8, ragged=False)
    asked = sharing(500, 4, place)
    for one in asked:
        for other in asked:
            common = set(one.windows) & set(other.windows)
            assert len(common) == (8 if one is other else 4)
    assert len({one.windows for one in asked}) == 4
    assert load(500, place) == load(500, place)


def test_the_shapes_have_the_sizes_of_their_names() -> None:
    sizes = {"llama-0.25b": 0.25e9, "qwen-0.5b": 0.5e9, "llama-3.1-8b": 8e9}
    for name in SHAPES:
        model = Plan(shape=name, device="meta").build()
        numbers = sum(p.numel() for p in model.parameters())
        assert numbers == pytest.approx(sizes.get(name, numbers), rel=0.08)


def test_a_roofline_is_what_the_rates_allow() -> None:
    roofline = Roofline(Rates(1e11, 1e10), 2e9, 4_000_000_000, 1000)
    assert roofline.prefill_s(100) == pytest.approx(2.0)
    assert roofline.decode_s(1_000_000) == pytest.approx(0.5)
    model = TINY.build()
    measured = measure_roofline(model)
    assert measured.flops == 2 * 2 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 384)
    assert measured.token == token_bytes(model) == 2 * 2 * 2 * 32 * 4
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert measured.weights == whole - 512 * 128 * 4  # one row of the embedding table is read


def test_every_way_is_timed_in_every_round_but_for_what_is_slow(result: Result) -> None:
    assert Timing(1.0, (1.0, 1.5, 2.0)).tokens_per_s == 2.0
    assert [cell.way for cell in result.cells] == [*WAYS] * 4
    for cell in result.cells:
        slow = cell.context > 128 and cell.way in (SEQUENTIAL, PREFIX_KEPT)
        ends = {"2": 2} if slow else {"2": 2, "4": 4}
        assert cell.tokens == (3 if slow else 4)
        assert set(cell.end_s) == set(ends)
        for seconds in (cell.prefill_s, cell.first_s, cell.tokens_per_s, *cell.end_s.values()):
            assert len(seconds) == (1 if slow else 2)
            assert min(seconds) > 0
        last = [median(cell.end_s[name]) for name in ends]
        assert [median(cell.first_s), *last] == sorted([median(cell.first_s), *last])


def test_a_prefill_s_floor_counts_the_tokens_that_a_way_computes(result: Result) -> None:
    first = result.cells[0].place
    each = {cell.way: cell.prefill_floor_s for cell in result.cells if cell.place == first}
    whole, cold, kept = each[SEQUENTIAL], each[COLD], each[PREFIX_KEPT]
    assert whole is not None
    assert cold == kept == pytest.approx(whole * 160 / 192)
    assert each[MEMORY] is None


def test_methods_and_questions_are_timed_in_every_round(result: Result) -> None:
    assert len(result.readings) == 4 * 3
    for one in result.readings:
        assert len(one.first_s) == len(one.token_s) == 2
        assert min(one.first_s + one.token_s) > 0
    assert [one.way for one in result.crowds] == ["one by one", "together"]
    assert all(len(one.seconds) == 2 and min(one.seconds) > 0 for one in result.crowds)


@pytest.mark.parametrize("method", ["ape", "mateicl", "ensemble"])
def test_a_method_is_timed_at_the_tokens_that_it_generates(method: str) -> None:
    lm = WindowedLM(TINY.build(), method=method)
    asked = load(512, Place(64, 16, ragged=False))
    context = lm.encode_ids(asked.prefix, asked.windows)
    decoder = GreedyDecoder(lm, context, asked.query)
    made = []
    for take in (decoder.first, decoder.step, decoder.step, decoder.first):
        assert take() > 0
        made.append(decoder.token)
    wanted = lm.generate_ids(context, asked.query, max_new_tokens=3, min_new_tokens=3)
    assert made == [*wanted, wanted[0]]


def test_a_result_survives_json(result: Result, tmp_path: Path) -> None:
    path = tmp_path / "new" / "performance.json"
    result.save(path)
    assert Result.load(path) == result
    assert markdown(Result.load(path)) == markdown(result)
    for content in ("", "[]", '{"format": 1}', '{"format": 2}'):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=r"performance\.json is no result"):
            Result.load(path)


def test_what_moved_is_told_and_what_did_not_is_not(result: Result) -> None:
    assert changes(result, result) == ["Nothing moved beyond the spread of the rounds."]
    first, *rest, last = result.parts
    cells = [
        dataclasses.replace(cell, first_s=[2 * max(cell.first_s) + one for one in cell.first_s])
        if cell.way == COLD
        else cell
        for cell in first.cells
    ]
    alone, together = last.crowds
    later = [2 * max(together.seconds) + one for one in together.seconds]
    crowds = [alone, dataclasses.replace(together, seconds=later)]
    parts = [
        dataclasses.replace(first, cells=cells),
        *rest,
        dataclasses.replace(last, crowds=crowds),
    ]
    rows = changes(result, dataclasses.replace(result, parts=parts))[2:]
    assert len(rows) == 2
    assert "| 128 tokens, windows of 32 | windows, cold | first token |" in rows[0]
    assert "| 3 questions, 128 tokens each | together | seconds |" in rows[1]
    elsewhere = dataclasses.replace(result, dtype="bfloat16")
    assert "differ in model, method" in changes(elsewhere, result)[0]


def test_figures_are_rounded_down_and_a_dash_where_there_are_none() -> None:
    assert percent(0.6499) == "64%"
    assert (number(0.012345), number(12345.6)) == ("0.0123", "12,346")
    assert times([2.999], [1.0]) == "2.99x"
    assert [spread([], "s"), percent(math.nan), times([], [1.0]), times([1.0], [])] == ["-"] * 4
    assert spread([1.0], "s") == "1.00 s"
    assert exponent([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2.0)
    assert math.isnan(exponent([1, 1], [1.0, 2.0]))


def test_a_process_that_fails_leaves_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*asked: object) -> int:
        raise subprocess.CalledProcessError(-9, "python")

    monkeypatch.setattr(running, "peak_apart", killed)
    told: list[str] = []
    work = lambda: pytest.fail("answered in this process")  # noqa: E731 # never called
    assert running._peak(TINY, Place(64, 16, ragged=False), COLD, work, told.append) is None
    assert "windows, cold was not measured" in told[0]
    assert "SIGKILL" in told[0]


def test_settings_that_differ_are_named(tmp_path: Path) -> None:
    path = tmp_path / "partial.json"
    running.Unfinished.begin(path, {"plan": 1, "code": "a"})
    with pytest.raises(InputError, match=r"other settings: another code\."):
        running.Unfinished.begin(path, {"plan": 1, "code": "b"})
    assert running.Unfinished.begin(path, {"plan": 1, "code": "a"}).goes == 2


@pytest.mark.timing
def test_attention_over_many_windows_is_told_apart_from_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "_PROFILED_TOKENS", 5)
    place = Place(8192, 256, ragged=False)
    step = profile_step(WindowedLM(TINY.build()), place, load(512, place))
    assert step.windows > step.tail > 0
    assert step.linear > 0
    assert step.place == place
