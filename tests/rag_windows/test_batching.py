from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rag_windows.batching import FREE_PADDING, MAX_PADDING, bucket_by_length

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
