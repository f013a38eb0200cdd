"""Mistakes are one line and exit code 2, and help needs no torch."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from rag_windows import WindowedLM
from tests.blackbox.cli.conftest import QUESTION, refused
from tests.blackbox.conftest import Run


@pytest.fixture
def bad(docs: Path, model: str) -> Path:
    """Files that can't be used, in ./bad."""
    bad = docs.parent / "bad"
    for folder in ("empty", "no-model", "t5"):
        (bad / folder).mkdir(parents=True)
    (bad / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (bad / "latin.txt").write_bytes(b"caf\xe9")
    (bad / "binary.txt").write_bytes(b"\x00\x01")
    (bad / "empty" / "a.md").touch()
    (bad / "t5" / "config.json").write_text(json.dumps({"model_type": "t5"}))
    for file in Path(model).glob("tokenizer*"):
        (bad / "t5" / file.name).write_bytes(file.read_bytes())
    return bad


@pytest.mark.usefixtures("bad")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--docs nothing.md", "nothing.md: no such file or folder"),
        ("--docs nothing/*.md", "nothing/*.md: the pattern matches nothing"),
        ("--docs bad/empty", "No text found in bad/empty"),
        ("--strict --docs bad/broken.jsonl", "bad/broken.jsonl:2: not a JSON object"),
        ("--docs bad/latin.txt", "bad/latin.txt:1: not valid UTF-8"),
        ("--docs bad/binary.txt", "bad/binary.txt: binary"),
        ("--docs", "--docs"),
        ("--docs docs/bridge.md docs/olsen.txt", "put --docs before each file"),
        ("--method magic", "Unknown method 'magic'"),
        ("--method pcw --rag-scale 0.9", "'pcw' has no parameter 'scale' (it has none)"),
        ("--method ape:scale=1 --rag-scale 0.9", "set the same number"),
        ("--rag-temperature 0", "APE temperature must be a finite number above 0"),
        ("--link-tokens most", "tokens"),
        ("--link-tokens 1.5", "tokens"),
        ("--link-choose middle", "'last'"),
        ("--model no/such-model", "Model 'no/such-model'"),
        ("--model ./nothing", "nothing"),
        ("--model bad/no-model", "config.json"),
        ("--model bad/t5", "'bad/t5'"),
        ("--device gpu", "'gpu' must be one of auto, cpu, cuda and cuda:N"),
        ("--device cuda:99", "--device cuda:99 can't be used: PyTorch sees"),
        ("--cache-dir docs/bridge.md", "docs/bridge.md"),
        ("--dtype int8", "'--dtype'"),
        ("--top-k 0", "'--top-k'"),
        ("--max-new-tokens 0", "'--max-new-tokens'"),
        ("--temperature -1", "'--temperature'"),
        ("--max-new-tokens 9999", "9999"),
        ("--nonsense", "--nonsense"),
        ("more words", "unexpected extra argument"),
    ],
)
def test_every_error_is_one_line(run: Run, model: str, args: str, message: str) -> None:
    given = args.split()
    given += [] if "--docs" in args else ["--docs", "docs"]
    given += [] if "--model" in args else ["--model", model]
    assert message in refused(run, "ask", QUESTION, *given)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ask"], "Missing argument 'QUESTION'"),
        (["ask", " \n"], "The question is empty"),
        (["ask", "docs/bridge.md"], "'docs/bridge.md' is the name of a file"),
        (["ask", "typo.md", "--docs", "docs"], "'typo.md' is the name of a file"),
        (["aks", "x"], "No such command 'aks'. Did you mean 'ask'?"),
        (["chat", "extra"], "unexpected extra argument"),
        (["chat", "--docs", "nothing\x1b.md", "--model", "m"], "nothing\\x1b.md: no such file"),
        (["cache", "warm", "--top-k", "3"], "--top-k"),
        (["cache", "stats", "--cache-dir", "docs/bridge.md"], "docs/bridge.md"),
        (["cache", "prune", "--disk", "much"], "disk="),
        (["cache", "prune", "--disk", "-1GiB"], "disk="),
        (["eval", "passages", "--temperature", "0.9"], "No such option: --temperature"),
        (["classify", "x", "--demos", "none.jsonl"], "can't be read"),
        (["classify", "x", "--demos", "empty.jsonl"], "has no lines. Write lines such as"),
        (["classify", "x", "--demos", "docs/olsen.txt"], "line 1 is not valid JSON at character 1"),
        (["bench", "--shape", "tiny", "--model", "m"], "--shape and --model can't both be given"),
    ],
)
def test_commands_and_arguments(run: Run, docs: Path, args: list[str], message: str) -> None:
    Path("empty.jsonl").touch()
    assert message in refused(run, *args, stdin="Who?\n")


