"""What the documents promise: README prints what it shows, links, paths and targets exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.test_repository import ROOT

REPOSITORY = "rag-windows/rag-windows"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYPI = [ROOT / "README.md", *sorted(ROOT.glob("integrations/*/README.md"))]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_shipped_model_answers_as_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block of the shipped model and those after it, which go on from it."""
    monkeypatch.setenv("RAG_WINDOWS_CACHE_DIR", str(tmp_path / "windows"))
    fences = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    codes = [code for kind, code in fences if kind == "python"]
    (shown,) = (code for kind, code in fences if kind == "text")
    model, langchain, llama_index = codes[codes.index(next(filter(shipped, codes))) :]
    program = tmp_path / "program.py"
    cut = "print('---')\n"
    program.write_text(f"{model}{cut}{langchain}{cut}{llama_index}", encoding="utf-8")
    runpy.run_path(str(program), run_name="__main__")
    printed = capsys.readouterr().out
    first, second, third = re.sub(r"\d+%", "N%", printed).split("---\n")
    assert first == second == re.sub(r"\d+%", "N%", shown)
    assert third.startswith(f"{first.split()[0]} [0.")


def shipped(code: str) -> bool:
    return 'from_pretrained("tiny-reader"' in code


def test_the_first_example_is_ten_lines() -> None:
    block = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)[0]
    assert len([line for line in block.splitlines() if line.strip()]) <= 10


@pytest.mark.parametrize("page", PYPI, ids=lambda path: path.parent.name)
def test_pages_on_pypi_have_absolute_links(page: Path) -> None:
    """PyPI has no files beside the page; what such links name in this repository exists."""
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    assert targets
    ours = rf"https://(?:github\.com/{REPOSITORY}/(?:blob|tree)|raw\.githubusercontent\.com/{REPOSITORY})/main/([^#]+)"
    for target in targets:
        assert target.startswith("https://"), target
        if found := re.match(ours, target):
            assert (ROOT / found[1]).exists(), target


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
    named = {
        target
        for document in DOCUMENTS
        for target in re.findall(
            r"(?:`|^    |^\$ )make ([a-z-]+)",
            document.read_text(encoding="utf-8"),
            flags=re.MULTILINE,
        )
    }
    assert {"demo", "test", "check"} <= named <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text)]
    local = [target for target in targets if not target.startswith(("http:", "https:"))]
    assert [target for target in local if not (document.parent / target).exists()] == []


def test_paths_named_in_documents_exist() -> None:
    """Words in back-quotes that look like a path of this repository."""
    missing = []
    for document in DOCUMENTS:
        for name in re.findall(r"`([\w.-]+(?:/[\w.-]*)+)`", document.read_text(encoding="utf-8")):
            top = name.partition("/")[0]
            if (ROOT / top).exists() and not (ROOT / name).exists():
                missing.append(f"{document.name}: {name}")
    assert missing == []
