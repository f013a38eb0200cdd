"""The report in a real browser, at a desk and on a phone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rag_windows.evaluation.report import write_report
from tests.rag_windows.evaluation.report import hostile, invented

pytest.importorskip("matplotlib", reason="the charts need matplotlib")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

SIZES = {"desk": (1280, 900), "phone": (390, 844)}
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
CHARTS = 3

OVERLAPS = """() => {
  const found = [];
  for (const svg of document.querySelectorAll('figure.chart svg')) {
    const frame = svg.getBoundingClientRect();
    if (!frame.width) continue;
    const texts = [...svg.querySelectorAll('text')].map(
      t => [t.textContent, t.getBoundingClientRect()]);
    texts.forEach(([a, r], i) => {
      if (r.left < frame.left - 2 || r.right > frame.right + 2 || r.top < frame.top - 2
          || r.bottom > frame.bottom + 2) found.push(['cut', a]);
      for (const [b, o] of texts.slice(i + 1)) {
        const wide = Math.min(r.right, o.right) - Math.max(r.left, o.left);
        const high = Math.min(r.bottom, o.bottom) - Math.max(r.top, o.top);
        if (wide > 1 && high > 3) found.push(['over', a, b]);
      }
    });
  }
  return found;
}"""

SMALL_TEXT = """() => [...document.querySelectorAll('body *')].filter(e =>
    [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) && e.getClientRects().length
    && (e.closest('svg')
        ? e.getBoundingClientRect().width && e.closest('svg').getBoundingClientRect().width
          / e.closest('svg').viewBox.baseVal.width * parseFloat(getComputedStyle(e).fontSize)
        : parseFloat(getComputedStyle(e).fontSize)) < 13.9
  ).map(e => e.tagName + ' ' + e.textContent.slice(0, 40))"""


@dataclass
class Shown:
    """A page, with what it did while it was loaded."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is on the path")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    runs = {
        "plain": [invented.run(questions=20, passages=12, depths=(1, 4, 12))],
        "hostile": [hostile.run()],
        "bare": [
            invented.run(methods=("pcw",), depths=(None,), questions=4, kinds=(), timed=False),
            invented.run(methods=("ape",), depths=(2,), questions=2, timed=False, examples=()),
        ],
    }
    return {name: write_report(made, folder / name)[0] for name, made in runs.items()}


@pytest.fixture(params=list(SIZES))
def size(request: pytest.FixtureRequest) -> tuple[int, int]:
    return SIZES[request.param]


def load(browser: Any, path: Path, size: tuple[int, int], scheme: str = "light") -> Shown:
    page = browser.new_page(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, reduced_motion="reduce"
    )
    shown = Shown(page)
    page.on("request", lambda one: shown.requests.append(one.url))
    page.on("pageerror", lambda error: shown.complaints.append(str(error)))
    page.on("console", lambda said: shown.complaints.append(f"{said.type}: {said.text}"))
    page.goto(path.as_uri())
    return shown


@pytest.mark.parametrize("name", ["plain", "hostile", "bare"])
def test_page_stays_inside_itself(
    browser: Any, reports: dict[str, Path], size: tuple[int, int], name: str
) -> None:
    shown = load(browser, reports[name], size)
    page = shown.page
    try:
        sideways = "[document.scrollingElement.scrollWidth, innerWidth]"
        folded, width = page.evaluate(sideways)
        page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        unfolded, _ = page.evaluate(sideways)
        assert (folded, unfolded, width) == (width, width, size[0])
        assert shown.requests == [reports[name].as_uri()]
        assert shown.complaints == []
        assert page.evaluate("window.hacked") is None
        assert page.evaluate("document.querySelectorAll('script, iframe, img, link').length") == 0
        assert page.evaluate(OVERLAPS) == []
        assert page.evaluate(SMALL_TEXT) == []
        low = "e => e.getBoundingClientRect().height >= 40"
        assert page.evaluate(f"[...document.querySelectorAll('summary, nav a')].every({low})")
        charts = page.locator("figure.chart svg:visible")
        boxes = [one.bounding_box() for one in charts.all()]
        assert all(box["width"] > 300 and box["height"] > 150 for box in boxes)
        assert len(boxes) == {"plain": CHARTS, "hostile": 2, "bare": 0}[name]
    finally:
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_scheme(browser: Any, reports: dict[str, Path], scheme: str) -> None:
    page = load(browser, reports["plain"], SIZES["desk"], scheme).page
    try:
        ground, ink, axis = page.evaluate(
            """() => {
              const sum = (name, one) => getComputedStyle(one)[name].match(/[0-9]+/g)
                .slice(0, 3).reduce((a, b) => a + +b, 0);
              const label = document.querySelector('figure.chart svg text');
              return [sum('backgroundColor', document.body), sum('color', document.body),
                      sum('fill', label)];
            }"""
        )
        dark = ground < ink
        assert dark == (scheme == "dark")
        assert axis == ink
    finally:
        page.close()


def test_reports_are_small(reports: dict[str, Path]) -> None:
    assert {
        name: path.stat().st_size for name, path in reports.items() if path.stat().st_size > 3e6
    } == {}
