"""Where the windows of requests come from, seen at the store itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_windows import PCW, PassageCache, Sequential
from rag_windows.interchange import Window
from rag_windows.prefill import EncodingPlan, PlannedWindow, packed
from rag_windows.windows import Obtained, WindowStore
from tests.rag_windows import small

PREFIX = [5, 6, 7]
WINDOWS = [[20 + n, 30 + n, 40 + n] for n in range(6)]


def plan(*windows: Sequence[int], sequential: bool = False) -> EncodingPlan:
    return EncodingPlan.of(PREFIX, windows, Sequential() if sequential else PCW())


@pytest.fixture(params=["no cache", "cache", "int8"])
def store(request: pytest.FixtureRequest) -> WindowStore:
    """One of a batch whose passes take two of `WINDOWS`, with what it has encoded in `encoded`."""
    cache = None
    if request.param != "no cache":
        cache = PassageCache("50MB", store="int8" if request.param == "int8" else "as computed")
    return small.wrapped(cache=cache, max_batch_tokens=6).engine.encoder.for_batch()


@pytest.fixture
def encoded(store: WindowStore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Token ids of what the store encodes, in order."""
    made: list[tuple[int, ...]] = []
    original = store.runner.encode_pass

    def noting(prefix: Window | None, windows: Sequence[PlannedWindow], *others: Any) -> Any:
        found = original(prefix, windows, *others)
        made.extend(windows[index].ids for index in found)
        return found

    monkeypatch.setattr(store.runner, "encode_pass", noting)
    return made


def by_turns(store: WindowStore, *plans: EncodingPlan) -> list[Obtained]:
    """What the store gives for plans that are encoded a pass of each at a time."""
    made: dict[int, Obtained] = {}
    under_way = {index: store.obtain(one) for index, one in enumerate(plans)}
    while under_way:
        for index, prefill in [*under_way.items()]:
            try:
                next(prefill)
            except StopIteration as end:
                made[index] = end.value
                del under_way[index]
    return [made[index] for index in range(len(plans))]


def test_prefills_by_turns_encode_each_window_once(
    store: WindowStore, encoded: list[tuple[int, ...]]
) -> None:
    one, two = by_turns(store, plan(*WINDOWS[:4]), plan(*WINDOWS[2:][::-1]))
    assert sorted(encoded) == sorted({*encoded}), "nothing twice"
    assert {*encoded} == {tuple(PREFIX), *map(tuple, WINDOWS)}
    assert one.prefix is two.prefix
    assert one.windows[2] is two.windows[3]
    assert [list(window.ids) for window in two.windows] == WINDOWS[2:][::-1]
    assert len(one.found) + len(two.found) == 2


def test_equal_windows_of_one_request_are_objects_of_their_own(store: WindowStore) -> None:
    for _ in "ab":
        (one,) = by_turns(store, plan(WINDOWS[0], WINDOWS[0]))
        first, second = one.windows
        assert first is not second
        assert all(a.equal(b) for a, b in zip(first.keys, second.keys, strict=True))


def test_what_nobody_reads_any_more_is_encoded_again_without_a_cache(
    store: WindowStore, encoded: list[tuple[int, ...]]
) -> None:
    held = by_turns(store, plan(*WINDOWS[:2]))
    del held
    encoded.clear()
    by_turns(store, plan(*WINDOWS[:2]))
    assert len(encoded) == (3 if store.access is None else 0)


def test_one_text_of_all_passages_is_shared_with_nobody(
    store: WindowStore, encoded: list[tuple[int, ...]]
) -> None:
    one, two = by_turns(store, *[plan(*WINDOWS[:2], sequential=True) for _ in "ab"])
    assert one.prefix is two.prefix
    assert one.windows[0] is not two.windows[0]
    assert encoded.count((*WINDOWS[0], *WINDOWS[1])) == 2


def test_a_closed_prefill_keeps_what_it_has_encoded_for_a_cache(
    store: WindowStore, encoded: list[tuple[int, ...]]
) -> None:
    prefill = store.obtain(plan(*WINDOWS))
    for _ in range(3):
        next(prefill)
    prefill.close()
    assert len(encoded) == 5
    encoded.clear()
    (again,) = by_turns(store, plan(*WINDOWS))
    assert len(again.windows) == 6
    assert len(again.found) == (0 if store.access is None else 4)


def test_a_failing_pass_leaves_the_others_to_the_next_request(
    store: WindowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(store.runner, "run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        by_turns(store, plan(*WINDOWS))
    (made,) = by_turns(store, plan(*WINDOWS))
    assert made.found == ()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 120))
def test_passes_take_each_window_once_and_no_more_than_fits(lengths: list[int], most: int) -> None:
    left, taken = [*range(len(lengths))], []
    while left:
        now = [left[index] for index in packed([lengths[index] for index in left], most)]
        sizes = [lengths[index] for index in now]
        assert now
        assert len(now) == 1 or sum(sizes) <= most
        assert sizes == sorted(sizes, reverse=True)
        taken += now
        left = [index for index in left if index not in now]
    assert sorted(taken) == [*range(len(lengths))]
