"""The benchmark's arithmetic, and one run of its smallest shape."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rag_windows import WindowedLM
from rag_windows.benchmark.change import changes
from rag_windows.benchmark.clock import Timing
from rag_windows.benchmark.floor import Floor, measure_floor
from rag_windows.benchmark.load import lengths, load, sharing
from rag_windows.benchmark.plan import COLD, MEMORY, PREFIX_KEPT, SEQUENTIAL, WAYS
from rag_windows.benchmark.reading import Reader
from rag_windows.benchmark.result import Part, Result, exponent, median
from rag_windows.benchmark.shape import SHAPES, linears, shape_named, token_bytes, weight_bytes
from rag_windows.benchmark.table import markdown
from rag_windows.benchmark.words import number, percent, spread, times
from rag_windows.errors import DataError, InputError


@given(st.integers(2, 40), st.integers(1, 30), st.booleans(), st.integers(0, 99))
def test_windows_make_up_the_context(window: int, count: int, ragged: bool, seed: int) -> None:
    sizes = lengths(window * count, window, ragged=ragged, seed=seed)
    assert sum(sizes) == window * count
    assert len(sizes) == count
    assert min(sizes) > 0
    assert ragged or set(sizes) == {window}


@pytest.mark.parametrize(("context", "window"), [(100, 33), (10, 20), (10, 1)])
def test_windows_that_do_not_divide_the_context_are_refused(context: int, window: int) -> None:
    with pytest.raises(InputError, match="take multiples"):
        lengths(context, window, ragged=False, seed=0)


def test_questions_share_half_of_their_windows() -> None:
    asked = sharing(500, 4, 64, 8)
    for one in asked:
        for other in asked:
            common = set(one.windows) & set(other.windows)
            assert len(common) == (8 if one is other else 4)
    assert len({one.windows for one in asked}) == 4
    assert load(500, 64, 8) == load(500, 64, 8)


def test_sizes_of_a_shape_are_those_of_its_model() -> None:
    model = shape_named("tiny").build("cpu", torch.float32)
    head = 128 * 512
    assert sum(i * o for i, o in linears(model)) == 2 * (
        128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 384
    )
    assert token_bytes(model) == 2 * 2 * 2 * 32 * 4
    assert weight_bytes(model) > 4 * (2 * head)
    with pytest.raises(InputError, match="choose among"):
        shape_named("huge")


def test_the_shapes_have_the_sizes_of_their_names() -> None:
    for name, low, high in (
        ("llama-0.25b", 0.22e9, 0.27e9),
        ("qwen-0.5b", 0.48e9, 0.51e9),
        ("llama-3.1-8b", 7.9e9, 8.1e9),
    ):
        model = SHAPES[name].build("meta", torch.bfloat16)
        assert low < sum(p.numel() for p in model.parameters()) < high


def test_a_floor_is_what_the_rates_allow() -> None:
    floor = Floor(2e9, 1e11, 0.02, 1e10, 4_000_000_000, 1000)
    assert floor.prefill_s(100) == pytest.approx(2.0)
    assert floor.decode_s(1_000_000) == pytest.approx(0.5)
    measured = measure_floor(shape_named("tiny").build("cpu", torch.float32))
    assert measured.flops == 2 * 2 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 384)
    assert measured.seconds_per_token == pytest.approx(measured.flops / measured.flops_per_s)


def test_a_timing_tells_first_rate_and_end() -> None:
    timing = Timing(None, (1.0, 1.5, 2.0))
    assert (timing.first_s, timing.tokens_per_s, timing.end_s(2)) == (1.0, 2.0, 1.5)
    assert math.isnan(timing.end_s(4))


def test_growth_is_the_exponent() -> None:
    assert exponent([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2.0)
    assert math.isnan(exponent([1, 1], [1.0, 2.0]))


def test_every_way_is_timed_in_every_round_but_for_what_is_dear(result: Result) -> None:
    assert [cell.way for cell in result.cells] == [*WAYS] * 4
    for cell in result.cells:
        dear = cell.context > 128 and cell.way in (SEQUENTIAL, PREFIX_KEPT)
        ends = {"2": 2} if dear else {"2": 2, "4": 4}
        assert cell.tokens == (3 if dear else 4)
        assert set(cell.end_s) == set(ends)
        for seconds in (cell.prefill_s, cell.first_s, cell.tokens_per_s, *cell.end_s.values()):
            assert len(seconds) == (1 if dear else 2)
            assert min(seconds) > 0
        last = [median(cell.end_s[name]) for name in ends]
        assert [median(cell.first_s), *last] == sorted([median(cell.first_s), *last])


def test_a_floor_counts_the_tokens_that_a_way_computes(result: Result) -> None:
    each = {
        cell.way: cell.prefill_floor_s
        for cell in result.cells
        if cell.place == result.cells[0].place
    }
    whole, cold, kept = each[SEQUENTIAL], each[COLD], each[PREFIX_KEPT]
    assert whole is not None
    assert cold == kept == pytest.approx(whole * 160 / 192)
    assert each[MEMORY] is None


def test_methods_are_read_over_the_same_windows(result: Result) -> None:
    assert len(result.readings) == 4 * 3
    for one in result.readings:
        assert one.tokens == 2
        assert len(one.first_s) == len(one.token_s) == 2
        assert min(one.first_s + one.token_s) > 0


@pytest.mark.parametrize("method", ["ape", "mateicl", "ensemble"])
def test_a_method_is_timed_at_the_tokens_that_it_generates(method: str) -> None:
    lm = WindowedLM(shape_named("tiny").build("cpu", torch.float32), method=method)
    asked = load(512, 64, 16)
    context = lm.encode_ids(asked.prefix, asked.windows)
    reader = Reader(lm, context, asked)
    made = []
    for take in (reader.ask, reader.step, reader.step, reader.ask):
        assert take() > 0
        made.append(reader.token)
    wanted = lm.generate_ids(context, asked.query, max_new_tokens=3, min_new_tokens=3)
    assert made == [*wanted, wanted[0]]


def test_questions_are_asked_one_by_one_and_together(result: Result) -> None:
    assert [(one.questions, one.way) for one in result.crowds] == [
        (3, "one by one"),
        (3, "together"),
    ]
    assert all(len(one.seconds) == 2 and min(one.seconds) > 0 for one in result.crowds)
    assert "### Many questions that share half" in markdown(result)


def test_the_table_shows_every_way_and_survives_json(result: Result, tmp_path: Path) -> None:
    text = markdown(result)
    for words in ("### 128 tokens, windows of 32", "ragged windows, about 32", "### Growth", *WAYS):
        assert words in text
    assert "read by ape (temperature 0.9, scale 0.9, form as used)" in text
    assert "transformers: 1 of 2 rounds, 3 of 4 new tokens." in text
    assert "| method | first token | a further token | more than pcw |" in text
    assert "| 2 (128 to 256) |" in text
    path = tmp_path / "new" / "performance.json"
    result.save(path)
    assert Result.load(path) == result
    assert markdown(Result.load(path)) == text


@pytest.mark.parametrize("content", ["", "[]", '{"format": 1}', '{"format": 2}'])
def test_another_file_is_no_result(content: str, tmp_path: Path) -> None:
    path = tmp_path / "performance.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"performance\.json is no result"):
        Result.load(path)


def _slower(part: Part) -> Part:
    alone, together = part.crowds
    later = [2 * max(together.seconds) + one for one in together.seconds]
    return Part(crowds=[alone, dataclasses.replace(together, seconds=later)])


def test_what_moved_is_told_and_what_did_not_is_not(result: Result) -> None:
    assert changes(result, result) == ["Nothing moved beyond the spread of the rounds."]
    part, *rest = result.parts
    cells = [
        dataclasses.replace(cell, first_s=[2 * max(cell.first_s) + one for one in cell.first_s])
        if cell.way == "windows, cold"
        else cell
        for cell in part.cells
    ]
    slower = dataclasses.replace(
        result, parts=[dataclasses.replace(part, cells=cells), *rest[:-1], _slower(rest[-1])]
    )
    rows = changes(result, slower)[2:]
    assert len(rows) == 2
    assert "| 128 tokens, windows of 32 | windows, cold | first token |" in rows[0]
    assert "| 3 questions, 128 tokens each | together | seconds |" in rows[1]
    elsewhere = dataclasses.replace(result, dtype="bfloat16")
    assert "differ in model, method" in changes(elsewhere, result)[0]


def test_figures_are_rounded_down() -> None:
    assert percent(0.6499) == "64%"
    assert (number(0.012345), number(12345.6)) == ("0.0123", "12,346")
    assert times([2.999], [1.0]) == "2.99x"


def test_what_was_not_measured_is_a_dash() -> None:
    assert [spread([], "s"), percent(math.nan), times([], [1.0]), times([1.0], [])] == ["-"] * 4
    assert spread([1.0], "s") == "1.00 s"


def test_the_result_is_plain_json(result: Result, tmp_path: Path) -> None:
    result.save(tmp_path / "one.json")
    values = json.loads((tmp_path / "one.json").read_text(encoding="utf-8"))
    assert values["format"] == 2
    versions = values["machine"]["versions"]
    assert set(versions) == {"python", "torch", "transformers", "rag-windows", "C kernel"}
    assert values["method"] == {"name": "ape", "temperature": 0.9, "scale": 0.9, "form": "as used"}
