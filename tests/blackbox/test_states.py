"""Models that keep states, as users ask them: answers, caches, citations, refusals."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rag_windows import (
    Generation,
    InputError,
    LimitError,
    MethodError,
    Passage,
    PassageCache,
    WindowedLM,
)
from tests.parity import test_removal
from tests.rag_windows import small, small_states

QUESTION = "When did the mill burn?"
PASSAGES = [
    Passage("The mill burned in 1904.", id="a", score=0.9),
    Passage("A bridge of stone was built in the summer.", id="b", score=0.4),
    Passage("Snow fell on the hill.", title="Weather", id="c", score=0.2),
]
NAMES = small_states.NAMES


def asked(**more: Any) -> dict[str, Any]:
    return {
        "query": QUESTION,
        "passages": PASSAGES,
        "prefix": "Say.",
        "max_new_tokens": 6,
        "do_sample": False,
        **more,
    }


def same(made: Generation, other: Generation) -> bool:
    return made.token_ids == other.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_way_of_asking_gives_one_answer(name: str) -> None:
    lm = small_states.lm(name)
    made = lm.generate(**asked())
    assert lm.method.name == "pced"
    *_, last = lm.stream(**asked())
    assert last.generation is not None
    assert same(last.generation, made)
    assert all(same(one, made) for one in lm.generate_batch([asked(), asked()]))
    with lm.scheduler() as scheduler:
        assert same(scheduler.submit(asked()).result(), made)
    with ThreadPoolExecutor(3) as pool:
        assert all(same(one, made) for one in pool.map(lambda _: lm.generate(**asked()), range(6)))


@pytest.mark.parametrize("name", NAMES)
def test_citations_are_the_tokens_that_a_row_won(name: str) -> None:
    made = small_states.lm(name).generate(**asked())
    masses = [one.mass for one in made.citations or ()]
    tokens = len(made.token_ids)
    assert sum(masses) == pytest.approx(1)
    assert all(abs(mass * tokens - round(mass * tokens)) < 1e-4 for mass in masses)
    assert made.prefix_mass == made.query_mass == 0
    assert made.statements


@pytest.mark.parametrize("method", ["auto", "sequential"])
def test_what_is_read_as_one_text_says_that_no_share_is_known(method: str) -> None:
    lm = small_states.lm()
    made = lm.generate(**asked(method=method))
    assert [one.mass for one in made.citations or ()] == [0, 0, 0]
    assert made.prefix_mass is None
    assert any("not measured" in note.message for note in made.notes)
    plain = lm.generate(**asked(method=method, citations=False))
    assert not any("not measured" in note.message for note in plain.notes)
    assert same(plain, made)


@pytest.mark.parametrize("name", ["qwen3_5_text", "jamba"])
@pytest.mark.parametrize("method", ["pced", "ensemble", "auto"])
def test_removal_is_what_a_new_request_loses(name: str, method: str) -> None:
    lm = small_states.wrapped(name, cache=True)
    passages = test_removal.scored(method)
    made = lm.generate(**test_removal.asked(lm, method, passages))
    test_removal.check(lm, made, passages, method)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["as computed", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_cached_windows_answer_alike(name: str, store: str, tmp_path: Path) -> None:
    exact = small_states.lm(name).generate(**asked())

    def opened() -> PassageCache:
        return PassageCache("1MiB", "10MiB", tmp_path, store=store)

    with opened() as cache:
        lm = small_states.wrapped(name, cache=cache)
        cold = lm.generate(**asked())
        warm = lm.generate(**asked())
        moved = lm.generate(**asked(passages=PASSAGES[::-1]))
    assert same(cold, warm)
    assert (cold.usage.cached_windows, warm.usage.cached_windows) == (0, 3)
    assert {one.id for one in moved.citations or ()} == {"a", "b", "c"}
    assert moved.usage.cached_windows == 3
    if store == "as computed":
        assert same(cold, exact)
        assert warm.usage.cached_tokens == warm.usage.prompt_tokens - len(
            small.request(lm, QUESTION, PASSAGES, prefix="Say.").parts.query_ids
        )
    # A new process would find them on disk.
    with opened() as cache:
        again = small_states.wrapped(name, cache=cache).generate(**asked())
        assert cache.stats().tiers["disk"].hits >= 3
    assert again.usage.cached_windows == 3
    assert same(again, cold)


def test_tenants_and_edits_share_nothing(tmp_path: Path) -> None:
    model = small_states.build()
    with PassageCache("1MiB", "10MiB", tmp_path, salt="one") as cache:
        lm = WindowedLM.from_pretrained(model, tokenizer=small.tokenizer(), cache=cache)
        first = lm.generate(**asked())
        assert lm.tenant("two").generate(**asked()).usage.cached_windows == 0
        assert lm.generate(**asked()).usage.cached_windows == 3
        with torch.no_grad():
            model.get_input_embeddings().weight[100:140] += 0.5
        edited = lm.generate(**asked())
    assert edited.usage.cached_windows == 0
    assert not same(edited, first)


def test_an_accelerators_tier_holds_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassageCache, "accelerator_may_be_cpu", True)
    with PassageCache("1MiB", device_bytes="1MiB") as cache:
        lm = small_states.wrapped(cache=cache)
        made = lm.generate(**asked())
        assert same(lm.generate(**asked()), made)
        stats = cache.stats().tiers["device"]
    assert stats.entries == 4
    assert stats.hits >= 4


def test_a_state_takes_the_same_for_any_length() -> None:
    with PassageCache("10MiB") as cache:
        lm = small_states.wrapped("mamba2", cache=cache)
        taken = []
        for text in ("Short.", "Longer. " * 40):
            before = cache.stats().tiers["memory"].bytes
            lm.warm([text])
            taken.append(cache.stats().tiers["memory"].bytes - before)
    short, long = taken
    # The ids of 320 tokens, and nothing else that grows.
    assert long - short < 40 * 320


def test_neighbours_are_read_with_a_chunk() -> None:
    lm = small_states.lm()
    texts = ("Anna owns the mill.", "She sold it in May.")
    chunks = [Passage(texts[0]), Passage(texts[1], before=texts[:1])]
    made = lm.generate(**asked(passages=chunks, method="neighbours+ensemble", logprobs=True))
    apart = lm.generate(**asked(passages=chunks, method="ensemble", logprobs=True))
    assert made.logprobs is not None
    assert apart.logprobs is not None
    assert made.logprobs[0].logprob != apart.logprobs[0].logprob
    lonely = lm.generate(**asked(passages=chunks[:1], method="neighbours+pced"))
    assert same(lonely, lm.generate(**asked(passages=chunks[:1], method="pced")))


def test_a_long_passage_is_read_in_several_rows() -> None:
    lm = small_states.wrapped(max_window_tokens=20)
    made = lm.generate(**asked())
    assert len(made.windows) > 3
    assert len(made.citations or ()) == 3
    assert sum(one.mass for one in made.citations or ()) == pytest.approx(1)


@pytest.mark.parametrize("more", [{"method": "ape"}, {"link_tokens": 2}, {"method": "neighbours"}])
def test_what_needs_one_attention_is_refused_with_what_to_use(more: dict[str, Any]) -> None:
    lm = small_states.lm()
    with pytest.raises(InputError, match="pced"):
        lm.generate(**asked(**more))
    with pytest.raises(MethodError, match="codebook"):
        lm.codebook()


def test_scores_labels_and_guards() -> None:
    lm = small_states.lm()
    found = lm.score(QUESTION, PASSAGES, [" 1904", " 2004"])
    one = lm.score(QUESTION, PASSAGES, [" 2004"])
    assert found[1].logprob == pytest.approx(one[0].logprob, abs=1e-4)
    examples: Sequence[tuple[str, str]] = [("snow", "winter"), ("sun", "summer")]
    assert lm.classify("cold", examples, ["winter", "summer"]).label in ("winter", "summer")
    made = lm.generate(**asked(fallback="sequential"))
    assert made.fallback is not None
    assert made.fallback.taken


@pytest.mark.slow
def test_a_comparison_asks_what_the_model_can_read() -> None:
    lm = small_states.lm()
    example = {"query": QUESTION, "passages": PASSAGES, "answer": "1904"}
    found = lm.compare([example] * 8, max_new_tokens=2, refine=False)
    names = {one.method.name for one in found.settings}
    assert names == {"sequential", "auto", "pced", "ensemble", "query-likelihood"}
    for named in ({"methods": ["ape"]}, {"grid": "ape"}):
        with pytest.raises(MethodError, match="pced"):
            lm.compare([example] * 8, **named)


def test_a_question_without_passages_is_the_models_own() -> None:
    lm = small_states.lm()
    made = lm.generate(QUESTION, max_new_tokens=6, do_sample=False)
    ids = torch.tensor([small.request(lm, QUESTION).parts.query_ids])
    own = lm.model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert [*made.token_ids] == own.tolist()


def test_memory_is_bounded_by_what_states_take() -> None:
    lm = small_states.lm()
    with pytest.raises(LimitError, match="needs"):
        lm.generate_batch([asked()], max_bytes="40KiB")
    assert len(lm.generate_batch([asked(), asked()], max_bytes="64MiB")) == 2


def test_loading_says_once_how_passages_are_read(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        small_states.wrapped()
    (record,) = [one for one in caplog.records if one.name.startswith("rag_windows")]
    assert "row of its own (method 'pced')" in record.getMessage()
    assert "linear_attention" in record.getMessage()
