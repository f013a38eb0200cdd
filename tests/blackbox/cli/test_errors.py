from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.blackbox.conftest import Run


@pytest.fixture
def bad(docs: Path, model: str) -> Path:
    """Files that can't be used, in ./bad."""
    bad = docs.parent / "bad"
    bad.mkdir()
    (bad / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (bad / "latin.txt").write_bytes(b"caf\xe9")
    (bad / "binary.txt").write_bytes(b"\x00\x01")
    (bad / "empty").mkdir()
    (bad / "empty" / "a.md").touch()
    (bad / "no-model").mkdir()
    t5 = bad / "t5"
    t5.mkdir()
    (t5 / "config.json").write_text(json.dumps({"model_type": "t5"}))
    for file in Path(model).glob("tokenizer*"):
        (t5 / file.name).write_bytes(file.read_bytes())
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
        ("--method magic", "Unknown method 'magic'"),
        ("--method pcw --rag-scale 0.9", "--rag-scale is not a parameter of pcw, only of ape"),
        ("--rag-temperature 0", "APE temperature must be a finite number above 0"),
        ("--rag-temperature nan", "APE temperature must be a finite number above 0"),
        ("--rag-scale -1", "APE scale must be a finite number above 0"),
        ("--model no/such-model", "Model 'no/such-model'"),
        ("--model ./nothing", "nothing"),
        ("--model bad/no-model", "config.json"),
        ("--model bad/t5", "'bad/t5'"),
        ("--device gpu", "'gpu' is none of auto, cpu, cuda and cuda:N"),
        ("--device cuda:99", "--device cuda:99: PyTorch sees"),
        ("--dtype int8", "'--dtype'"),
        ("--top-k 0", "'--top-k'"),
        ("--top-k many", "'--top-k'"),
        ("--max-new-tokens 0", "'--max-new-tokens'"),
        ("--max-window-tokens 0", "'--max-window-tokens'"),
        ("--passage-words 0", "'--passage-words'"),
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
    result = run("ask", "Who built the bridge at Halden?", *given)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert message in line
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ask"], "Missing argument 'QUESTION'"),
        (["ask", " \n"], "The question is empty"),
        (["aks", "x"], "No such command 'aks'. Did you mean 'ask'?"),
        (["chat", "extra"], "unexpected extra argument"),
        (["chat", "--docs", "nothing\x1b.md", "--model", "m"], "nothing\\x1b.md: no such file"),
    ],
)
def test_commands_and_arguments(run: Run, docs: Path, args: list[str], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line
    assert "\x1b" not in line


def test_memory_that_is_full(
    run: Run, docs: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from rag_windows import WindowedLM

    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(WindowedLM, "stream", full)
    result = run("ask", "bridge", "--docs", "docs", "--model", model, "--json")
    assert result.exit_code == 2
    assert "memory is full; take fewer passages (--top-k)" in result.stderr


def test_a_bug_stays_visible(
    run: Run, docs: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rag_windows import WindowedLM

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(WindowedLM, "stream", broken)
    result = run("ask", "bridge", "--docs", "docs", "--model", model, "--json")
    assert isinstance(result.exception, RuntimeError)
    assert result.exit_code == 1


def test_interruption(run: Run, docs: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rag_windows import WindowedLM

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(WindowedLM, "stream", interrupted)
    result = run("ask", "bridge", "--docs", "docs", "--model", model, "--json")
    assert result.exit_code == 130
