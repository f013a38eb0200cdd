"""What questions need of memory, told before they are answered, is at least what they then take."""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from concurrent.futures import wait
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rag_windows import InputError, LimitError, PassageCache, WindowedLM
from rag_windows.batching.batch import Batch
from rag_windows.batching.budget import Budget, Sizes
from rag_windows.batching.questions import Question
from tests.parity import zoo
from tests.rag_windows import small
from tests.rag_windows.batching.test_scheduler import (
    ASK,
    PASSAGES,
    WAIT,
    alone,
    assert_same,
    gated,
    lm_of,
    mixed,
)

LONG = [f"{number} " + "word " * 60 for number in range(12)]
SHORT = [one[:80] for one in LONG]


@pytest.mark.parametrize("name", zoo.BY_NAME)
def test_a_token_takes_what_the_configuration_says(name: str) -> None:
    engine = WindowedLM(zoo.build(zoo.BY_NAME[name])).engine
    window = engine.plain_encoder.run([[1, 2, 3]], [0], None)[0]
    taken = sum(tensor.nbytes for tensor in (*window.keys, *window.values))
    sizes = Sizes(engine)
    assert 3 * sizes.token == taken
    assert sizes.by_device == {torch.device("cpu"): sizes.token}


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors that are made, as long as they live."""

    def __init__(self, lm: WindowedLM) -> None:
        super().__init__()
        model = lm.engine.model
        self._known = {
            one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())
        }
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = 0

    def live(self) -> int:
        """Bytes of those that are there now."""
        self._live = {at: one for at, one in self._live.items() if not one[0].expired()}
        return sum(size for _, size in self._live.values())

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.live()
        made = call(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                at = storage.data_ptr()
                if at and at not in self._known and at not in self._live:
                    self._live[at] = StorageWeakRef(storage), storage.nbytes()
        self.bytes = max(self.bytes, self.live())
        return made


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The most bytes that were taken of any budget."""
    found, take = [0], Budget.take

    def taken(self: Budget, *given: Any, **options: Any) -> bool:
        done = take(self, *given, **options)
        found[0] = max(found[0], self.taken)
        return done

    monkeypatch.setattr(Budget, "take", taken)
    return found


KINDS: dict[str, list[dict[str, Any]]] = {
    "mixed": mixed(7),
    "passages": [{**ASK, "passages": LONG, "query": f"Why {n}?"} for n in range(3)],
    "tokens": [
        {**ASK, "max_new_tokens": 150, "min_new_tokens": 150, "query": "?" * n} for n in (1, 9)
    ],
    "no passages": [{**ASK, "passages": (), "query": "abc " * 150} for _ in range(4)],
    "refined": [{**ASK, "method": "deep-thinking"} for _ in range(2)],
    "linked": [{**ASK, "link_tokens": 4, "link_choose": "deviation", "passages": LONG[:3]}],
    "linked by the query": [
        {**ASK, "link_tokens": 4, "link_choose": "query", "passages": LONG[:3]}
    ],
    "in order": [{**ASK, "method": "sequential", "passages": LONG[:3]}],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("small", kind) for kind in KINDS), ("gemma3_text-sliding", "mixed"), ("gpt_oss", "mixed")],
)
def test_nothing_takes_more_than_it_was_given(most: list[int], name: str, kind: str) -> None:
    lm = small.lm() if name == "small" else lm_of(name)
    for rows in (2, 32) if kind == "mixed" else (32,):
        lm.generate_batch([ASK])
        most[0] = 0
        with Peak(lm) as peak:
            lm.generate_batch(KINDS[kind], max_rows=rows)
        assert 0 < peak.bytes <= most[0] <= 8 * peak.bytes


