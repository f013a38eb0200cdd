"""The accelerator's tier, on the CPU: where windows stand, and when their room is free again.

Whatever was handed out must stay what it was as long as anybody holds any part of it.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rag_windows import CacheError, PassageCache, WindowedLM
from rag_windows.attention import cuda
from rag_windows.cache.arena import ArenaTier, Ranges
from rag_windows.interchange import Window
from tests.parity import zoo
from tests.rag_windows import small
from tests.rag_windows.attention import asked, stand_in
from tests.rag_windows.cache.disk_cases import (
    end_of,
    entry,
    in_child,
    key_of,
    kv_entry_of,
    right,
    same_window,
)

CPU = torch.device("cpu")
TOKEN = 2 * 2 * (4 + 4 + 6 + 6)
"""Bytes of a token of `kv_entry_of`: two heads, bfloat16."""


def arena(tokens: int, device: torch.device = CPU) -> ArenaTier:
    """A tier in which entries of so many tokens fit, and about a tenth more."""
    return ArenaTier(-(-tokens * TOKEN * 10 // 9) + 4 * 512, device)


def held(tier: ArenaTier, number: int) -> Window:
    return tier.get_many([key_of(number)])[key_of(number)].window


def tensors(window: Window) -> list[torch.Tensor]:
    return [*window.keys, *window.values]


def put(tier: ArenaTier, number: int, tokens: int = 5, cost_s: float = 0.25) -> bool:
    return tier.put(key_of(number), replace(kv_entry_of(number, tokens), cost_s=cost_s))


# Ranges


class RangesAgainstBits(RuleBasedStateMachine):
    """Free tokens against a set of those that are taken."""

    SIZE = 64

    def __init__(self) -> None:
        super().__init__()
        self.ranges = Ranges(self.SIZE)
        self.taken: dict[int, int] = {}

    def free_runs(self) -> list[int]:
        used = {at + i for at, length in self.taken.items() for i in range(length)}
        text = "".join("x" if i in used else "." for i in range(self.SIZE))
        return [len(run) for run in text.split("x") if run]

    @rule(length=st.integers(1, 40))
    def take(self, length: int) -> None:
        runs = self.free_runs()
        start = self.ranges.take(length)
        # Neighbours are joined, so a free run of any length can be had whole.
        assert (start is not None) == (max(runs, default=0) >= length)
        if start is None:
            return
        assert 0 <= start <= self.SIZE - length
        for at, other in self.taken.items():
            assert start + length <= at or at + other <= start
        self.taken[start] = length
        # What is left says that it was the shortest that would do.
        shortest = min(run for run in runs if run >= length)
        runs.remove(shortest)
        assert sorted(self.free_runs()) == sorted(runs + [shortest - length] * (shortest > length))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: Any) -> None:
        start = data.draw(st.sampled_from(sorted(self.taken)))
        self.ranges.give(start, self.taken.pop(start))

    @invariant()
    def counts(self) -> None:
        assert self.ranges.free == self.SIZE - sum(self.taken.values())

    def teardown(self) -> None:
        for start, length in self.taken.items():
            self.ranges.give(start, length)
        assert self.ranges.take(self.SIZE) == 0


TestRanges = RangesAgainstBits.TestCase


# Where windows stand


@st.composite
def layers(draw: Any) -> list[tuple[int, int, int, torch.dtype]]:
    one = st.tuples(
        *(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    )
    return draw(st.lists(one, min_size=1, max_size=4))


def shaped(shape: list[tuple[int, int, int, torch.dtype]], tokens: int, seed: int) -> Any:
    """An entry with these heads, dimensions of keys and values, and dtypes."""
    noise = torch.Generator().manual_seed(seed)
    pairs = [
        [torch.randn(heads, tokens, dim, generator=noise).to(dtype) for dim in dims]
        for heads, *dims, dtype in shape
    ]
    keys, values = zip(*pairs, strict=True)
    return entry(range(tokens), 3, [*keys, *values], 0.1, (), 0.0)


@settings(max_examples=60)
@given(shape=layers(), lengths=st.lists(st.integers(1, 12), min_size=2, max_size=6))
def test_windows_of_a_question_share_a_storage_a_layer_and_come_back_to_the_bit(
    shape: Any, lengths: list[int]
) -> None:
    tier = ArenaTier(100_000, CPU)
    given_ = [shaped(shape, tokens, seed) for seed, tokens in enumerate(lengths)]
    for number, one in enumerate(given_):
        assert tier.put(key_of(number), one)
    found = [held(tier, number) for number in range(len(lengths))]
    for window, wanted in zip(found, (one.window for one in given_), strict=True):
        assert (window.ids, window.start) == (wanted.ids, wanted.start)
        for one, other in zip(tensors(window), tensors(wanted), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
    starts = []
    for place in range(2 * len(shape)):
        own = [tensors(window)[place] for window in found]
        heads, _, dim = own[0].shape
        assert {one.stride() for one in own} == {(dim, heads * dim, 1)}
        assert len({one.untyped_storage().data_ptr() for one in own}) == 1
        assert own[0].untyped_storage().data_ptr() % 16 == 0
        assert all(one.storage_offset() % (heads * dim) == 0 for one in own)
        starts.append([one.storage_offset() // (heads * dim) for one in own])
        # As a kernel reads them: all that the storage holds, from the first token on.
        size = own[0].untyped_storage().nbytes() // own[0].element_size() // (heads * dim)
        whole = own[-1].as_strided((size, heads, dim), (heads * dim, dim, 1), 0)
        for start, one in zip(starts[-1], own, strict=True):
            assert torch.equal(whole[start : start + one.shape[1]].transpose(0, 1), one)
    assert starts == [starts[0]] * len(starts), "the same tokens in every layer"


def test_the_cuda_kernel_asks_once_a_layer_for_all_windows_and_plans_once_for_all_layers() -> None:
    shape = [(2, 16, 16, torch.bfloat16)] * 3
    tier, lengths = ArenaTier(1_000_000, CPU), (40, 7, 130, 2, 64)
    for number, tokens in enumerate(lengths):
        assert tier.put(key_of(number), shaped(shape, tokens, number))
    tier.remove([key_of(1)])
    found = [held(tier, number) for number in (4, 0, 3, 2)]
    query, plans = torch.randn(1, 6, 16).bfloat16(), []
    for layer in range(3):
        parts = [(one.keys[layer][None], one.values[layer][None]) for one in found]
        one = asked.request(parts)
        with stand_in.serving(varlen := stand_in.Varlen()):
            assert cuda.CudaBackend().serves(one, query)
            made = cuda.CudaCall([one], query)
            varlen.calls.clear()
            answer = made(query, per_part=True)
            plans.append(made.plan(6))
        assert [sorted(call["used"]) for call in varlen.calls] == [[2, 40, 64, 130]]
        expected = asked.exact([one], query).output.float()
        torch.testing.assert_close(answer.output.float(), expected, atol=0.02, rtol=0.02)
        pairs = zip(made.parts, parts, strict=True)
        assert all(a is b for pair in pairs for a, b in zip(*pair, strict=True))
    assert plans[0] is plans[1] is plans[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3_text-sliding", "gemma4_text", "gpt_oss"])
def test_answers_are_the_same_with_and_without_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while its windows come and go: it has room for about half of them."""
    monkeypatch.setattr(PassageCache, "accelerator_may_be_cpu", True)
    model = zoo.shared(name)
    windows = [zoo.ids(5 + number, number) for number in range(8)]
    plain, probe = WindowedLM(model), WindowedLM(model, cache=PassageCache(device_bytes="1MB"))
    probe.encode_ids(zoo.ids(6, 100), windows)
    assert probe.cache is not None
    all_bytes = probe.cache.stats().tiers["device"].bytes
    lm = WindowedLM(model, cache=PassageCache("1MB", device_bytes=int(0.6 * all_bytes)))
    order = random.Random(5)
    contexts, query = [], zoo.ids(4, 200)
    for _ in range(8):
        asked = [windows[i] for i in order.sample(range(8), 4)]
        expected, context = (one.encode_ids(zoo.ids(6, 100), asked) for one in (plain, lm))
        wanted = plain.logits(expected, query)
        torch.testing.assert_close(lm.logits(context, query), wanted, rtol=0, atol=1e-5)
        contexts.append((context, wanted))
    assert lm.cache is not None
    stats = lm.cache.stats().tiers["device"]
    assert stats.hits
    assert stats.evictions
    assert stats.failed == 0
    for context, wanted in contexts:
        torch.testing.assert_close(lm.logits(context, query), wanted, rtol=0, atol=1e-5)


