"""What holds for every source file, and for the versions that the repository names."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions, packages_distributions
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import rag_windows

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "rag_windows",
    "retrievers/rag_windows_retrievers",
    "integrations/adapt",
    "integrations/eval",
    "integrations/langchain",
    "integrations/llama_index_llms",
    "integrations/llama_index_retrievers",
    "integrations/lm_eval",
    "integrations/server",
    "integrations/vllm_rag_windows",
)
DISTRIBUTIONS = (".", *(package for package in PACKAGES if package.startswith("integrations")))
"""Their folders; rag-windows itself goes first."""

OURS = {
    "rag_windows",
    "rag_windows_adapt",
    "rag_windows_eval",
    "rag_windows_retrievers",
    "rag_windows_server",
    "langchain_rag_windows",
    "lm_eval_rag_windows",
    "vllm_rag_windows",
    "benchmarks",
    "tests",
    "docs",
}


@pytest.fixture(scope="module", autouse=True)
def engine_alone() -> Iterator[subprocess.Popen[str]]:
    """A process that answers and prints its extras, beside the tests before its own.

    What transformers imports wherever it is, such as regex, is not among them.
    """
    extras = {"bm25s", "icu4py", "matplotlib", "rich", "typer"}
    extras |= {"rag_windows.cli", "rag_windows_retrievers"}
    code = f"""
import sys
from rag_windows import WindowedLM
passages = ["Aldan Pellby was born in Birholm.", "Vara Zelmont was born in Sulava."]
lm = WindowedLM.from_pretrained("tiny-reader")
print(lm.generate("Where was Vara Zelmont born?", passages).text)
print(sorted(set(sys.modules) & {extras!r}))
"""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=pipe, stderr=pipe, text=True
    )
    yield process
    process.kill()
    process.communicate()


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}"


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def pyproject(folder: str = ".") -> dict[str, Any]:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))


def project(folder: str = ".") -> dict[str, Any]:
    return pyproject(folder)["project"]


FOLDERS = {project(folder)["name"]: folder for folder in DISTRIBUTIONS}
"""Of each distribution, by its name."""


def requirements(*extras: str, of: str = "rag-windows") -> list[Requirement]:
    """What a distribution needs of others, with the extras; our own among them are followed."""
    stated = project(FOLDERS[of])
    lines = [*stated["dependencies"]]
    for extra in extras:
        lines += stated["optional-dependencies"][extra]
    found = []
    for requirement in map(Requirement, lines):
        if requirement.name in FOLDERS:
            found += requirements(*requirement.extras, of=requirement.name)
        else:
            found.append(requirement)
    return found


def group(name: str) -> list[Requirement]:
    """What a dependency group of the repository installs; groups in it are followed."""
    found = []
    for line in pyproject()["dependency-groups"][name]:
        found += [Requirement(line)] if isinstance(line, str) else group(line["include-group"])
    return found


def everything() -> list[Requirement]:
    """What any part of the repository needs."""
    groups = [found for name in pyproject()["dependency-groups"] for found in group(name)]
    return requirements(*project()["optional-dependencies"]) + groups


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def test_nobody_else_s_code_is_trusted() -> None:
    """What ruff's rules against pickle, eval and assert do not see."""
    trusting = re.compile(r"(trust_remote_code|allow_pickle)=True|\bnp\.load\(")
    hits = [
        where(path, number)
        for path in sources(*PACKAGES)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if (found := trusting.search(line)) and f"{found[0]} is refused" not in line
    ]
    assert hits == []


