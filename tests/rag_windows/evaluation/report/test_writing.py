"""The two files: whole, harmless, and honest about what is not there."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rag_windows import InputError, MissingExtraError
from rag_windows.evaluation.report import write_report
from rag_windows.evaluation.report.text import escaped
from tests.rag_windows.evaluation.report import hostile, invented

pytest.importorskip("matplotlib", reason="the charts need matplotlib")

HARMLESS = set(
    """html head meta title style body header main footer section nav h1 h2 h3 h4 h5 p a ul li dl dt
    dd div span bdi strong table thead tbody tr th td details summary figure figcaption pre
    svg g path use defs clippath rect text tspan desc""".split()
)
ATTRIBUTES = set(
    """lang charset http-equiv content name id class style href role tabindex dir scope open
    aria-label aria-labelledby viewbox d transform clip-path x y width height""".split()
)


class Reader(HTMLParser):
    """What a browser would make elements of."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)
        self.links += [value or "" for name, value in attrs if name == "href"]
        self.ids += [value or "" for name, value in attrs if name == "id"]


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    page, text = write_report([hostile.run()], tmp_path_factory.mktemp("hostile"))
    return page.read_text(encoding="utf-8"), text.read_text(encoding="utf-8")


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    return reader


def test_hostile_text_stays_text(bad: tuple[str, str]) -> None:
    reader = read(bad[0])
    assert reader.tags <= HARMLESS
    assert reader.attributes <= ATTRIBUTES
    assert all(link.startswith("#") for link in reader.links)
    assert {link[1:] for link in reader.links} <= set(reader.ids)
    assert len(set(reader.ids)) == len(reader.ids)
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069\ufffe]", bad[0])
    assert "http://" not in bad[0].replace("http-equiv", "")
    assert "Content-Security-Policy" in bad[0]
    assert "default-src 'none'" in bad[0]


def test_a_large_passage_makes_no_large_report(bad: tuple[str, str]) -> None:
    assert "shown: the first 2,000 of" in bad[0]
    assert len(bad[0]) < 2_000_000


def test_hostile_text_is_nothing_in_markdown(bad: tuple[str, str]) -> None:
    shown = "\n".join(line for line in bad[1].splitlines() if not line.startswith("    "))
    assert not re.search(r"<[a-zA-Z/!]", shown)
    assert not re.search(r"(?<!\\)\]\(", shown)
    for table in re.findall(r"(?:^\|.*\n)+", bad[1], re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1
    assert escaped("a|b*<i>&\n# c") == r"a\|b\*&lt;i&gt;&amp; \# c"


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    run = invented.run(methods=("pcw",), depths=(2,), questions=3, kinds=(), timed=False)
    page, text = write_report([replace(run, examples=())], tmp_path / "new")
    assert page.name == "report.html"
    for found in (page.read_text(), text.read_text().replace("\\", "")):
        assert "Run it with several, such as --top-k 1,5,20" in found
        assert "Run with --speed 20" in found
        assert "have no kinds" in found
    assert "<svg" not in page.read_text()


def test_an_empty_run_has_a_report(tmp_path: Path) -> None:
    task = invented.Asked((invented.example(0), invented.example(1)))
    compared = invented.arms(("sequential", "ape"), (2,))
    page, _ = write_report([invented.reported(task, compared, {}, {})], tmp_path)
    text = page.read_text()
    assert "There are no figures yet" in text
    assert "answers are missing (sequential@2 2, ape@2 2)" in text
    assert "Not asked yet" in text.replace("not asked", "Not asked")


def test_several_runs_share_ten_questions(tmp_path: Path) -> None:
    made = invented.run(
        methods=("sequential", "ape"), depths=(2,), questions=8, kinds=(), timed=False
    )
    page, text = write_report([replace(made, title=f"run {n}") for n in range(3)], tmp_path)
    found = page.read_text()
    assert found.count('class="example"') == 10
    assert "All runs" in found
    assert "not between runs" in text.read_text()
    assert len(set(read(found).ids)) == len(read(found).ids)


def test_the_same_run_makes_the_same_report(tmp_path: Path) -> None:
    pages = []
    for name in "ab":
        run = invented.run(methods=("sequential", "ape"), depths=(1, 2), questions=6)
        pages.append(write_report([run], tmp_path / name)[0].read_bytes())
    assert pages[0] == pages[1]


def test_a_single_conversation_has_no_intervals(tmp_path: Path) -> None:
    run = invented.run(methods=("sequential", "ape"), depths=(2,), questions=4, kinds=())
    assert "There are no intervals" in write_report([run], tmp_path)[1].read_text()


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = invented.run(methods=("ape",), depths=(1, 2), questions=6, timed=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"\.\[eval\]"):
        write_report([run], tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one run"):
        write_report([], tmp_path)