PASSAGES = [f"Fact {number}: word {number * 7}. " + "more " * number for number in range(6)]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassageCache, "accelerator_may_be_cpu", True)


def model(cache: PassageCache) -> WindowedLM:
    return WindowedLM(small.model(), small.tokenizer(), cache=cache)


@pytest.mark.usefixtures("on_cpu")
def test_questions_read_windows_where_they_stand(tmp_path: Any) -> None:
    """New ones, those of before, and those that were in host memory or on disk alone."""
    lm = model(cache := PassageCache("1MB", device_bytes="1MB", path=tmp_path / "w"))

    def places() -> list[int]:
        got = lm.generate("What?", PASSAGES, max_new_tokens=2)
        assert got.token_ids == expected.token_ids
        cache.flush()
        found = cache.stats().tiers
        return [found[name].hits for name in ("device", "memory", "disk")]

    expected = small.lm().generate("What?", PASSAGES, max_new_tokens=2)
    assert places() == [0, 0, 0]
    (tier,) = cache._common.devices.values()
    before = tier.stats()
    assert (before.entries, before.stored) == (7, 7)
    assert places() == [7, 0, 0]
    assert tier.stats().bytes == before.bytes, "no question leaves a copy"
    tier.clear()
    assert places() == [7, 7, 0]
    assert places() == [14, 7, 0], "found in host memory once"
    tier.clear()
    assert cache.memory is not None
    cache.memory.clear()
    assert places() == [14, 7, 7]
    assert places() == [21, 7, 7]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("tokens", [60, 400])
