"""The report of `rag-windows eval`: harmless, whole, and honest about what is missing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.blackbox.conftest import Run
from tests.blackbox.test_evaluation import inscit_data

SCRIPT = "<script>window.hacked=1</script>"
IMAGE = '"><img src=x onerror="window.hacked=1">'
FRAME = "</details></section><style>body{display:none}</style><iframe src=https://example.org>"
LINK = "[here](javascript:window.hacked=1) <a href='javascript:window.hacked=1'>x</a>"
HIDDEN = "\u202eesrever\u202c \x1b[31mred \x07 \ufffe \u2066"
EVIL = f"{SCRIPT}{IMAGE}{FRAME} {LINK} | `x` {HIDDEN}"

HARMLESS = set(
    """html head meta title style body header main footer section nav h1 h2 h3 h4 h5 p a ul li dl dt
    dd div span bdi strong table thead tbody tr th td details summary pre""".split()
)
ATTRIBUTES = set(
    """lang charset http-equiv content name id class style href role tabindex dir scope open
    aria-label""".split()
)
QUICK = ("--max-new-tokens", "2")


class Tags(HTMLParser):
    """What a browser would make elements of."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def values(self, attribute: str) -> list[str]:
        return [value for name, value in self.attributes if name == attribute]


def hostile_data() -> dict[str, Any]:
    """INSCIT's form, with texts that want to be more than text wherever a text can stand."""
    data = inscit_data()
    turns = [turn for talk in data.values() for turn in talk["turns"]]
    for turn in turns:
        turn["context"][-1] = f"{EVIL} {'W' * 90}"
        for label in turn["labels"]:
            label.update(responseType=f"$\\frac{{<b>$ {SCRIPT}", response=EVIL)
            for one in label["evidence"]:
                text = f"{EVIL} {one['passage_text']} {(SCRIPT + '0123456789') * 60}"
                one.update(passage_titles=[EVIL], passage_text=text)
    return data


Reported = Callable[..., Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def reported(run: Run, folders: Path, small_folder: Path) -> Reported:
    """A run of a small model by its name, made once."""

    def made(name: str, *more: str | Path) -> Path:
        out = folders / name
        if not out.exists():
            data = folders / f"{name}.json"
            content = hostile_data() if name == "hostile" else inscit_data()
            data.write_text(json.dumps(content), encoding="utf-8")
            options = ("--data", data, "--model", small_folder, "--out", out, *QUICK)
            result = run("eval", "inscit", *options, *more)
            assert result.exit_code == 0, result.stderr
        return out

    return made


@pytest.fixture
def plain(reported: Reported) -> Path:
    return reported("plain", "--methods", "sequential,ape", "--top-k", "1,2")


@pytest.fixture
def hostile(reported: Reported, run: Run) -> Path:
    """A run whose answers, notes and names are hostile too."""
    out = reported("hostile", "--methods", "pcw,ape", "--top-k", "1,2")
    records = out / "records.jsonl"
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    changed = [{**one, "answer": f"{EVIL} {'W' * 3000}", "notes": [EVIL] * 7} for one in lines]
    records.write_text("\n".join(map(json.dumps, changed)) + "\n")
    again = run("eval", "report", out)
    assert again.exit_code == 0, again.stderr
    return out


@pytest.mark.slow
def test_hostile_text_stays_text(hostile: Path) -> None:
    page = (hostile / "report.html").read_text(encoding="utf-8")
    tags = Tags(page)
    assert tags.tags <= HARMLESS
    assert {name for name, _ in tags.attributes} <= ATTRIBUTES
    links, ids = tags.values("href"), tags.values("id")
    assert {link[1:] for link in links} <= set(ids)
    assert all(link.startswith("#") for link in links)
    assert len(set(ids)) == len(ids)
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069\ufffe]", page)
    assert "http://" not in page
    assert "default-src 'none'" in page
    assert "shown: the first 2,000 of" in page
    assert len(page) < 1_000_000


@pytest.mark.slow
def test_hostile_text_is_nothing_in_markdown(hostile: Path, run: Run) -> None:
    text = (hostile / "report.md").read_text(encoding="utf-8")
    for told in (text, run("eval", "report", hostile).stdout):
        shown = "\n".join(line for line in told.splitlines() if not line.startswith("    "))
        assert not re.search(r"<[a-zA-Z/!]", shown)
        assert not re.search(r"(?<!\\)\]\(", shown)
        assert not re.search("[\x1b\u202e]", shown)
        for table in re.findall(r"(?:^\|.*\n)+", told, re.MULTILINE):
            widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(widths) == 1


