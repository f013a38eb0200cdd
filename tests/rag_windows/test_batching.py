from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rag_windows.prefill import FREE_PADDING, MAX_PADDING, bucket_by_length, chunks

lengths = st.lists(st.integers(1, 600), max_size=60)


@given(lengths, st.integers(1, 4000))
def test_buckets_hold_each_window_once_with_little_padding(sizes: list[int], most: int) -> None:
    buckets = bucket_by_length(sizes, most)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(sizes)))
    for bucket in buckets:
        longest = max(sizes[index] for index in bucket)
        shortest = min(sizes[index] for index in bucket)
        assert longest - shortest <= max(FREE_PADDING, MAX_PADDING * longest)
        assert len(bucket) == 1 or len(bucket) * longest <= most


def test_equal_windows_share_a_pass_up_to_the_bound() -> None:
    assert [len(bucket) for bucket in bucket_by_length([100] * 25, 1000)] == [10, 10, 5]


@given(lengths, st.integers(1, 4000))
def test_chunks_hold_each_window_once_equal_ones_side_by_side(sizes: list[int], most: int) -> None:
    made = chunks(sizes, most)
    assert sorted(index for chunk in made for index in chunk) == list(range(len(sizes)))
    for chunk in made:
        held = [sizes[index] for index in chunk]
        assert held == sorted(held, reverse=True)
        assert len(chunk) == 1 or sum(held) <= most
    # No two chunks in a row would have fitted into one.
    for one, other in itertools.pairwise(made):
        assert sum(sizes[index] for index in one) + sizes[other[0]] > most