def test_a_batch_of_questions_and_threads_answer_as_without_it(tokens: int) -> None:
    """With room for everything, and for one or two passages."""
    questions: list[dict[str, Any]] = [
        {"query": "What?", "passages": PASSAGES[i : i + 3], "max_new_tokens": 3} for i in range(4)
    ]
    expected = [small.lm().generate(**one).token_ids for one in questions]
    lm = model(PassageCache("1MB", device_bytes=tokens * 2 * 2 * 2 * 12 * 4))
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            alone = list(pool.map(lambda one: lm.generate(**one), questions))
            assert [one.token_ids for one in alone] == expected
            assert [one.token_ids for one in lm.generate_batch(questions)] == expected
    assert lm.cache is not None
    stats = lm.cache.stats().tiers["device"]
    assert stats.failed == 0
    assert bool(stats.evictions + stats.refused) == (tokens == 60)


# When their room is free again

HOLDS: dict[str, Callable[[Window], Any]] = {
    "the window": lambda window: window,
    "a copy with other ids": lambda window: replace(window, ids=tuple(range(len(window.ids)))),
    "keys of one layer": lambda window: window.keys[1],
    "a slice of values": lambda window: window.values[0][1:, 2:4],
    "a repeated view": lambda window: window.keys[0].unsqueeze(0).expand(3, -1, -1, -1),
    "an array": lambda window: window.keys[0].view(torch.int16).numpy(),
    "what autograd keeps": lambda window: window.keys[0] * torch.ones(1, requires_grad=True),
}


@pytest.mark.parametrize("kind", HOLDS)
@pytest.mark.parametrize("how", ["evict", "remove", "clear", "replace", "close"])
def test_what_is_held_stays_what_it_is_until_it_is_let_go(kind: str, how: str) -> None:
    tier = arena(12)
    assert put(tier, 1)
    kept: Any = HOLDS[kind](held(tier, 1))
    whole: Any = HOLDS[kind](kv_entry_of(1).window)
    if how == "evict":
        for _ in range(20):
            tier.get_many([key_of(2)])  # asked for so often that it is worth more
        put(tier, 2, 10, cost_s=100.0)
    elif how == "replace":
        assert tier.put(key_of(1), kv_entry_of(3))
    else:
        {"remove": lambda: tier.remove([key_of(1)]), "clear": tier.clear, "close": tier.close}[
            how
        ]()
    for number in range(4, 30):
        put(tier, number, cost_s=1000.0 * number)
    for one, wanted in (
        zip(tensors(kept), tensors(whole), strict=True)
        if isinstance(kept, Window)
        else [(torch.as_tensor(kept), torch.as_tensor(whole))]
    ):
        assert torch.equal(one, wanted)
    del kept
    if how == "close":
        assert tier.stats().bytes == 0
        assert not put(tier, 1)
        return
    tier.clear()
    del one, wanted
    assert tier.stats().bytes == 0, "all of it is free"
    assert put(tier, 50, 10)
    assert right(tier.get_many([key_of(50)])[key_of(50)], 50, 10)


