"""What stands side by side in memory."""

from __future__ import annotations

import pytest
import torch

from rag_windows.adjacency import follows, side_by_side

ROOM = torch.arange(200.0)
ONE = ROOM.as_strided((2, 3, 4), (40, 4, 1), 0)


@pytest.mark.parametrize(
    ("size", "stride", "offset", "stands"),
    [
        ((2, 5, 4), (40, 4, 1), 12, True),
        ((2, 5, 4), (40, 4, 1), 16, False),  # a gap
        ((2, 5, 4), (40, 4, 1), 0, False),  # the same again
        ((2, 5, 4), (44, 4, 1), 12, False),  # the second head elsewhere
        ((2, 5, 4), (40, 8, 1), 12, False),  # tokens apart
    ],
)
def test_only_what_really_follows_is_not_copied(
    size: tuple[int, ...], stride: tuple[int, ...], offset: int, stands: bool
) -> None:
    other = ROOM.as_strided(size, stride, offset)
    joined = side_by_side([ONE, other])
    assert torch.equal(joined, torch.cat([ONE, other], dim=1))
    assert follows(ONE, other) == (joined.data_ptr() == ONE.data_ptr()) == stands


def test_other_memory_with_the_same_numbers_is_copied() -> None:
    other = ROOM.clone().as_strided((2, 5, 4), (40, 4, 1), 12)
    assert not follows(ONE, other)
    assert torch.equal(side_by_side([ONE, other]), torch.cat([ONE, other], dim=1))
