"""The pictures of the judgement can be read."""

from __future__ import annotations

import itertools

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from benchmarks.judgement.cases import TASKS
from benchmarks.judgement.curves import accuracy
from benchmarks.judgement.entries import LINK_SHARES, entries, linked
from benchmarks.judgement.journal import Cell, Cost, Record
from benchmarks.judgement.panels import DPI
from benchmarks.judgement.plots import cost, links, retention
from benchmarks.judgement.summary import Summary

MODEL, SIZES, ENTRIES = "tiny-reader", (1, 2, 4, 8, 16, 32, 64), entries()
WIDEST = 1600


def cell(task: str, passages: int, label: str) -> Cell:
    marks = ("0110", "1000")
    return Cell(MODEL, task, passages, label, "", marks, marks, (), 0.5, 0.1, 0.1)


@pytest.fixture(scope="module")
def summary() -> Summary:
    labels = [entry.label for entry in ENTRIES]
    records: list[Record] = [
        cell(task, size, label) for task, size, label in itertools.product(TASKS, SIZES, labels)
    ]
    swept = (entry.label for share in LINK_SHARES for entry in linked(share))
    records += [cell("two-hop", 8, label) for label in swept if label not in labels]
    records += [
        Cost(MODEL, size, label, "", (0.01 * size,), (0.02 * size,), 1)
        for size, label in itertools.product(SIZES, labels)
    ]
    return Summary(records)


@pytest.fixture(scope="module", params=["accuracy", "cost", "links", "retention"])
def figure(request: pytest.FixtureRequest, summary: Summary) -> Figure:
    made = {
        "accuracy": lambda: accuracy(summary, MODEL, "single-hop", ENTRIES),
        "cost": lambda: cost(summary, ENTRIES),
        "links": lambda: links(summary, MODEL, "two-hop"),
        "retention": lambda: retention(summary, ENTRIES),
    }[request.param]()
    made.set_dpi(DPI)
    FigureCanvasAgg(made).draw()
    return made


def test_legends_cover_nothing_and_are_seen_whole(figure: Figure) -> None:
    legends = [axes.get_legend() for axes in figure.axes]
    boxes = [one.get_window_extent() for one in (*legends, *figure.legends) if one is not None]
    panels = [axes.get_window_extent() for axes in figure.axes if axes.get_visible()]
    for box in boxes:
        for other in (*panels, *(one for one in boxes if one is not box)):
            assert Bbox.intersection(box, other) is None
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1


def test_every_method_has_its_name_beside_its_line(summary: Summary) -> None:
    for figure in (accuracy(summary, MODEL, "single-hop", ENTRIES), cost(summary, ENTRIES)):
        named = {
            text.get_text()
            for axes in figure.axes
            if (legend := axes.get_legend()) is not None
            for text in legend.get_texts()
        }
        assert named == {entry.label for entry in ENTRIES}


def test_no_picture_is_wider_than_a_page_shows(figure: Figure) -> None:
    assert figure.bbox.width <= WIDEST