def test_who_still_reads_is_counted_and_no_room_is_given_twice() -> None:
    tier = arena(20)
    readers = []
    for number in range(4):
        assert put(tier, number)
        readers.append(held(tier, number))
    tier.clear()
    assert (tier.stats().entries, tier.stats().bytes) == (0, 4 * 5 * TOKEN)
    assert not put(tier, 10)
    assert tier.stats().refused == 1
    del readers[1]
    assert tier.stats().bytes == 3 * 5 * TOKEN
    assert put(tier, 10)
    assert tier.stats().bytes == 4 * 5 * TOKEN <= tier.stats().limit_bytes
    for number, reader in zip((0, 2, 3), readers, strict=True):
        assert same_window(reader, kv_entry_of(number).window)


def test_what_a_reader_leaves_in_a_cycle_or_an_error_is_free_when_that_is() -> None:
    tier = arena(8)

    def fails() -> None:
        window = held(tier, 1)
        raise RuntimeError(len(window.ids))

    assert put(tier, 1)
    with pytest.raises(RuntimeError) as caught:
        fails()
    tier.clear()
    assert not put(tier, 2)
    del caught
    assert put(tier, 2)
    gc.collect()
    gc.disable()
    try:
        cycle: list[Any] = [held(tier, 2)]
        cycle.append(cycle)
        tier.clear()
        del cycle
        assert not put(tier, 3)
        gc.collect()
        assert put(tier, 3)
    finally:
        gc.enable()


def test_collecting_garbage_amid_any_call_does_not_wait_for_it() -> None:
    """A range ends in whatever thread collects it, also in one that holds the tier's lock."""
    tier = arena(40)
    done = threading.Event()

    def work() -> None:
        for number in range(300):
            put(tier, number, cost_s=float(number))
            for window in [found.window for found in tier.get_many([key_of(number)]).values()]:
                cycle: list[Any] = [window]
                cycle.append(cycle)
        done.set()

    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        assert done.wait(60), "nothing waits for itself"
        thread.join()
    finally:
        gc.set_threshold(*before)
    gc.collect()
    tier.clear()
    assert tier.stats().bytes == 0


@pytest.mark.slow
@pytest.mark.usefixtures("eager_switching")
def test_threads_that_read_while_others_evict_see_whole_windows() -> None:
    tier = arena(120)
    numbers, stop = range(60), time.monotonic() + 2
    wanted = {number: tensors(kv_entry_of(number, 3 + number % 7).window) for number in numbers}

    def write(seed: int) -> int:
        chance, stored = random.Random(seed), 0
        while time.monotonic() < stop:
            number = chance.choice(numbers)
            stored += put(tier, number, 3 + number % 7, cost_s=10 ** chance.uniform(-3, 3))
            if chance.random() < 0.02:
                tier.remove([key_of(chance.choice(numbers))])
            if chance.random() < 0.002:
                tier.clear()
        return stored

    def read(seed: int) -> int:
        chance, kept, checks = random.Random(seed), [], 0
        while time.monotonic() < stop:
            asked = chance.sample(numbers, 6)
            found = tier.get_many([key_of(number) for number in asked])
            for number in asked:
                if key_of(number) in found:
                    place = chance.randrange(4)
                    one = tensors(found[key_of(number)].window)[place]
                    kept.append((one[:, 1:], wanted[number][place][:, 1:]))
            del found
            chance.shuffle(kept)
            for one, same in kept:
                assert torch.equal(one, same)
                checks += 1
            del kept[1:]
        return checks

    with ThreadPoolExecutor(8) as pool:
        work = [pool.submit(write, i) for i in range(4)] + [pool.submit(read, i) for i in range(4)]
        done = [one.result() for one in work]
    assert min(done) > 20
    assert tier.stats().evictions > 20
    assert tier.stats().failed == 0
    tier.clear()
    del work
    gc.collect()
    assert tier.stats().bytes == 0


def test_a_forked_child_keeps_what_is_there_and_takes_in_more() -> None:
    tier = arena(17)
    assert put(tier, 1)
    reader = held(tier, 1)

    def work() -> bool:
        torch.set_num_threads(1)
        tier.clear()
        stored = [put(tier, number) for number in (2, 3, 4)]
        return stored == [True, True, False] and same_window(reader, kv_entry_of(1).window)

    assert end_of(in_child(work)) == 0
    with tier._lock:  # as if a thread were changing it just then
        child = in_child(lambda: not put(tier, 5) and tier.stats().entries == 0)
    assert end_of(child) == 0
    assert right(tier.get_many([key_of(1)])[key_of(1)], 1)


