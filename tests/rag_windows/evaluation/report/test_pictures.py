"""Charts: what is drawn, and that a figure fits into a page."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from rag_windows.evaluation.report.depths import Curve, Point, _limits, _shared
from rag_windows.evaluation.report.palette import looks
from rag_windows.evaluation.report.pictures import Absent, _points, pictures
from rag_windows.evaluation.report.ticks import _apart, seconds
from tests.rag_windows.evaluation.report import invented

Figure = pytest.importorskip("matplotlib.figure", reason="the charts need matplotlib").Figure


def test_three_charts_of_a_whole_run() -> None:
    run = invented.run(methods=("sequential", "ape"), depths=(1, 3), questions=10, passages=3)
    made = pictures(run.summary, "run1")
    ids: list[str] = []
    for one in made:
        assert not isinstance(one, Absent)
        for svg in (one.wide, one.narrow):
            root = ElementTree.fromstring(str(svg))  # noqa: S314 - the package's own
            assert root.tag == "svg"
            assert "width" not in root.attrib
            assert "height" not in root.attrib
            assert root.attrib["role"] == "img"
            named = {element.attrib["id"] for element in root.iter() if "id" in element.attrib}
            assert set(root.attrib["aria-labelledby"].split()) <= named
            assert set(re.findall(r"url\(#([^)]+)\)", svg)) <= named
            assert (root[0].tag, root[1].tag) == ("title", "desc")
            assert root[0].text == one.title
            # Colours come from the page, in every scheme.
            assert not re.search(r"#[0-9a-f]{6}", svg)
            assert "<style" not in svg
            ids += [e.attrib["id"] for e in root.iter() if "id" in e.attrib]
        assert "sequential" in one.wide
    assert len(ids) == len(set(ids))


def test_methods_look_different_and_the_base_like_ink() -> None:
    found = looks(["base", *"abcdefghijkl"], "base")
    assert found["base"].colour == "#010101"
    assert len({(one.colour, one.marker) for one in found.values()}) == 13


def test_many_methods_share_panels() -> None:
    names = ["base", *(f"m{n}" for n in range(9))]
    panels = _shared(names, "base")
    assert all(panel[0] == "base" and len(panel) <= 6 for panel in panels)
    assert sorted(one for panel in panels for one in panel[1:]) == names[1:]
    assert _shared(names[:5], "base") == [names[:5]]


def test_marks_keep_apart() -> None:
    assert _apart([1, 2, 3, 4, 5, 10, 20], 200)[0] == 1
    assert _apart([1, 2, 3, 4, 5, 10, 20], 10_000) == [1, 2, 3, 4, 5, 10, 20]
    assert len(_apart(list(range(1, 100)), 200)) < 10
    assert _apart([7], 100) == [7]


def test_trifles_look_like_trifles() -> None:
    flat = [Curve("a", (Point(1, 100.0, 100.0, 100.0), Point(4, 99.9, 99.9, 99.9)))]
    low, high = _limits(flat)
    assert low < 98
    assert 100 < high < 101
    axes = Figure().subplots()
    seconds(axes.yaxis, [0.5, 0.51])
    assert len(axes.get_yticks()) >= 2
    assert axes.get_ylim()[0] < 0.25


def test_a_sweep_over_sizes_has_its_curve() -> None:
    run = invented.run(
        methods=("sequential", "ape"),
        depths=(None,),
        questions=12,
        passages=3,
        kinds=("1 passage", "8 passages", "position 50%"),
        timed=False,
    )
    points = [list(_points(arm)) for arm in run.summary.arms]
    assert [[one.windows for one in found] for found in points] == [[1, 8], [1, 8]]
    assert not isinstance(pictures(run.summary, "run1")[0], Absent)


def test_no_shots_have_no_place_on_a_logarithmic_axis() -> None:
    arm = invented.run(questions=2, methods=("ape",), depths=(2,), passages=2).summary.arms[0]
    assert [one.windows for one in _points(replace(arm, top_k=2))] == [2]
    assert list(_points(replace(arm, top_k=0))) == []
