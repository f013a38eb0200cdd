"""The pictures show what the engine does: the first one's pattern is measured here, too."""

from __future__ import annotations

import numpy as np
import pytest

from docs.pictures import draw as picture
from rag_windows import APE, PCW, Method, Sequential


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


@pytest.mark.parametrize("name", picture.PICTURES)
def test_words_stand_within_the_picture_and_the_picture_in_its_file(name: str) -> None:
    figure = picture.PICTURES[name]()
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.texts
    for words in axes.texts:
        extent = words.get_window_extent()
        assert figure.bbox.x0 < extent.x0 < extent.x1 < figure.bbox.x1, words.get_text()
        assert figure.bbox.y0 < extent.y0 < extent.y1 < figure.bbox.y1, words.get_text()
    assert (picture.FOLDER / f"{name}.svg").is_file()
