"""The KV cache of a query: what it holds is what a cache that copies everything holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from rag_windows import Passage
from rag_windows.attention import backends
from rag_windows.steps.query_cache import EnsembleCache, QueryCache
from tests.rag_windows import small

CHANGES = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 90)),
    st.tuples(st.just("crop"), st.integers(1, 3)),
    st.tuples(st.just("batch_repeat_interleave"), st.integers(1, 2)),
    st.tuples(st.just("reorder_cache"), st.integers(0, 99)),
    st.tuples(st.just("batch_select_indices"), st.integers(0, 99)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(CHANGES, min_size=1, max_size=8), st.integers(0, 99))
def test_it_holds_what_a_cache_that_copies_holds(changes: list[tuple[str, int]], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    caches = [QueryCache(), DynamicCache()]
    rows = 2
    for change, number in [("update", 5), *changes]:
        argument: Any = number
        if change == "update":
            shape = rows, 2, number, 4
            key, value = (torch.randn(shape, generator=draw) for _ in range(2))
            for layer in range(2):
                found, wanted = (one.update(key, value, layer) for one in caches)
                assert all(map(torch.equal, found, wanted))
            continue
        if change == "crop":
            argument = -min(number, caches[1].get_seq_length() - 1)
        elif change == "batch_repeat_interleave":
            rows *= number
        else:
            wanted_rows = torch.Generator().manual_seed(number)
            argument = torch.randint(rows, (rows,), generator=wanted_rows)
        for cache in caches:
            getattr(cache, change)(argument)
    for mine, plain in zip(*(one.layers for one in caches), strict=True):
        assert torch.equal(mine.keys, plain.keys)
        assert torch.equal(mine.values, plain.values)


def test_rows_that_part_do_not_write_into_each_other() -> None:
    cache, token = EnsembleCache(2), torch.ones(2, 1, 1, 4)
    cache.update(token, token, 0)
    before = cache.update(2 * token, 2 * token, 0)[0]
    cache.batch_repeat_interleave(2)
    after = cache.update(3 * token.repeat(2, 1, 1, 1), 3 * token.repeat(2, 1, 1, 1), 0)[0]
    assert before[:, 0, :, 0].tolist() == [[1, 2]] * 2
    assert after[:, 0, :, 0].tolist() == [[1, 2, 3]] * 4


@pytest.mark.parametrize("method", ["pced", "ensemble", "pcw"])
def test_a_further_token_prepares_no_window_again(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    calls_for = backends.calls_for

    def counted(requests: Any, *given: Any, **options: Any) -> Any:
        asked.append(len(requests))
        return calls_for(requests, *given, **options)

    monkeypatch.setattr("rag_windows.attention.segments.calls_for", counted)
    lm = small.lm()
    passages = [Passage(f"passage {number}") for number in range(6)]

    def requests(tokens: int) -> int:
        asked.clear()
        lm.generate("a b", passages, method=method, max_new_tokens=tokens, min_new_tokens=tokens)
        return sum(asked)

    first, layers = requests(2), lm.model.config.num_hidden_layers
    # The query's own keys are new with each token; windows are what they were.
    assert requests(7) - first == 5 * layers
