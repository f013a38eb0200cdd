from __future__ import annotations

import pytest

from rag_windows import APE, METHODS, PCW
from rag_windows.calibration.grid import (
    VALUES,
    ape_grid,
    default_grid,
    finer,
    varying,
)
from rag_windows.errors import InputError
from rag_windows.methods import DeepThinking, MateICL
from rag_windows.methods.registry import numbers_of


def test_ape_is_tried_at_every_pair_and_keeps_its_form() -> None:
    grid = default_grid(APE(form="fixed ratio"))
    assert len(set(grid)) == len(grid) == len(VALUES) ** 2
    assert {one.form for one in grid if isinstance(one, APE)} == {"fixed ratio"}
    assert set(ape_grid()) == set(default_grid(APE(0.2, 0.3)))
    assert varying(grid) == {"temperature": VALUES, "scale": VALUES}


def test_other_methods_have_grids_of_their_numbers() -> None:
    deep = default_grid(DeepThinking(momentum=0.5, reader=APE(0.8, 0.7)))
    assert varying(deep).keys() == {"steps", "eta"}
    assert all(isinstance(one, DeepThinking) and one.reader == APE(0.8, 0.7) for one in deep)
    mateicl = default_grid(MateICL())
    assert MateICL() in mateicl
    assert MateICL(2.0) in mateicl
    with pytest.raises(InputError, match="'pcw' has no numbers to choose"):
        default_grid(PCW())


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_a_grid_with_no_surprises_or_says_that_it_has_none(name: str) -> None:
    method = METHODS[name]()
    try:
        grid = default_grid(method)
    except InputError:
        assert not numbers_of(method)
        return
    assert method in grid or name == "deep-thinking"
    assert all(type(one) is type(method) for one in grid)


def test_a_finer_grid_lies_between_the_best_and_its_neighbours() -> None:
    grid = ape_grid((0.4, 0.9, 1.0), (0.4, 0.9, 1.0))
    inside = finer(APE(0.9, 0.9), grid)
    assert len(inside) == 8
    assert APE(0.6, 0.949) in inside
    assert not set(inside) & set(grid)
    corner = finer(APE(1.0, 0.4), grid)
    assert corner == [APE(0.949, 0.4), APE(0.949, 0.6), APE(1.0, 0.6)]


def test_a_finer_grid_keeps_whole_numbers_whole() -> None:
    grid = [DeepThinking(steps=steps) for steps in (1, 2, 5)]
    assert finer(grid[2], grid) == [DeepThinking(steps=3)]
    assert finer(grid[0], grid) == []


def test_a_finer_grid_knows_numbers_from_words() -> None:
    grid = default_grid(MateICL())
    assert finer(MateICL(), grid) == []
    assert finer(MateICL(2.0), grid) == [MateICL(1.73), MateICL(2.45)]
