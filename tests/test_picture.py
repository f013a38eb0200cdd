"""The picture in README.md shows what the engine does: its pattern is measured here, too."""

from __future__ import annotations

import numpy as np
import pytest

from docs.pictures import draw_attention as picture
from rag_windows import APE, PCW, Sequential
from rag_windows.methods import Method


def expected(windowed: bool) -> picture.Grid:
    """Causal; in windows, a passage's rows see no other passage's columns."""
    parts = picture.segments()
    grid = np.zeros((parts[-1].stop, parts[-1].stop), dtype=np.int64)
    for number, part in enumerate(parts, start=1):
        grid[:, part] = number
    grid *= np.tri(len(grid), dtype=np.int64)
    passages = parts[1:-1]
    if windowed:
        for rows in passages:
            for keys in passages:
                if rows != keys:
                    grid[rows, keys] = 0
    return grid


@pytest.mark.parametrize("method", [Sequential(), PCW(), APE()], ids=lambda method: method.name)
def test_every_row_reads_what_the_picture_says(method: Method) -> None:
    measured = picture.pattern(picture.tiny_model(), method)
    np.testing.assert_array_equal(measured, expected(method.windowed))


def test_positions_are_those_of_the_engine() -> None:
    context = picture.tiny_model().encode_ids([1] * 3, [[2] * n for n in picture.WINDOWS])
    places = picture.positions(windowed=True)
    positions = [at for window in context.each for at in range(window.start, window.end)]
    assert positions == places[3 : 3 + sum(picture.WINDOWS)]
    assert context.query_start == places[-picture.QUERY]