@pytest.mark.parametrize("command", [("ask", QUESTION), ("chat",), ("cache", "warm")])
def test_own_documents_are_not_answered_by_the_toy_model(
    run: Run, docs: Path, command: tuple[str, ...]
) -> None:
    told = run(*command, "--docs", "docs", stdin="Who?\n")
    assert (told.exit_code, told.stdout) == (2, "")
    name, why = told.stderr.splitlines()
    assert name.startswith("Error: --docs needs a model")
    assert all(word in name for word in ("--model", "RAG_WINDOWS_MODEL", "Hub"))
    assert "the sample corpus only" in why
    assert "--model tiny-reader" in why


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (torch.OutOfMemoryError("CUDA"), 2, "memory is full. Read fewer passages (--top-k)"),
        (RuntimeError("a bug"), 1, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_is_no_mistake_of_the_user(
    run: Run,
    docs: Path,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    raised: BaseException,
    code: int,
    message: str,
) -> None:
    def stream(*args: Any, **kwargs: Any) -> Any:
        raise raised

    monkeypatch.setattr(WindowedLM, "stream", stream)
    result = run("ask", "bridge", "--docs", "docs", "--model", model, "--json")
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert code != 1 or result.exception is raised  # a bug stays visible


@pytest.mark.parametrize("args", [("cache",), ("eval",), ("eval", "score")])
def test_a_group_of_commands_shows_its_help(run: Run, args: tuple[str, ...]) -> None:
    lone = run(*args)
    assert (lone.exit_code, lone.stderr) == (0, "")
    assert lone.stdout.strip() == run(*args, "--help").stdout.strip()
    assert "Commands" in lone.stdout


@pytest.mark.parametrize("command", ["ask", "chat", "classify", "compare", "bench", "cache warm"])
def test_help_names_what_a_command_takes(run: Run, command: str) -> None:
    shown = run(*command.split(), "--help").stdout
    assert "<bool>" not in shown  # flags take no value
    assert "--verbose" in shown
    for other, option in (("compare", "--rag-scale"), ("cache warm", "--no-cache")):
        assert command != other or option not in shown


NO_MODEL = ("--model", "no-such-model")
UNREAD = ("--docs", "no-such-folder", *NO_MODEL)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("ask", QUESTION, *UNREAD, "--profile", "none.json"), "'none.json' can't be used"),
        (("chat", *UNREAD, "--rag-temperature", "0"), "APE temperature must be"),
        (("serve", *UNREAD, "--method", "ape:heat=1"), "no parameter 'heat'"),
        (("compare", *UNREAD, "--methods", "pcw,magic"), "Unknown method 'magic'"),
        (("compare", *UNREAD, "--grid", "magic"), "Unknown method 'magic'"),
        (("warm", *UNREAD, "--device", "cuda:99"), "--device cuda:99 can't be used"),
        (("ask", QUESTION, *UNREAD, "--link-tokens", "1.5"), "tokens"),
        (("chat", *UNREAD, "--link-tokens", "all", "--method", "ensemble"), "ensemble"),
        (
            ("ask", QUESTION, *UNREAD, "--method", "sequential", "--citations", "removal"),
            "but 'sequential'",
        ),
        (("classify", "x", "--demos", "none", "--method", "magic"), "Unknown method 'magic'"),
        (("serve", *UNREAD, "--refuse", "everything"), "--refuse 'everything'"),
        (("serve", *UNREAD, "--api-key-file", "none.txt"), "none.txt"),
        (("eval", "passages", "--data", "none", *NO_MODEL, "--methods", "magic"), "'magic'"),
        (
            ("eval", "passages", "--data", "none", *NO_MODEL, "--profile", "none.json"),
            "'none.json'",
        ),
    ],
)
def test_every_command_checks_its_options_first(
    run: Run, docs: Path, args: tuple[str, ...], message: str
) -> None:
    assert message in refused(run, *args, stdin="Who?\n")


def test_too_few_questions_are_noticed_before_the_model_is_loaded(run: Run, docs: Path) -> None:
    line = '{"question": "Who?", "passages": ["One.", "Two."]}\n'
    Path("few.jsonl").write_text(line * 6 + line.replace("}", ', "answer": "One"}') * 2)
    asked = ("compare", "--questions", "few.jsonl", "--model", "no-such-model")
    assert "at least 8 questions, but there are 6" in refused(run, *asked, "--limit", "6")
    by = refused(run, *asked, "--by", "labels")
    assert "at least 8 questions with an answer, but there are 2" in by


def test_a_taken_port_is_noticed_before_the_model_is_loaded(run: Run, docs: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = refused(run, "serve", *UNREAD, "--port", port)
    assert f"can't listen on 127.0.0.1:{port}. Name another --port" in message


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (("ask", "Who", "built", "the", "bridge?"), 'as in "Who built the bridge?"'),
        (("ask", "What", "is", "in", "notes.md"), 'as in "What is in notes.md"'),
        (("ask", "Who", "built", "it?", "--docs", "docs"), 'as in "Who built it?"'),
        (("ask", "--docs", "docs", "Who", "built", "it?"), 'as in "Who built it?"'),
        (("ask", "Who?", "docs"), "put --docs before each file"),
        (("ask", "Who?", "--docs", "docs/bridge.md", "docs/olsen.txt"), "put --docs before"),
        (("ask", "--docs", "docs/bridge.md", "docs/olsen.txt", "Who?"), "put --docs before"),
        (("chat", "--docs", "a/*.md", "b"), "put --docs before each file"),
        (("bench", "now"), "see rag-windows bench --help"),
        (("ask", "x", "--top-k", "0"), "see rag-windows ask --help"),
        (("ask", "x", "--fallback", "none"), "'none' is not one of"),
    ],
)
def test_words_too_many_are_answered_with_what_they_seem_to_be(
    run: Run, docs: Path, args: tuple[str, ...], hint: str
) -> None:
    assert hint in refused(run, *args)