@pytest.mark.parametrize("how", ["remove", "clear", "replace", "close"])
def test_what_is_dropped_or_replaced_while_it_is_copied_does_not_come_back(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, inside, follow = arena(20), threading.Event(), threading.Event()

    def slow(window: Window, devices: Any) -> Window:
        if same_window(window, kv_entry_of(1).window):
            inside.set()
            assert follow.wait(30)
        return window

    monkeypatch.setattr("rag_windows.cache.arena.placed", slow)
    with ThreadPoolExecutor(1) as pool:
        storing = pool.submit(put, tier, 1)
        assert inside.wait(30)
        assert right(tier.get_many([key_of(1)])[key_of(1)], 1), "others find it already"
        if how == "replace":
            assert tier.put(key_of(1), kv_entry_of(2))
        else:
            {"remove": lambda: tier.remove([key_of(1)]), "clear": tier.clear, "close": tier.close}[
                how
            ]()
        follow.set()
        storing.result(30)
    del storing
    found = tier.get_many([key_of(1)])
    assert len(found) == (how == "replace")
    assert all(right(entry, 2) for entry in found.values())
    assert tier.stats().bytes == len(found) * 5 * TOKEN


@pytest.mark.gpu
def test_work_that_waits_on_the_device_reads_what_was_there_when_it_was_asked_for() -> None:
    tier = arena(6, torch.device("cuda:0"))
    big = torch.randn(4096, 4096, device="cuda")
    for number in range(20):
        assert put(tier, number)
        for _ in range(20):
            big = big @ big  # so that what follows waits, and is let go, and overwritten
            big /= big.norm()
        seen = [one.clone() for one in tensors(held(tier, number))]
        tier.clear()
        assert put(tier, 100 + number)
        seen += tensors(held(tier, 100 + number))
        wanted = [*tensors(kv_entry_of(number).window), *tensors(kv_entry_of(100 + number).window)]
        assert all(torch.equal(one.cpu(), other) for one, other in zip(seen, wanted, strict=True))
        del seen
        tier.clear()
    assert tier.stats().bytes == 0


# What it does not take


@pytest.mark.usefixtures("on_cpu")
def test_a_device_without_so_much_memory_answers_without_it(caplog: Any) -> None:
    lm = model(PassageCache("1MB", device_bytes="4000TB"))
    expected = small.lm().generate("What?", PASSAGES, max_new_tokens=2)
    for _ in range(2):
        assert lm.generate("What?", PASSAGES, max_new_tokens=2).token_ids == expected.token_ids
    (told,) = [one.message for one in caplog.records if "device_bytes=" in one.message]
    assert "4000000000000000 bytes" in told
    assert lm.cache is not None
    stats = lm.cache.stats().tiers
    assert stats["device"].entries == stats["device"].bytes == 0
    assert stats["device"].failed >= 7
    assert stats["memory"].hits == 7


def test_another_models_windows_are_refused_while_the_firsts_are_there(caplog: Any) -> None:
    tier = ArenaTier(10_000, CPU)
    other = replace(shaped([(1, 8, 8, torch.float32)], 5, 0), cost_s=100.0)
    assert put(tier, 1)
    reader = held(tier, 1)
    assert [tier.put(key_of(9), other), tier.put(key_of(9), other)] == [False, False]
    assert [one.message for one in caplog.records if "PassageCache of its own" in one.message]
    assert len(caplog.records) == 1
    tier.clear()
    assert not tier.put(key_of(9), other), "somebody reads the first one's still"
    del reader
    assert tier.put(key_of(9), other)
    assert torch.equal(held(tier, 9).keys[0], other.window.keys[0])


def test_a_copy_that_fails_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = arena(20)

    def full(*_: Any) -> Window:
        raise MemoryError("none left")

    with monkeypatch.context() as patched:
        patched.setattr("rag_windows.cache.arena.placed", full)
        assert not put(tier, 1)
    assert (tier.stats().failed, tier.stats().entries, tier.stats().bytes) == (1, 0, 0)
    assert put(tier, 1)
    torn = kv_entry_of(2)
    longer = replace(torn.window, values=kv_entry_of(2, 6).window.values)
    with pytest.raises(CacheError, match="5 tokens"):
        tier.put(key_of(2), replace(torn, window=longer))
    assert right(tier.get_many([key_of(1)])[key_of(1)], 1)
