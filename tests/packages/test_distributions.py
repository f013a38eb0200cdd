"""Each built wheel, installed by itself as users install it, is asked one question.

`make test-dist` builds the wheels first; dependencies come from the package index.
"""

from __future__ import annotations

import json
import re
import shlex
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

import rag_windows
from rag_windows.errors import install
from rag_windows.samples import samples_path
from tests.packages.environments import WHEELS, Environment, constraints, members, torch_alone
from tests.test_documents import PAGES, blocks, replaced
from tests.test_repository import FOLDERS, ROOT, project

pytestmark = pytest.mark.dist

ASKS = """
from rag_windows import WindowedLM
lm = WindowedLM.from_pretrained("tiny-reader")
passages = ["Aldan Pellby was born in Birholm.", "Vara Zelmont was born in Birmouth."]
answer = lm.generate("Where was Vara Zelmont born?", passages)
assert answer.text == "Birmouth", answer.text
"""

SCORES = """
import lm_eval_rag_windows
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
lm = get_model("rag-windows")(pretrained="tiny-reader", device="cpu")
asked = "Vara Zelmont was born in Birmouth. Where was Vara Zelmont born?", " Birmouth"
((score, _),) = lm.loglikelihood([Instance("loglikelihood", {}, asked, 0)])
assert score < 0
"""

# What others import goes first; then nothing that only POSIX has is left.
IMPORTS = """
import importlib, os, pkgutil, sys
import bm25s, filelock, jinja2, rich.console, sqlite3, torch, transformers, typer
for name in ("fcntl", "grp", "pwd", "readline", "resource", "termios"):
    sys.modules[name] = None
calls = "fork geteuid pread preadv register_at_fork sched_getaffinity sysconf"
flags = "O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK"
for name in {*f"{calls} {flags}".split()} & {*dir(os)}:
    delattr(os, name)
import rag_windows, rag_windows_retrievers
for package in (rag_windows, rag_windows_retrievers):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            print(module.name, error.name)
"""

# In an environment without other extras than `cli`: what names each, as code and as a command.
LACKS = {
    "structured": "lm.generate('Who?', ['One.'], json_schema={'type': 'object'})",
    "retrievers": "rag_windows_retrievers.DenseRetriever([rag_windows.Passage('One.')], 'any')",
    "cuda": "rag_windows.WindowedLM.from_pretrained('tiny-reader', device_map='auto')",
    "peft": "rag_windows.WindowedLM.from_pretrained('adapter')",
    "gguf": "rag_windows.WindowedLM.from_pretrained('small.gguf')",
    "pdf": ["ask", "Who?", "--docs", "small.pdf", "--model", "tiny-reader"],
    "formats": ["ask", "Who?", "--docs", "small.docx", "--model", "tiny-reader"],
    "server": ["serve"],
    "shared": "rag_windows.PassageCache(shared='s3://shelf/windows')",
    "fleet": ["warm", "--docs", "notes", "--model", "tiny-reader", "--replicas", "2"],
    "adapt": ["adapt", "--docs", "notes", "--out", "adapter", "--model", "tiny-reader"],
    "eval": ["eval", "inscit", "--data", "dev.json", "--model", "tiny-reader"],
    "figures": ["compare", "--docs", "notes", "--model", "tiny-reader", "--plot", "heat.png"],
}
ADAPTERS = {
    "langchain": "langchain_rag_windows; langchain_rag_windows.RagWindowsMiddleware",
    "llama-index": "llama_index.llms.rag_windows, llama_index.retrievers.rag_windows",
    "lm-eval": "lm_eval_rag_windows",
    "server": "rag_windows_server",
    "adapt": "rag_windows_adapt",
    "eval": "rag_windows_eval",
}
"""Extras that bring distributions of ours, without which there is nothing to import: these."""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Environment]:
    """A fresh environment with what is to be installed: `fresh("langchain-rag-windows")`."""
    shared = tmp_path_factory.mktemp("shared")
    pins, torch = constraints(shared), torch_alone(shared / "torch")

    def make(*requirements: str) -> Environment:
        environment = Environment(tmp_path_factory.mktemp("environment"), torch, pins)
        assert not environment.installed() & {*FOLDERS, "transformers", "numpy"}
        environment.install(*requirements)
        return environment

    return make


@pytest.fixture
def clone(tmp_path: Path) -> Callable[[], Environment]:
    """A fresh environment for which our own names mean nothing."""
    torch = torch_alone(tmp_path / "torch")
    return lambda: Environment(tmp_path / "environment", torch, ROOT / "constraints.txt")


def run_page(environment: Environment, page: Path) -> None:
    """Run a page's blocks of Python, one after the other in one process."""
    code = [replaced(block.code) for block in blocks(page) if block.kind == "python"]
    assert code
    environment.python("\n".join(code))