@pytest.mark.slow
def test_what_nobody_reads_any_more_is_let_go() -> None:
    """While another question is still being answered."""
    lm, seen = small.lm(), []

    def noted(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(peak.live())
        return scores

    long = {**ASK, "passages": (), "max_new_tokens": 40, "min_new_tokens": 40}
    asked = [{**ASK, "passages": LONG, "query": f"Why {n}?"} for n in range(3)]
    with Peak(lm) as peak:
        made = lm.generate_batch([{**long, "logits_processor": [noted]}, *asked])
    windows = sum(len(one.ids) for one in made[1].windows) * Sizes(lm.engine).token
    # All three read the same windows, which are there once.
    assert windows < max(seen) < 2 * windows
    assert seen[-1] < windows / 2


def free(lm: WindowedLM, **asked: Any) -> int:
    """Bytes that a question needs with nobody beside it."""
    budget = Budget(lm.engine, 1 << 40)
    budget.begin()
    question = Question(lm.engine, {**ASK, **asked})
    question.reserve(budget)
    return question.bytes


@pytest.mark.parametrize(
    "kind", [{}, {"num_beams": 3}, {"method": "ensemble"}, {"fallback": "sequential"}]
)
def test_a_question_that_can_t_fit_is_refused_before_any_work(kind: dict[str, Any]) -> None:
    lm = small.wrapped()
    needed = free(lm, **kind)
    asked = {**ASK, **kind}
    assert lm.generate_batch([asked], max_bytes=needed)[0].text == lm.generate(**asked).text
    scheduler = lm.scheduler(max_bytes=needed - 1)
    calls = (
        lambda: lm.generate_batch([{**ASK, "passages": ()}, asked], max_bytes=needed - 1),
        lambda: scheduler.submit(asked),
        lambda: scheduler.answer(asked),
        lambda: lm.shared_scheduler(max_bytes=f"{needed - 1}").submit(asked),
    )
    with small.passes() as made:
        for call in calls:
            with pytest.raises(LimitError, match=r"needs [\d.]+ KiB of memory.*fewer new tokens"):
                call()
    assert not made
    assert scheduler.answer({**ASK, "passages": (), "max_new_tokens": 1}).text is not None


@pytest.mark.parametrize("size", [0, -1, "lots", "1 parsec", "200%", True, 1.5])
def test_what_is_no_size_is_refused(size: Any) -> None:
    lm = small.lm()
    for call in (lm.generate_batch, lambda _, **given: lm.scheduler(**given)):
        with pytest.raises(InputError, match="max_bytes"):
            call([], max_bytes=size)


def test_windows_that_others_read_or_the_cache_holds_take_nothing_more() -> None:
    """With room for little more than one question's passages, both are answered at a time."""
    lm = small.wrapped()
    asked = [{**ASK, "passages": LONG, "query": f"Why {n}?"} for n in range(4)]
    expected = alone(lm, asked)
    needed = free(lm, passages=LONG)
    assert_same(lm.generate_batch(asked, max_bytes=2 * needed), expected)
    cached = lm.with_cache(PassageCache("64MiB"))
    cached.warm(LONG)
    little = free(lm, passages=()) * 3
    assert little < needed
    with pytest.raises(LimitError):
        lm.generate_batch(asked[:1], max_bytes=little)
    assert_same(cached.generate_batch(asked[:1], max_bytes=little), expected[:1])
    assert cached.cache is not None
    cached.cache.clear()
    with pytest.raises(LimitError):
        cached.generate_batch(asked[:1], max_bytes=little)


def test_only_what_stands_where_it_is_read_is_free() -> None:
    cache = PassageCache("1MiB")
    lm = small.wrapped(cache=cache)
    lm.warm(PASSAGES[:2])
    question = Question(lm.engine, {**ASK, "passages": PASSAGES[:3]})
    assert len(question.request.parts.windows) == 3
    names = [one.name for one in question.reads if one.name is not None]
    here = torch.device("cpu")
    assert cache.held(names, here) == {*names[:3]}, "the prefix and two passages"
    # On an accelerator what stands in host memory has to be copied.
    assert cache.held(names, torch.device("cuda")) == set()
    coded = PassageCache("1MiB", store="int8")
    small.wrapped(cache=coded).warm(PASSAGES[:2])
    assert coded.stats().tiers["memory"].entries == 3
    again = Question(lm.with_cache(coded).engine, ASK).reads
    coded_names = [one.name for one in again if one.name and one.name in coded]
    assert len(coded_names) == 3
    assert coded.held(coded_names, here) == {*coded_names}, "they are read as they are stored"
    assert coded.held(coded_names, torch.device("cuda")) == set()


def test_an_accelerator_s_tier_takes_its_memory_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassageCache, "accelerator_may_be_cpu", True)
    cache = PassageCache(None, device_bytes="1MiB")
    lm = small.wrapped(cache=cache)
    tiers: list[int] = []

    def looked_up(self: Budget) -> None:
        tiers.append(len(cache.stats().tiers))

    monkeypatch.setattr(Budget, "_free", looked_up)
    assert lm.generate_batch([ASK])[0].text == lm.generate(**ASK).text
    assert tiers == [1]
    names = [one.name for one in Question(lm.engine, ASK).reads if one.name]
    assert cache.held(names, torch.device("cpu")) == {*names}


def test_free_memory_of_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's keys go to its device; what PyTorch holds unused is free, too."""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda one: ({first: 600, second: 900}[one], 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda one: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda one: 100)
    budget = Budget(small.lm().engine, None)
    budget.begin()
    budget.sizes.by_device, budget.sizes.token = {first: 30, second: 10}, 40
    assert budget._free() == 800 * 40 // 30
    budget.sizes.by_device[torch.device("mps")] = 1
    assert budget._free() is None


