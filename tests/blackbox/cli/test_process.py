"""The command as a process of its own: what it imports, prints, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.blackbox.cli.conftest import QUESTION, write_documents
from tests.blackbox.conftest import ROOT, Process
from tests.test_repository import pyproject

DEADLINE = 240.0
HEAVY = {"torch", "transformers", "accelerate", "pandas", "sklearn", "sympy", "apsw", "sqlite_vec"}


@pytest.fixture(scope="module", autouse=True)
def interruptible() -> Iterator[None]:
    """Shells start what runs in the background with SIGINT ignored, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def command(
    model: str,
    folder: Path,
    *args: str,
    environment: Mapping[str, str] = {},
    **pipes: Any,
) -> Iterator[subprocess.Popen[bytes]]:
    """`ask` or `chat` over the documents in a folder."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "retrievers")])
    environment = {"TERM": "dumb", "PYTHONIOENCODING": "utf-8:strict", **environment}
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    given = [sys.executable, "-m", "rag_windows.cli", *args, "--docs", "docs", "--model", model]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes}
    process = subprocess.Popen(given, env=environment, cwd=folder, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_documents(tmp_path / "docs")
    return tmp_path


@pytest.mark.slow
def test_without_any_extra_the_command_answers_and_prints_json_alone(python: Process) -> None:
    extras = ["accelerate", "datasets", "langchain", "langchain_core", "llama_index", "lm_eval"]
    extras += ["matplotlib", "pypdf", "sacrebleu", "sentence_transformers", "spacy"]
    extras += ["apsw", "sqlite_vec"]  # of the index on disk
    done = python(
        f"import sys\nfor name in {extras}: sys.modules[name] = None\n"
        "sys.argv = ['rag-windows', 'ask', 'What does Zelwick Academy make?', '--json']\n"
        "from rag_windows.cli.commands import app as main\nmain()"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["answer"] == "cheese"


SCRIPT = pyproject()["project"]["scripts"]["rag-windows"]
NEEDS_CLI = r'needs .*, which (is|are) not installed; run: pip install "rag-windows\[cli\]"'


@pytest.mark.parametrize(
    ("package", "start"),
    [
        (
            "typer",
            f"from importlib.metadata import EntryPoint\nEntryPoint('', {SCRIPT!r}, '').load()()",
        ),
        ("bm25s", "import runpy\nrunpy.run_module('rag_windows.cli', run_name='__main__')"),
    ],
    ids=["script", "module"],
)
def test_without_its_extra_the_command_is_one_line_about_it(
    package: str, start: str, python: Process
) -> None:
    done = python(
        f"import sys\nsys.modules[{package!r}] = None\n"
        f"sys.argv = ['rag-windows', 'ask', 'What does Zelwick Academy make?']\n{start}"
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(f"Error: The command rag-windows {NEEDS_CLI}", line)


def test_without_the_extra_the_retrievers_name_it(python: Process) -> None:
    done = python(
        "import sys\nsys.modules['bm25s'] = None\nfrom rag_windows import MissingExtraError\n"
        "try:\n    from rag_windows_retrievers import BM25Retriever\n"
        "except MissingExtraError as error:\n    print(error)"
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(f"rag_windows_retrievers {NEEDS_CLI}\n", done.stdout)


@pytest.mark.parametrize(
    "args",
    [["--help"], ["methods"], ["eval", "inscit", "--help"], ["ask", "Q", "--docs", "nothing"]],
)
def test_help_and_errors_of_use_do_not_wait_for_torch(args: list[str], python: Process) -> None:
    done = python(
        "import sys\nfrom rag_windows.cli.commands import app as main\n"
        f"sys.argv = ['rag-windows', *{args!r}]\n"
        "try:\n    main()\nfinally:\n"
        f"    assert not {HEAVY} & set(sys.modules)\n    print('light')"
    )
    assert done.stdout.endswith("light\n"), done.stderr
    assert done.returncode == (2 if "ask" in args else 0)


@pytest.mark.slow
def test_without_standard_error_it_answers(python: Process) -> None:
    done = python(
        "import sys\nsys.stderr = None\nfrom rag_windows.cli.commands import app\n"
        "sys.argv = ['rag-windows', 'ask', 'What does Zelwick Academy make?', '--json']\napp()",
        RAG_WINDOWS_PROGRESS_S="0.1",
    )
    assert (done.returncode, json.loads(done.stdout)["answer"]) == (0, "cheese")


def test_without_a_command_it_shows_what_to_type_first(python: Process) -> None:
    done = python("from rag_windows.cli.commands import app\napp(prog_name='rag-windows', args=[])")
    lines = [line.partition("  #")[0].split() for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr, len(lines)) == (0, "", 4)
    assert {words[0] for words in lines} == {"rag-windows"}
    assert [words[1] for words in lines] == ["demo", "ask", "ask", "--help"]
    assert {"--docs", "--model"} <= set(lines[2])


@pytest.mark.slow
def test_piped_chat_in_another_encoding(model: str, folder: Path) -> None:
    options = ("chat", "--max-new-tokens", "3")
    with command(model, folder, *options, stdin=subprocess.PIPE) as process:
        out, err = process.communicate(b"caf\xe9 bridge\nboats\n/exit\nbridge\n", timeout=DEADLINE)
    assert process.returncode == 0, err.decode()
    assert out.decode().count("first token after") == 2
    assert err == b""


@pytest.mark.slow
def test_ctrl_c_ends_an_answer_with_130(model: str, folder: Path) -> None:
    with command(model, folder, "ask", QUESTION, "--max-new-tokens", "700") as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    assert b"Traceback" not in err


@pytest.mark.slow
def test_a_closed_pipe_is_no_traceback(model: str, folder: Path) -> None:
    with command(model, folder, "ask", QUESTION, "--max-new-tokens", "700") as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.stdout.close()
        process.wait(DEADLINE)
        assert process.stderr is not None
        err = process.stderr.read()
    assert (process.returncode, err) == (1, b"")


@pytest.mark.slow
def test_a_terminal_sees_one_line_of_progress_and_a_pipe_the_json(model: str, folder: Path) -> None:
    ours, theirs = pty.openpty()
    shown = bytearray()
    environment = {"TERM": "xterm", "RAG_WINDOWS_PROGRESS_S": "0.05"}
    args = ("ask", QUESTION, "--json", "--max-new-tokens", "12")
    with command(model, folder, *args, stderr=theirs, environment=environment) as process:
        os.close(theirs)
        with suppress(OSError):  # which is how Linux says that nobody writes any more
            while part := os.read(ours, 4096):
                shown.extend(part)
        assert process.stdout is not None
        answer = json.loads(process.stdout.read())
        assert process.wait(DEADLINE) == 0
    os.close(ours)
    assert answer["passages"]
    assert f"Loading {model}".encode() in shown
    # But for the note at the end, each line that ends is erased, and the cursor comes back.
    assert shown.count(b"\n") == shown.count(b"\x1b[1A\x1b[2K") + 1
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h")
    assert b"so far" not in shown


@pytest.mark.slow
def test_chat_on_a_terminal(model: str, folder: Path) -> None:
    ours, theirs = pty.openpty()
    shown = bytearray()
    # `select` ends at descriptor 1024, and other tests may hold as many.
    readable = select.poll()
    readable.register(ours, select.POLLIN)

    def wait_for(pattern: bytes) -> None:
        end = time.monotonic() + DEADLINE
        while not re.search(pattern, shown):
            assert time.monotonic() < end, shown.decode(errors="replace")
            if readable.poll(100):
                shown.extend(os.read(ours, 4096))

    def type_line(text: bytes) -> None:
        shown.clear()
        os.write(ours, text + b"\n")

    terminal: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    with command(model, folder, "chat", "--max-new-tokens", "700", **terminal) as process:
        os.close(theirs)
        wait_for(rb"4 passages.*\r\n> $")
        type_line(b"bridge")
        wait_for(rb"bridge\r\n(?s:.{60})")
        process.send_signal(signal.SIGINT)
        wait_for(rb"\r\nStopped\.\s+> $")
        # An error ends its turn, not the conversation.
        type_line(b"bridge " * 150)
        wait_for(rb"Error: (?s:.*)> $")
        type_line(b"/clear")
        wait_for(rb"starts again(?s:.*)> $")
        type_line(b"/exit")
        assert process.wait(DEADLINE) == 0
    os.close(ours)
