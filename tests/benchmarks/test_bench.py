"""The arithmetic of `rag-windows bench`; what it prints and keeps is in tests/blackbox."""

from __future__ import annotations

import dataclasses
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from rag_windows import WindowedLM
from rag_windows.benchmark import result as results
from rag_windows.benchmark import run as running

TINY = results.Plan(shape="tiny", dtype="float32")
PLACE = results.Place(64, 8, ragged=False)


def test_windows_make_up_the_context_and_questions_share_half_of_them() -> None:
    for seed in range(20):
        sizes = running.lengths(results.Place(640, 16, ragged=True), seed)
        assert (sum(sizes), len(sizes)) == (640, 40)
        assert 0 < min(sizes) < max(sizes)
    asked = running.sharing(500, 4, PLACE)
    for one in asked:
        for other in asked:
            common = set(one.windows) & set(other.windows)
            assert len(common) == (8 if one is other else 4)
    assert len({one.windows for one in asked}) == 4
    assert running.load(500, PLACE) == running.load(500, PLACE)


def test_the_shapes_have_the_sizes_of_their_names() -> None:
    for name, size in {"llama-0.25b": 0.25e9, "qwen-0.5b": 0.5e9, "llama-3.1-8b": 8e9}.items():
        model = running.build(results.Plan(shape=name, device="meta"))
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=0.08)


def test_a_roofline_is_what_the_rates_allow() -> None:
    roofline = running.Roofline(results.Rates(1e11, 1e10), 2e9, 4_000_000_000, 1000)
    assert roofline.prefill_s(100) == pytest.approx(2.0)
    assert roofline.decode_s(1_000_000) == pytest.approx(0.5)
    model = running.build(TINY)
    measured = running.measure_roofline(model)
    assert measured.flops == 2 * 2 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 384)
    assert measured.token == 2 * 2 * 2 * 32 * 4
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert measured.weights == whole - 512 * 128 * 4  # one row of the embedding table is read


@pytest.mark.parametrize("method", ["ape", "ensemble"])
def test_a_method_is_timed_at_the_tokens_that_it_generates(method: str) -> None:
    lm = WindowedLM(running.build(TINY), method=method)
    asked = running.load(512, PLACE)
    context = lm.encode_ids(asked.prefix, asked.windows)
    decoder = running.GreedyDecoder(lm, context, asked.query)
    made = []
    for take in (decoder.first, decoder.step, decoder.step, decoder.first):
        assert take() > 0
        made.append(int(decoder._ids[0, -1]))
    wanted = lm.generate_ids(context, asked.query, max_new_tokens=3, min_new_tokens=3)
    assert made == [*wanted, wanted[0]]


def test_every_way_is_timed_in_every_round_but_for_what_is_slow() -> None:
    plan = results.Plan(
        shape="tiny",
        dtype="float32",
        context=[64, 128],
        window=[32],
        new_tokens=[2, 4],
        rounds=2,
        against=["pcw"],
        questions=[3],
        dear_above=64,
        dear_tokens=3,
        memory=False,
    )
    found = running.run(plan, "rag-windows bench --shape tiny")
    for number, part in enumerate(found.parts[:2]):
        assert [cell.way for cell in part.cells] == [*results.WAYS]
        for cell in part.cells:
            slow = number == 1 and cell.way.startswith("transformers")
            assert (cell.tokens, set(cell.end_s)) == ((3, {"2"}) if slow else (4, {"2", "4"}))
            taken = (cell.prefill_s, cell.first_s, cell.tokens_per_s, *cell.end_s.values())
            assert all(len(one) == (1 if slow else 2) and min(one) > 0 for one in taken)
        whole, kept, cold, *warm = [cell.prefill_floor_s for cell in part.cells]
        assert whole is not None
        tokens = (64, 128)[number]
        assert kept == cold == pytest.approx(whole * (tokens + 32) / (tokens + 64))
        assert warm == [None, None]
        assert [len(one.token_s) for one in part.readings] == [2, 2]
    assert [len(one.seconds) for one in found.parts[2].crowds] == [2, 2]
    adapter = TypeAdapter(results.Result)
    assert adapter.validate_json(adapter.dump_json(found), strict=True) == found
    assert results.changes(found, found) == "Nothing moved beyond the spread of the rounds."
    alone, together = found.parts[2].crowds
    later = [2 * max(together.seconds) + one for one in together.seconds]
    crowds = [alone, dataclasses.replace(together, seconds=later)]
    moved = dataclasses.replace(found, parts=[*found.parts[:2], results.Part(crowds=crowds)])
    *_, line = results.changes(found, moved).splitlines()
    assert line.startswith("| 3 questions, 64 tokens each | together | seconds |")
    elsewhere = dataclasses.replace(found, dtype="bfloat16")
    assert "differ in model, method" in results.changes(elsewhere, found)


def test_figures_are_rounded_down_and_a_dash_where_there_are_none() -> None:
    assert results.percent(0.6499) == "64%"
    assert (results.number(0.012345), results.number(12345.6)) == ("0.0123", "12,346")
    assert results.times([2.999], [1.0]) == "2.99x"
    assert [results.spread([], "s"), results.times([], [1.0]), results.times([1.0], [])] == [
        "-"
    ] * 3
    assert results.spread([1.0], "s") == "1.00 s"
    assert results.exponent([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2.0)


def test_a_process_that_fails_leaves_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*asked: object) -> int:
        raise BrokenProcessPool("it was killed")

    monkeypatch.setattr(running, "peak_apart", killed)
    told: list[str] = []
    assert running._peak(TINY, PLACE, results.COLD, dict, told.append) is None
    assert told == ["Peak memory of windows, cold was not measured: it was killed"]


def test_published_results_can_be_compared() -> None:
    docs = Path(__file__).parents[2] / "docs" / "performance"
    for path in sorted(docs.glob("*.json")):
        found = TypeAdapter(results.Result).validate_json(path.read_bytes(), strict=True)
        assert "### 8,192 tokens" in results.markdown(found) or "contexts" in path.name