def test_where_nobody_knows_what_is_free_there_is_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "_free", lambda self: None)
    lm = small.lm()
    assert lm.generate_batch([ASK])[0].text == lm.generate(**ASK).text
    with pytest.raises(LimitError):
        lm.generate_batch([ASK], max_bytes=1000)
    with pytest.raises(InputError, match="max_bytes"):
        lm.generate_batch([ASK], max_bytes="50%")


def test_by_default_three_quarters_of_what_is_free_can_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = small.lm()
    needed = free(lm)
    monkeypatch.setattr("rag_windows.batching.budget.free_memory", lambda: -(-needed * 4 // 3))
    assert lm.generate_batch([ASK])
    monkeypatch.setattr("rag_windows.batching.budget.free_memory", lambda: needed)
    with pytest.raises(LimitError, match="75% of what was free"):
        lm.generate_batch([ASK])
    assert lm.generate_batch([ASK], max_bytes="100%")


@pytest.mark.slow
def test_nobody_overtakes_a_large_question() -> None:
    lm = small.wrapped()
    order: list[str] = []

    def ask(name: str, **asked: Any) -> Any:
        options = {**ASK, **asked, "on_encoded": lambda *_: order.append(name)}
        return scheduler.submit(options)

    long = {"max_new_tokens": 200, "min_new_tokens": 200}
    needed = max(free(lm, passages=LONG), free(lm, **long))
    with lm.scheduler(max_bytes=needed) as scheduler:
        running = ask("running", **long)
        large = ask("large", passages=LONG)
        while large not in scheduler._waiting_for_memory:
            assert not running.done()
        lines = [ask(f"small {n}", **kind) for n, kind in enumerate(({}, {"num_beams": 2}))]
        gone = ask("gone", passages=LONG)
        assert gone.cancel()
        texts = [one.result(WAIT).text for one in (running, large, *lines)]
    # Who is encoded is told so.
    assert list(dict.fromkeys(order))[:2] == ["running", "large"]
    assert "gone" not in order
    assert texts[:2] == [lm.generate(**{**ASK, **one}).text for one in (long, {"passages": LONG})]


def test_what_goes_wrong_while_memory_is_asked_for_ends_one_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = small.wrapped()
    text = lm.generate(**ASK).text
    missing = Budget.missing

    def fails(self: Budget, cache: Any, reads: Any) -> Any:
        if reads:
            raise ZeroDivisionError("on purpose")
        return missing(self, cache, reads)

    monkeypatch.setattr(Budget, "missing", fails)
    with lm.scheduler(max_bytes=free(lm)) as scheduler:
        running, gate = gated(scheduler)
        short = [scheduler.submit(ASK) for _ in range(2)]
        gate.open.set()
        assert [type(one.exception(WAIT)) for one in short] == [ZeroDivisionError] * 2
        assert running.result(WAIT).text == scheduler.submit(ASK).result(WAIT).text == text


def test_who_waits_for_memory_can_be_cancelled_at_once() -> None:
    lm = small.wrapped()
    scheduler = lm.scheduler(max_bytes=free(lm))
    running, gate = gated(scheduler)
    others = [scheduler.submit({**ASK, **kind}) for kind in ({"num_beams": 2}, {}, {})]
    assert all(one.cancel() for one in others[:2])
    gate.open.set()
    assert others[2].result(WAIT).text == running.result(WAIT).text
    # One takes all that there is, so nothing is left of those before.
    assert scheduler.submit(ASK).result(WAIT).text == running.result().text
    scheduler.close()


@pytest.mark.parametrize("kind", [{}, {"method": "ensemble"}])
def test_a_callback_may_ask_though_its_question_has_all_the_memory(kind: dict[str, Any]) -> None:
    lm = small.wrapped()
    inner: list[str] = []
    scheduler = lm.scheduler(max_bytes=max(free(lm, **kind), free(lm)))

    def told(done: int, total: int) -> None:
        if not inner:
            inner.append(scheduler.answer(ASK).text)

    with scheduler:
        first = scheduler.submit({**ASK, **kind, "on_encoded": told})
        others = [scheduler.submit(ASK) for _ in range(2)]
        assert first.result(WAIT).text == lm.generate(**ASK, **kind).text
        assert {one.result(WAIT).text for one in others} == {*inner} == {lm.generate(**ASK).text}


def test_memory_is_looked_up_when_nobody_is_being_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = small.wrapped()
    seen: list[int] = []

    def looked_up(self: Budget) -> int:
        seen.append(self.taken)
        return 1 << 30

    monkeypatch.setattr(Budget, "_free", looked_up)
    with lm.scheduler() as scheduler:
        assert not seen, "a child of a process that uses CUDA can't ask"
        running, gate = gated(scheduler)
        more = [scheduler.submit(ASK) for _ in range(3)]
        assert seen == [0]
        gate.open.set()
        for one in (running, *more):
            one.result(WAIT)
        scheduler.answer(ASK)
    assert set(seen) == {0}
    assert len(seen) == 2


@cache
def expected_of(first: int, count: int, kind: int, tokens: int) -> tuple[dict[str, Any], str]:
    """A question about some of the passages, and its answer."""
    more: dict[str, Any] = ({}, {}, {"num_beams": 2}, {"method": "sequential"})[kind]
    asked = {**ASK, **more, "passages": SHORT[first : first + count], "max_new_tokens": tokens}
    return asked, small.lm().generate(**asked).text


ARRIVALS = st.tuples(
    st.tuples(st.integers(0, 4), st.integers(0, 8), st.integers(0, 3), st.sampled_from([1, 5, 50])),
    st.sampled_from([0.0, 0.0, 0.002, 0.02]),
)


@pytest.mark.slow
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=10),
    share=st.floats(0.2, 3),
    rows=st.sampled_from([1, 3, 32]),
    cached=st.booleans(),
)
def test_whoever_comes_nobody_takes_what_is_not_there(
    arrivals: list[tuple[tuple[int, int, int, int], float]], share: float, rows: int, cached: bool
) -> None:
    """In order, whatever they need, and with the answers that they get alone."""
    lm = small.lm().with_cache(PassageCache("64MiB") if cached else None)
    asked = [expected_of(*one) for one, _ in arrivals]
    limit = int(share * max(free(lm, **one) for one, _ in asked))
    takes: list[int] = []
    joined: list[Any] = []
    take, admit = Budget.take, Batch.admit

    def taken(self: Budget, *given: Any, **options: Any) -> bool:
        done = take(self, *given, **options)
        takes.append(self.taken)
        return done

    def admitted(self: Any, question: Any) -> bool:
        done = admit(self, question)
        joined.extend([question] * done)
        return done

    futures: dict[Any, str] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Budget, "take", taken)
        patched.setattr(Batch, "admit", admitted)
        with lm.scheduler(max_rows=rows, max_bytes=limit) as scheduler:
            for (one, text), (_, pause) in zip(asked, arrivals, strict=True):
                try:
                    futures[scheduler.submit(one)] = text
                except LimitError:
                    assert free(lm, **one) > limit
                time.sleep(pause)
            assert not wait(futures, WAIT).not_done, "somebody waits for ever"
    assert [one.result().text for one in futures] == [*futures.values()]
    assert max(takes, default=0) <= limit
    assert joined == [one for one in futures if not one.exclusive]
    assert not scheduler._budget.taken


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "cached"),
    [(torch.OutOfMemoryError, False), (RuntimeError, False), (MemoryError, True)],
)
@pytest.mark.parametrize("at", [2, 7, 12, 19, 32, 60])
def test_one_that_gets_no_memory_takes_no_other_with_it(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], cached: bool, at: int
) -> None:
    """In the middle of any pass: its memory is let go before the next one."""
    lm = small.wrapped(cache=PassageCache("64MiB") if cached else None)
    asked = [
        {**ASK, "passages": LONG[n : n + 3], "query": f"Why {n}?", "min_new_tokens": 12}
        for n in range(5)
    ]
    expected = alone(small.wrapped(), asked)
    # Norms, of which each layer has two, call it.
    rsqrt, made = torch.rsqrt, Counter[str]()
    left: list[weakref.ref[torch.Tensor]] = []

    def failing(*given: Any) -> torch.Tensor:
        made["calls"] += 1
        if made["calls"] == at:
            half_done = torch.ones(64)
            left.append(weakref.ref(half_done))
            raise error("can't allocate memory: you tried to allocate 64 bytes.")
        if made["calls"] == at + 1:
            gc.collect()
            assert left[0]() is None, "the failed pass still holds its tensors"
        return rsqrt(*given)

    with lm.scheduler() as scheduler:
        monkeypatch.setattr(torch, "rsqrt", failing)
        futures = [scheduler.submit(one) for one in asked]
        failed = [one for one in futures if one.exception(WAIT) is not None]
    assert made["calls"] > at
    assert [type(one.exception()) for one in failed] == [error]
    rest = [place for place, one in enumerate(futures) if one not in failed]
    assert_same([futures[place].result() for place in rest], [expected[place] for place in rest])
    assert not scheduler._budget.taken
