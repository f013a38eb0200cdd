"""The engine with a cache: the same answers as without, whatever was asked before."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_windows import (
    APE,
    PCW,
    Aligned,
    Generation,
    PassageCache,
    Sequential,
    StructuredPrompting,
    WindowedLM,
)
from tests.parity import zoo
from tests.rag_windows import small

TOLERANCE = 1e-5
ARCHITECTURES = ("llama", "gemma3_text-sliding", "gemma4_text", "gpt2", "gpt_oss")
METHODS = (APE(), PCW(), APE(0.7, 0.8), Aligned(16), StructuredPrompting(), Sequential())
PASSAGES = [f"Fact {number}: word {number * 7}. " + "more " * number for number in range(6)]


def cached(cache_: PassageCache | None = None, **options: Any) -> WindowedLM:
    cache_ = PassageCache("50MB") if cache_ is None else cache_
    return WindowedLM(small.model(), small.tokenizer(), cache=cache_, **options)


@cache
def pair(name: str) -> tuple[WindowedLM, WindowedLM]:
    """A model without a cache, and one whose small cache lives as long as the tests."""
    model = zoo.shared(name)
    return WindowedLM(model), WindowedLM(model, cache=PassageCache("300kB"))


@pytest.mark.parametrize("name", ARCHITECTURES)
@settings(max_examples=8)
@given(data=st.data())
def test_any_combination_in_any_order_is_as_without_a_cache(name: str, data: Any) -> None:
    plain, lm = pair(name)
    chosen = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=5), label="passages")
    prefix = zoo.ids(data.draw(st.sampled_from([0, 3, 12]), label="prefix"), 100)
    method = data.draw(st.sampled_from(METHODS), label="method")
    windows = [zoo.ids(5 + number, number) for number in chosen]
    query = zoo.ids(4, 200)
    expected, context = (one.encode_ids(prefix, windows, method=method) for one in (plain, lm))
    torch.testing.assert_close(
        lm.logits(context, query), plain.logits(expected, query), rtol=0, atol=TOLERANCE
    )
    again = lm.encode_ids(prefix, windows, method=method)
    if method.windowed:
        assert again.cached_tokens == len(prefix) + sum(map(len, windows))
        assert torch.equal(lm.logits(again, query), lm.logits(context, query))


def test_the_second_question_computes_only_itself_and_what_is_new() -> None:
    lm = cached()
    assert lm.generate("What?", PASSAGES, max_new_tokens=2).usage.cached_tokens == 0
    second = lm.generate("And who was it?", PASSAGES[::-1], max_new_tokens=2)
    prefix = second.usage.cached_tokens - sum(len(window.ids) for window in second.windows)
    assert prefix > 0
    third = lm.generate("What?", [*PASSAGES[:2], "Something new."], max_new_tokens=2)
    known = sum(len(window.ids) for window in third.windows if window.passage < 2)
    assert third.usage.cached_tokens == prefix + known
    assert (
        lm.with_cache(None).generate("What?", PASSAGES, max_new_tokens=2).usage.cached_tokens == 0
    )


def same(one: Generation, other: Generation) -> None:
    assert one.token_ids == other.token_ids
    assert one.text == other.text
    assert [c.passage for c in one.citations or ()] == [c.passage for c in other.citations or ()]
    masses = [[c.mass for c in g.citations or ()] for g in (one, other)]
    assert masses[0] == pytest.approx(masses[1], abs=1e-4)


def test_one_after_the_other_only_the_prefix_is_kept() -> None:
    lm = cached(method="sequential")
    lm.generate("What?", PASSAGES, prefix="Be brief.", max_new_tokens=2)
    again = lm.generate("What?", PASSAGES, prefix="Be brief.", max_new_tokens=2)
    assert lm.cache is not None
    assert lm.cache.stats().tiers["memory"].entries == 1
    assert 0 < again.usage.cached_tokens < len("Be brief.") + 20


def test_sixteen_threads_answer_as_alone_and_encode_each_passage_once() -> None:
    lm = cached()
    lone = small.lm()
    expected = {n: lone.generate("What?", PASSAGES[:n], max_new_tokens=3) for n in range(1, 7)}
    start = threading.Barrier(16)

    def ask(number: int) -> None:
        count = 1 + number % 6
        start.wait()
        same(lm.generate("What?", PASSAGES[:count], max_new_tokens=3), expected[count])

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(16)))
    assert lm.cache is not None
    stats = lm.cache.stats()
    assert stats.misses == len(PASSAGES) + 1
    assert stats.hits == sum(2 + number % 6 for number in range(16)) - stats.misses


def test_a_failing_leader_neither_hangs_nor_poisons_those_who_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = cached()
    encoder = lm.engine.plain_encoder
    original = encoder.encode_pass
    inside, follow = threading.Event(), threading.Event()
    failed = threading.Lock()

    def failing(prefix: Any, *args: Any) -> Any:
        if prefix is not None and failed.acquire(blocking=False):
            inside.set()
            follow.wait(30)
            raise KeyboardInterrupt
        return original(prefix, *args)

    monkeypatch.setattr(encoder, "encode_pass", failing)
    with ThreadPoolExecutor(4) as pool:
        leader = pool.submit(lm.generate, "What?", PASSAGES, max_new_tokens=2)
        assert inside.wait(30)
        followers = [pool.submit(lm.generate, "What?", PASSAGES, max_new_tokens=2) for _ in "abc"]
        follow.set()
        with pytest.raises(KeyboardInterrupt):
            leader.result(60)
        expected = small.lm().generate("What?", PASSAGES, max_new_tokens=2)
        for follower in followers:
            same(follower.result(60), expected)
    assert lm.cache is not None
    # The prefix by the leader, the passages by one of the followers.
    assert lm.cache.stats().misses == len(PASSAGES)


def test_who_waits_too_long_encodes_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rag_windows.windows.FOLLOW_S", 0.05)
    stuck, lm = (cached(PassageCache("50MB", path=tmp_path / "w")) for _ in "ab")
    inside, follow = threading.Event(), threading.Event()

    def held(*progress: int) -> None:
        inside.set()
        follow.wait(30)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(stuck.generate, "What?", PASSAGES, max_new_tokens=2, on_encoded=held)
        assert inside.wait(30)
        expected = small.lm().generate("What?", PASSAGES, max_new_tokens=2)
        for other in (lm, stuck):  # another process, as it were, and another thread
            same(other.generate("What?", PASSAGES, max_new_tokens=2), expected)
        follow.set()
        same(first.result(60), expected)


def test_a_cancelled_request_leaves_nothing_half_done() -> None:
    lm = cached(max_batch_tokens=16)

    def stop(done: int, total: int) -> None:
        if done >= 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        lm.generate("What?", PASSAGES, on_encoded=stop)
    expected = small.lm().generate("What?", PASSAGES, max_new_tokens=2)
    same(lm.generate("What?", PASSAGES, max_new_tokens=2), expected)


def test_progress_counts_what_was_found() -> None:
    lm = cached()
    lm.generate("What?", PASSAGES[:4], max_new_tokens=1)
    told: list[tuple[int, int]] = []
    lm.generate("What?", PASSAGES, max_new_tokens=1, on_encoded=lambda *n: told.append(n))
    assert (told[0], told[-1]) == ((4, 6), (6, 6))
    told.clear()
    lm.generate("What?", PASSAGES, max_new_tokens=1, on_encoded=lambda *n: told.append(n))
    assert told == [(6, 6)]
    told.clear()
    small.lm().generate(
        "What?", PASSAGES, method="sequential", on_encoded=lambda *n: told.append(n)
    )
    assert told == [(1, 1)], "one after the other they are one"


def test_two_processes_share_a_folder_and_neither_waits_for_what_the_other_waits_for(
    tmp_path: Path,
) -> None:
    """Two objects on one folder see each other through files and locks alone, as processes do."""
    caches = [PassageCache("50MB", path=tmp_path / "w") for _ in "ab"]
    orders = PASSAGES, PASSAGES[::-1]
    with ThreadPoolExecutor(2) as pool:
        asked = [
            pool.submit(cached(one).generate, "What?", order, max_new_tokens=2)
            for one, order in zip(caches, orders, strict=True)
        ]
        for job, order in zip(asked, orders, strict=True):
            same(job.result(60), small.lm().generate("What?", order, max_new_tokens=2))
    assert sum(one.stats().misses for one in caches) == len(PASSAGES) + 1


@pytest.mark.parametrize("how", ["forgotten", "other weights"])
def test_what_was_forgotten_or_edited_while_it_was_encoded_is_not_kept(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(small.model())
    lm = WindowedLM(model, small.tokenizer(), cache=PassageCache("50MB"))
    assert lm.cache is not None
    encoder, forget = lm.engine.plain_encoder, lm.cache.invalidate
    original = encoder.encode_pass

    def disturbed(*args: Any) -> Any:
        made = original(*args)
        if how == "forgotten":
            forget("one")
        else:
            model.lm_head.weight.data.mul_(2)
        return made

    monkeypatch.setattr(encoder, "encode_pass", disturbed)
    lm.generate("What?", PASSAGES, max_new_tokens=1)
    assert lm.cache.stats().tiers["memory"].entries == 0
