"""Charts: what is drawn, and that a figure fits into a page."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from rag_windows.evaluation.report.charts import _looks, _points, charts
from tests.rag_windows.evaluation.report import invented

pytest.importorskip("matplotlib", reason="the charts need matplotlib")


def test_three_charts_of_a_whole_run() -> None:
    run = invented.run(methods=("sequential", "ape"), depths=(1, 3), questions=10, passages=3)
    ids: list[str] = []
    for one in charts(run.summary, "run1"):
        root = ElementTree.fromstring(one.svg)  # noqa: S314 - the package's own
        assert root.tag == "svg"
        assert not {"width", "height"} & root.attrib.keys()
        assert root.attrib["role"] == "img"
        named = {element.attrib["id"] for element in root.iter() if "id" in element.attrib}
        assert set(root.attrib["aria-labelledby"].split()) <= named
        assert set(re.findall(r"url\(#([^)]+)\)", one.svg)) <= named
        assert (root[0].tag, root[1].tag) == ("title", "desc")
        assert root[0].text == one.title
        # Colours come from the page, in every scheme.
        assert not re.search(r"#[0-9a-f]{6}", one.svg)
        assert "<style" not in one.svg
        assert "sequential" in one.svg
        ids += [e.attrib["id"] for e in root.iter() if "id" in e.attrib]
    assert len(ids) == len(set(ids))


def test_methods_look_different_and_the_base_like_ink() -> None:
    found = _looks(["base", *"abcdefghijkl"], "base")
    assert found["base"]["color"] == "#010101"
    assert len({(one["color"], one["marker"]) for one in found.values()}) == 13


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
    assert [[size for size, _ in found] for found in points] == [[1, 8], [1, 8]]
    assert charts(run.summary, "run1")[0].svg


def test_no_shots_have_no_place_on_a_logarithmic_axis() -> None:
    arm = invented.run(questions=2, methods=("ape",), depths=(2,), passages=2).summary.arms[0]
    assert [size for size, _ in _points(replace(arm, top_k=2))] == [2]
    assert list(_points(replace(arm, top_k=0))) == []
