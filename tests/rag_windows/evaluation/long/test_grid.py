"""Cells of the sweep, and scores by cell."""

from __future__ import annotations

import pytest

from rag_windows import InputError
from rag_windows.evaluation.long import Cell, LongOptions, LongTask, Needles, grid
from rag_windows.evaluation.record import ReadPassage, Record
from rag_windows.evaluation.report.tables import cells
from rag_windows.evaluation.task import Example, Reference

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def test_places_among_passages() -> None:
    made = grid((9, 1), DEPTHS)
    assert made[0] == Cell(1, 0, None)
    assert [(one.index, one.depth) for one in made[1:]] == list(
        zip((0, 2, 4, 6, 8), DEPTHS, strict=True)
    )
    assert made[0].kinds == ("1 passage",)
    assert made[2].kinds == ("9 passages", "position 25%")
    assert len(set(made)) == len(made)


@pytest.mark.parametrize(
    ("size", "places"),
    [
        (2, [(0, 0.0), (1, 1.0)]),
        (3, [(0, 0.0), (1, 0.5), (2, 1.0)]),
        # 1 of 3 steps is nearer to 25% than to 50%, and 2 of 3 to 75%.
        (4, [(0, 0.0), (1, 0.25), (2, 0.75), (3, 1.0)]),
    ],
)
def test_a_place_has_the_nearest_name(size: int, places: list[tuple[int, float]]) -> None:
    assert [(one.index, one.depth) for one in grid((size,), DEPTHS)] == places


def test_what_is_no_grid_is_refused() -> None:
    for sizes, depths, message in (
        ((), DEPTHS, "numbers of passages must be different, and at least one"),
        ((2, 2), DEPTHS, "numbers of passages must be different"),
        ((0, 2), DEPTHS, "At least 1 passage is read, not 0"),
        ((2,), (), "positions must be different"),
        ((2,), (0.5, 1.5), "between 0 .first. and 1 .last., not 1.5"),
        ((2,), (float("nan"),), "not nan"),
    ):
        with pytest.raises(InputError, match=message):
            grid(sizes, depths)
        with pytest.raises(InputError, match=message):
            LongOptions(sizes, depths)
    with pytest.raises(InputError, match="At least 1 question"):
        LongOptions(questions=0)


def example(size: int, depth: float | None, number: int) -> Example:
    return Example(
        key=f"{number}/{size}/{depth}",
        messages=({"role": "user", "content": "Who?"},),
        references=(Reference("red"),),
        group=str(number),
        details={"size": size, "depth": depth, "needle": "n"},
    )


def test_scores_by_cell() -> None:
    examples = [example(1, None, 0), example(8, 1.0, 0), example(8, 0.0, 0), example(8, 1.0, 1)]
    found = cells(examples, [100.0, 0.0, 100.0, 100.0])
    assert [line.split() for line in found.markdown().splitlines()[::2]] == [
        ["|", "passages", "|", "position", "0%", "|", "position", "100%", "|"],
        ["|", "1", "|", "100.0", "|", "|"],
    ]
    assert found.frame.to_numpy().tolist() == [["1", "100.0", ""], ["8", "100.0", "50.0"]]
    assert cells(examples[:1], [100.0]).frame.to_numpy().tolist() == [["1", "100.0"]]


def test_the_most_read_passage_is_by_its_text() -> None:
    examples = [example(2, 0.0, number) for number in range(4)]
    passages = [
        (ReadPassage("n", mass=0.4), ReadPassage("o", mass=0.1)),
        (ReadPassage("n", mass=0.1), ReadPassage("o", mass=0.4)),
        (ReadPassage("n"), ReadPassage("o")),
        (ReadPassage("o", id="n", mass=0.2),),
    ]
    records = [
        Record(one.key, "pcw", "", passages=read)
        for one, read in zip(examples, passages, strict=True)
    ]
    task = LongTask(Needles("x", (), {}), LongOptions())
    score = task.scores(examples, records)[2]
    assert score.values == (100, 0, None, 0)
    assert score.value == pytest.approx(100 / 3)