def test_a_report_tells_figures_and_questions(plain: Path) -> None:
    page = (plain / "report.html").read_text(encoding="utf-8")
    text = (plain / "report.md").read_text(encoding="utf-8").replace("\\", "")
    for words in (
        *("Quality of answers", "each condition against its base", "by kind of question", "Work"),
        *("When was the lighthouse built?", "In 1811.", "rag-windows", "machine"),
    ):
        assert words in text
        assert words in page
    # Three questions, with their passages, the attention on them and the evidence.
    assert page.count('class="example"') == 3
    assert page.count('class="badge">evidence') >= 3
    assert page.count('class="fill"') >= 5
    assert "Its lamp burnt oil until 1902" in page


@pytest.mark.slow
def test_the_same_run_makes_the_same_report(plain: Path, run: Run, tmp_path: Path) -> None:
    for name in "ab":
        assert run("eval", "report", plain, "--out", tmp_path / name).exit_code == 0
    for file in ("report.html", "report.md"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_run_with_options_of_another_version_is_named(
    plain: Path, run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "older"
    shutil.copytree(plain, out)
    source = json.loads((out / "source.json").read_text())
    source["options"]["style"] = "plain"
    (out / "source.json").write_text(json.dumps(source))
    refused = run("eval", "report", out)
    assert refused.exit_code == 2
    assert "options of another version" in refused.stderr


@pytest.mark.slow
def test_several_runs_stand_side_by_side(
    plain: Path, hostile: Path, run: Run, tmp_path: Path
) -> None:
    found = run("eval", "report", plain, hostile, plain, "--out", tmp_path, "--json")
    assert len(json.loads(found.stdout)["runs"]) == 3
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "All runs" in page
    assert "not between runs" in page
    ids = Tags(page).values("id")
    assert len(set(ids)) == len(ids)


@pytest.mark.slow
def test_what_is_not_there_is_said(
    reported: Reported, run: Run, folders: Path, tmp_path: Path
) -> None:
    kept = reported("short", "--methods", "sequential,ape", "--top-k", "1")
    out = tmp_path / "short"
    shutil.copytree(kept, out)
    lines = (out / "records.jsonl").read_text().splitlines(keepends=True)
    failed = {**json.loads(lines[1]), "answer": "", "error": "Too\x1b long.", "left_out": 3}
    cut = {**json.loads(lines[0]), "finish_reason": "length"}
    (out / "records.jsonl").write_text(f"{json.dumps(cut)}\n{json.dumps(failed)}\n{lines[2]}")
    found = run("eval", "report", out)
    assert found.exit_code == 0, found.stderr
    page = (out / "report.html").read_text(encoding="utf-8")
    for told in (page, (out / "report.md").read_text().replace("\\", "")):
        assert "answers are missing (sequential@1 1, ape@1 2)" in told.replace("&#39;", "'")
        assert "figures are of the 1 of 3 questions" in told
        assert "ape@1 has no answer to 1 question because of an error" in told
        assert "The length limit cut off 1 answer of sequential@1" in told
        assert "ape@1 left out 3 passages in 1 question" in told
        assert "There are no intervals" in told
    assert "Error: Too\\x1b long." in page
    assert "not asked yet" in page
    assert "Not finished" in found.stdout
    (out / "records.jsonl").write_text("")
    empty = run("eval", "report", out)
    assert "no question yet that every condition was asked" in empty.stdout
    assert "There are no figures yet" in (out / "report.html").read_text()


SUMS = """() => {
  const sum = name => getComputedStyle(document.body)[name].match(/[0-9]+/g)
    .slice(0, 3).reduce((a, b) => a + +b, 0);
  return [sum('backgroundColor'), sum('color')];
}"""


@pytest.mark.parametrize(
    ("name", "size", "scheme"),
    [("plain", (1280, 900), "light"), ("hostile", (390, 844), "dark")],
)
def test_a_page_stays_inside_itself_in_a_browser(
    browser: Any, request: pytest.FixtureRequest, name: str, size: tuple[int, int], scheme: str
) -> None:
    path: Path = request.getfixturevalue(name) / "report.html"
    viewport = {"width": size[0], "height": size[1]}
    page = browser.new_page(viewport=viewport, color_scheme=scheme)
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda one: asked.append(one.url))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda one: said.append(one.text))
    page.goto(path.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert page.evaluate("document.scrollingElement.scrollWidth") == size[0]
    assert (asked, said) == ([path.as_uri()], [])
    assert page.evaluate("window.hacked") is None
    ground, ink = page.evaluate(SUMS)
    assert (ground < ink) == (scheme == "dark")
    page.close()