def test_each_distribution_is_built_as_wheel_and_sdist_of_the_one_version() -> None:
    sdists = (ROOT / "dist").glob("*.tar.gz")
    built = [parse_wheel_filename(path.name)[:2] for path in WHEELS]
    assert sorted(built) == sorted(parse_sdist_filename(path.name) for path in sdists)
    assert {name: str(version) for name, version in built} == dict.fromkeys(
        map(canonicalize_name, FOLDERS), rag_windows.__version__
    )


@pytest.mark.parametrize("wheel", WHEELS, ids=lambda path: path.name)
def test_a_wheel_holds_its_packages_their_types_and_the_licence(wheel: Path) -> None:
    names = set(members(wheel))
    name, version, _, _ = parse_wheel_filename(wheel.name)
    about = f"{name.replace('-', '_')}-{version}.dist-info"
    stated = project(FOLDERS[name])
    assert f"{about}/licenses/LICENSE" in names
    assert sum(one.endswith("py.typed") for one in names) == (2 if name == "rag-windows" else 1)
    tops = {one.partition("/")[0] for one in names} - {about}
    assert tops <= {"rag_windows", "rag_windows_retrievers", name.replace("-", "_"), "llama_index"}
    # The namespaces are LlamaIndex's.
    assert not names & {"llama_index/__init__.py", "llama_index/llms/__init__.py"}
    (path,) = (one for one in members(wheel) if one.endswith("METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(path).decode())
    assert metadata["Version"] == rag_windows.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Summary"] == stated["description"]


def test_the_package_has_one_model_the_sample_corpus_and_less_than_six_megabytes() -> None:
    (wheel,) = (path for path in WHEELS if path.name.startswith("rag_windows-"))
    assert wheel.stat().st_size < 6_000_000
    names = list(members(wheel))
    weights = [name for name in names if name.endswith(".safetensors")]
    assert weights == ["rag_windows/models/tiny-reader/model.safetensors"]
    corpus = len(list((samples_path() / "corpus").iterdir()))
    assert sum(name.startswith("rag_windows/samples/corpus/") for name in names) == corpus


def test_rag_windows_alone_then_with_its_command(fresh: Callable[..., Environment]) -> None:
    environment = fresh("rag-windows")
    assert not environment.installed() & {*FOLDERS, "bm25s", "icu4py"} - {"rag-windows"}
    environment.python(ASKS)
    told = environment.python(
        "import rag_windows\n"
        "try:\n    import rag_windows_retrievers\n"
        "except rag_windows.MissingExtraError as error:\n    print(error)\n"
    )
    asked = "ask", "What does Zelwick Academy make?", "--json"
    for done in (environment.command(*asked), environment.command("--version")):
        assert (done.returncode, done.stdout) == (2, "")
        told += done.stderr
    assert [line.partition("; ")[2] for line in told.splitlines()] == [f"run: {install('cli')}"] * 3

    environment.install("rag-windows[cli]")
    assert not environment.installed() & {*FOLDERS} - {"rag-windows"}
    assert environment.command("--version").stdout.strip() == rag_windows.__version__
    assert json.loads(environment.command(*asked).stdout)["answer"] == "cheese"
    assert environment.python(IMPORTS) == ""

    folder = environment.folder
    (folder / "small.pdf").write_bytes(b"%PDF-1.4\n")
    (folder / "small.docx").write_bytes(b"PK")
    (folder / "small.gguf").write_bytes(b"GGUF")
    (folder / "notes").mkdir()
    (folder / "notes" / "one.md").write_text("# One\n\nOne is white.\n")
    (folder / "adapter").mkdir()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "tiny-reader"}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    assert {"cli", *LACKS, *ADAPTERS} == {*project()["optional-dependencies"]}
    calls = {extra: code for extra, code in LACKS.items() if isinstance(code, str)}
    told = environment.python(
        "import rag_windows, rag_windows_retrievers\n"
        "lm = rag_windows.WindowedLM.from_pretrained('tiny-reader')\n"
        f"for extra, code in {calls!r}.items():\n"
        "    try:\n        eval(code)\n"
        "    except rag_windows.MissingExtraError as error:\n        print(extra, error)\n"
    )
    lines = dict(line.split(" ", 1) for line in told.splitlines())
    assert lines.keys() == calls.keys()
    for extra in LACKS.keys() - calls.keys():
        done = environment.command(*LACKS[extra])
        assert done.returncode == 2
        lines[extra] = done.stderr.rstrip("\n")
    for extra, line in lines.items():
        assert f'run: pip install "rag-windows[{extra}]"' in line
        assert "\n" not in line


def test_the_langchain_adapter_alone(fresh: Callable[..., Environment]) -> None:
    environment = fresh("langchain-rag-windows")
    assert environment.installed() & {*FOLDERS, "langchain"} == {
        "langchain-rag-windows",
        "rag-windows",
    }
    environment.python(ASKS)
    run_page(environment, ROOT / "integrations/langchain/README.md")
    told = environment.python(
        "import langchain_rag_windows, rag_windows\n"
        "try:\n    langchain_rag_windows.RagWindowsMiddleware\n"
        "except rag_windows.MissingExtraError as error:\n    print(error)\n"
        "try:\n    import langchain_rag_windows.retrievers\n"
        "except rag_windows.MissingExtraError as error:\n    print(error)\n"
    )
    commands = [line.partition("; run: ")[2] for line in told.splitlines()]
    assert commands == [install("langchain"), install("cli")]


def test_the_llama_index_adapters_alone(fresh: Callable[..., Environment]) -> None:
    environment = fresh("llama-index-retrievers-rag-windows")
    run_page(environment, ROOT / "integrations/llama_index_retrievers/README.md")
    # A second distribution in the framework's namespaces disturbs the first one no more than the
    # framework itself.
    environment.install("llama-index-llms-rag-windows")
    environment.python(ASKS)
    run_page(environment, ROOT / "integrations/llama_index_llms/README.md")
    run_page(environment, ROOT / "integrations/llama_index_retrievers/README.md")


def test_the_harness_alone_then_all_adapters_and_the_readme(
    fresh: Callable[..., Environment],
) -> None:
    environment = fresh("lm-eval-rag-windows")
    environment.python(ASKS)
    run_page(environment, ROOT / "integrations/lm_eval/README.md")
    environment.python(SCORES)
    environment.install("rag-windows[langchain,llama-index,lm-eval,pdf]")
    others = {"rag-windows-adapt", "rag-windows-eval", "rag-windows-server", "vllm-rag-windows"}
    assert environment.installed() >= {*FOLDERS, "langchain"} - others
    (environment.folder / "notes").symlink_to(ROOT / "examples" / "notes")
    run_page(environment, ROOT / "README.md")


def test_the_server_and_the_evaluations_alone(fresh: Callable[..., Environment]) -> None:
    environment = fresh("rag-windows-server")
    run_page(environment, ROOT / "integrations/server/README.md")
    assert environment.command("serve", "--help").returncode == 0
    assert '"rag-windows[fleet]"' in environment.command("serve", "--replicas", "2").stderr
    assert '"rag-windows[eval]"' in environment.command("bench", "--help").stderr
    environment.install("rag-windows-eval")
    assert environment.command("bench", "--help").returncode == 0
    (environment.folder / "dev.json").write_text("{}")
    asked = ("eval", "inscit", "--data", "dev.json", "--model", "tiny-reader")
    assert '"rag-windows[eval]"' in environment.command(*asked).stderr


def from_a_clone() -> list[str]:
    """The commands on our pages that install folders of a clone, those in comments included."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    commands = [one.strip() for text in texts for one in re.findall(r"pip install [^`#\n]+", text)]
    return sorted({one for one in commands if any(map(is_folder, shlex.split(one)))})


def is_folder(word: str) -> bool:
    return word.startswith(".")


@pytest.mark.parametrize("command", from_a_clone())
def test_a_command_for_a_clone_works_as_printed(
    clone: Callable[[], Environment], command: str
) -> None:
    """And behind it what pages and messages say for an index, though no index has our names."""
    environment = clone()
    environment.run_pip(command, ROOT)
    environment.python(ASKS)
    extras = {"pdf", *(one for one in ADAPTERS if f"[{one}" in command)}
    environment.run_pip(f'pip install "rag-windows[{",".join(sorted(extras))}]"')
    environment.python("import pypdf")
    for extra in extras & ADAPTERS.keys():
        environment.python(f"import {ADAPTERS[extra]}")


def test_the_connector_for_vllm_beside_an_engine_that_has_no_transformers(
    fresh: Callable[..., Environment],
) -> None:
    environment = fresh("vllm-rag-windows")
    (engine,) = (path for path in WHEELS if path.name.startswith("rag_windows-"))
    environment.install("--no-deps", str(engine))
    assert environment.installed() & {*FOLDERS, "transformers"} == {
        "rag-windows",
        "vllm-rag-windows",
    }
    environment.python(
        "import vllm_rag_windows.entries, vllm_rag_windows.paged, vllm_rag_windows.support\n"
        "from importlib.metadata import entry_points\n"
        "(plug_in,) = entry_points(group='vllm.endpoint_plugins')\n"
        "assert plug_in.name == 'rag-windows'\n"
    )
