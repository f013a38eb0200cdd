from __future__ import annotations

import random

import pytest

from rag_windows import InputError, LimitError
from rag_windows.icl.packing import pack


def fewest(sizes: list[int], room: int) -> int:
    count, used = 1, 0
    for size in sizes:
        if used + size > room:
            count, used = count + 1, 0
        used += size
    return count


def test_any_sizes_are_covered_in_order_by_the_fewest_windows() -> None:
    drawn = random.Random(3)
    for _ in range(300):
        room = drawn.randint(5, 60)
        sizes = [drawn.randint(1, min(room, drawn.choice([3, 20, room]))) for _ in range(40)]
        windows = pack(sizes, room)
        assert [index for window in windows for index in window] == list(range(40))
        assert all(0 < sum(sizes[i] for i in window) <= room for window in windows)
        assert len(windows) == fewest(sizes, room)
        count = drawn.randint(len(windows), 40)
        chosen = pack(sizes, room, count)
        assert len(chosen) == count
        assert all(0 < sum(sizes[i] for i in window) <= room for window in chosen)
        assert [index for window in chosen for index in window] == list(range(40))


def test_windows_are_about_as_full() -> None:
    assert [len(window) for window in pack([1] * 10, 4)] == [3, 4, 3]
    assert [len(window) for window in pack([5] * 101, 500)] == [51, 50]
    lengths = [len(window) for window in pack([3] * 500, 100, 32)]
    assert sum(lengths) == 500
    assert max(lengths) - min(lengths) <= 1


def test_nothing_makes_no_window() -> None:
    assert pack([], 10) == []


@pytest.mark.parametrize("windows", [0, 4, -1])
def test_a_number_of_windows_that_would_leave_some_empty_is_refused(windows: int) -> None:
    with pytest.raises(InputError, match="between 1 and the number of demonstrations, 3"):
        pack([1, 1, 1], 10, windows)


def test_too_few_windows_are_refused_with_the_number_that_would_do() -> None:
    with pytest.raises(LimitError, match="windows=2 are too few, 3 would hold them"):
        pack([4, 4, 4], 5, 2)