def test_suppressions_name_their_rule_and_reason() -> None:
    bare = []
    for path in sources(*PACKAGES, "tests", "examples", "docs"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            code, mark, comment = line.partition("  # ")
            if not mark or code.lstrip().startswith("#"):
                continue
            found = re.match(
                r"(?:type: ignore(?P<kind>\[[\w\-, ]+\])?|noqa(?P<rule>: \w+)?)", comment
            )
            if found and not (
                (found["kind"] or found["rule"]) and len(comment[found.end() :].strip(" #-")) > 5
            ):
                bare.append(where(path, number))
    assert bare == []


# What each part of the code may import beyond the standard library: its extras in pyproject.toml.
EXTRAS_OF = {
    "rag_windows": ("peft", "structured"),
    "rag_windows/cache": ("shared",),
    "rag_windows/calibration": ("figures",),
    "rag_windows/cli": ("cli",),
    "rag_windows/attention/kernels": ("cuda",),
    "integrations/adapt": ("adapt",),
    "integrations/eval": ("eval",),
    "integrations/server": ("fleet", "server"),
    "retrievers/rag_windows_retrievers": ("formats", "pdf", "retrievers", "shared"),
    "integrations/langchain": ("langchain", "retrievers"),
    "integrations/llama_index_llms": ("llama-index", "retrievers"),
    "integrations/llama_index_retrievers": ("llama-index", "retrievers"),
    "integrations/lm_eval": ("lm-eval",),
    "integrations/vllm_rag_windows": ("server",),
    "docs": ("figures",),
    "examples": ("langchain", "llama-index"),
    "tests": (
        "eval",
        "figures",
        "fleet",
        "formats",
        "langchain",
        "llama-index",
        "lm-eval",
        "pdf",
        "peft",
        "retrievers",
        "server",
        "shared",
    ),
}
GROUP_OF = {"examples": "test", "tests": "test", "docs": "docs"}
"""Parts that may import what a dependency group installs, too."""

BROUGHT_BY_PYDANTIC = {"pydantic_core", "typing_extensions"}
"""Its documentation has them imported so."""

LOADS_US = {"vllm"}
"""What loads a part of ours as a plug-in, and is never installed with it."""


@functools.cache
def declared(part: str) -> set[str]:
    """Names of the distributions that a part may import."""
    needed = requirements(*EXTRAS_OF[part]) + (group(GROUP_OF[part]) if part in GROUP_OF else [])
    return {canonicalize_name(requirement.name) for requirement in needed}


def part_of(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    return max((part for part in EXTRAS_OF if name.startswith(part + "/")), key=len)


def modules(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of what a file imports; `from a import b` is a.b."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def imported(path: Path) -> set[tuple[int, str]]:
    return {(line, name.partition(".")[0]) for line, name in modules(path)}


def test_every_import_is_a_declared_dependency() -> None:
    distributions = packages_distributions()
    undeclared = []
    for path in sources(*EXTRAS_OF):
        for line, module in sorted(imported(path)):
            if module in sys.stdlib_module_names | OURS | BROUGHT_BY_PYDANTIC | LOADS_US:
                continue
            owners = {canonicalize_name(name) for name in distributions.get(module, [module])}
            if not owners & declared(part_of(path)):
                undeclared.append(f"{where(path, line)} imports {module}")
    assert undeclared == []


def test_what_is_pinned_installs_on_every_python_that_is_supported() -> None:
    """Debian 12 has Python 3.11.2, which a pin of the repository's own tools may shut out."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    (least,) = re.findall(r"\d+\.\d+", wanted)
    pins = constraints()
    assert [
        one.name
        for one in distributions()
        if canonicalize_name(one.name) in pins
        and f"{least}.0" not in SpecifierSet(str(one.metadata.json.get("requires_python", "")))
    ] == []


def test_pins_lie_inside_the_declared_ranges() -> None:
    pins = constraints()
    for requirement in everything():
        assert canonicalize_name(requirement.name) in pins, f"{requirement} has no pin"
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)])


def test_the_version_is_stated_once_and_lies_in_the_ranges_of_the_others() -> None:
    for folder in DISTRIBUTIONS:
        assert project(folder)["dynamic"] == ["version"]
        path = ROOT / folder / pyproject(folder)["tool"]["hatch"]["version"]["path"]
        assert path.samefile(rag_windows.__file__)
        lines = [*project(folder)["dependencies"]]
        lines += chain.from_iterable(project(folder).get("optional-dependencies", {}).values())
        ours = [one for one in map(Requirement, lines) if one.name in FOLDERS]
        assert all(one.specifier.contains(rag_windows.__version__) for one in ours)
        assert all(str(one.specifier) for one in ours if one.name != project(folder)["name"])


def test_every_distribution_has_the_same_licence_and_says_that_it_is_typed() -> None:
    licence = (ROOT / "LICENSE").read_bytes()
    for folder in DISTRIBUTIONS:
        assert (ROOT / folder / "LICENSE").read_bytes() == licence
        for package in pyproject(folder)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
            top = ROOT / folder / package
            while not (top / "__init__.py").exists():  # namespaces of a framework
                (top,) = top.iterdir()
            assert (top / "py.typed").exists(), top


def test_readmes_lead_somewhere_on_the_package_index() -> None:
    for folder in DISTRIBUTIONS:
        text = (ROOT / folder / project(folder)["readme"]).read_text(encoding="utf-8")
        links = re.findall(r"\]\(([^)\s]+)\)", text)
        assert [link for link in links if not link.startswith("https://")] == [], folder


def test_commands_name_extras_that_exist() -> None:
    paths = [*sources(*PACKAGES, "docs", "examples"), ROOT / "README.md", *ROOT.glob("docs/*.md")]
    named = re.compile(r"(?:rag-windows|\"\.)\[([a-z,-]+)\]|require\([^)]*extra=\"([a-z-]+)\"")
    extras = [
        (str(path.relative_to(ROOT)), extra)
        for path in paths
        for found in named.finditer(path.read_text(encoding="utf-8"))
        for extra in (found[1] or found[2]).split(",")
    ]
    assert {extra for _, extra in extras} >= {"gguf", "pdf", "retrievers"}
    assert [one for one in extras if one[1] not in project()["optional-dependencies"]] == []


def test_makefile_installs_the_pinned_torch_and_every_extra() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"TORCH := torch=={constraints()['torch']}\n" in makefile
    assert f"EXTRAS := {','.join(sorted(project()['optional-dependencies']))}\n" in makefile


def test_every_dependency_is_described() -> None:
    described = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    names = {requirement.name for requirement in everything()}
    assert {name for name in names if f"\n| {name} |" not in described} == set()


def test_the_engine_needs_no_extra(engine_alone: subprocess.Popen[str]) -> None:
    out, err = engine_alone.communicate()
    assert engine_alone.returncode == 0, err
    assert out.splitlines() == ["Sulava", "[]"]


@pytest.mark.parametrize("module", ["rag_windows.x", "rag_windows_retrievers.x"])
def test_a_warning_in_our_packages_is_an_error(module: str) -> None:
    with pytest.raises(UserWarning, match="spoken"):
        exec("import warnings; warnings.warn('spoken')", {"__name__": module})  # noqa: S102 - the module name decides, and only a namespace can set it


VAGUE = {"crowd", "dealings", "kept", "room", "shelf", "told", "twin", "weighed"}
"""Words that say too little in a name or a docstring: message, stored, budget, buffer, mirror."""


def test_names_and_docstrings_use_the_words_of_the_field() -> None:
    found = set()
    for path in sources(*PACKAGES):
        for node in ast.walk(tree(path)):
            texts = [getattr(node, name, None) for name in ("id", "attr", "arg", "name", "asname")]
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                texts.append(ast.get_docstring(node))
            words = {word for text in texts if text for word in re.findall("[a-z]+", text.lower())}
            found |= {f"{where(path, getattr(node, 'lineno', 1))} {word}" for word in words & VAGUE}
    assert sorted(found) == []


SHARED_NAMES = {
    "RagWindowsRetriever": "the name in both frameworks",
    "RagWindowsVectorStore": "the name in both frameworks",
    "WindowedPrompt": "public in LlamaIndex's adapter and in the connector for vLLM",
}
"""Names of more than one public class, and why."""


def test_the_name_of_a_public_class_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for path in sources(*PACKAGES):
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(where(path, node.lineno))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice.keys() == SHARED_NAMES.keys(), twice
