"""The LangChain examples answer rightly on the embedded reader, and read documents as windows."""

from __future__ import annotations

import functools
import json
import re
import runpy
import sys
from collections.abc import Callable
from typing import Any

import pytest

from langchain_rag_windows import ChatRagWindows
from rag_windows import Generation, WindowedLM
from rag_windows.batching.scheduler import Scheduler
from rag_windows.samples import samples_path
from rag_windows_retrievers import BM25Retriever, load_documents, split_documents
from tests.test_repository import ROOT

NAMES = (
    "langchain_rag",
    "langchain_lcel",
    "langchain_agent",
    "langchain_streaming_citations",
    "langchain_stuff_chain",
)


@functools.cache
def answerable() -> tuple[str, str]:
    """A sample question that the reader, asked directly, answers right."""
    samples = samples_path()
    loaded = load_documents([samples / "corpus"], root=samples)
    retriever = BM25Retriever(split_documents(loaded.documents))
    lm = WindowedLM.from_pretrained("tiny-reader")
    for line in (samples / "questions.jsonl").read_text(encoding="utf-8").splitlines()[:20]:
        row = json.loads(line)
        hits = retriever.retrieve(row["question"], 16)
        if lm.generate(row["question"], hits, max_new_tokens=32).text == row["answer"]:
            return row["question"], row["answer"]
    raise RuntimeError("The embedded reader answered none of 20 sample questions.")


@pytest.fixture
def generations(monkeypatch: pytest.MonkeyPatch) -> list[Generation]:
    """What the engine made while the test ran."""
    made: list[Generation] = []

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if isinstance(result, Generation):
                made.append(result)
                return result
            return note_last(result)

        def note_last(chunks: Any) -> Any:
            for chunk in chunks:
                if chunk.generation is not None:
                    made.append(chunk.generation)
                yield chunk

        return generate

    for kind, name in ((WindowedLM, "generate"), (WindowedLM, "stream"), (Scheduler, "answer")):
        monkeypatch.setattr(kind, name, noting(getattr(kind, name)))
    return made


@pytest.mark.parametrize("name", NAMES)
def test_it_answers_rightly_from_windows(
    name: str,
    generations: list[Generation],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    question, answer = answerable()
    generations.clear()
    monkeypatch.setattr(sys, "argv", [name, "--model", "tiny-reader", "--question", question])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"> {question}", answer]
    (generation,) = generations
    parts = [(window.passage, window.part, window.parts) for window in generation.windows]
    assert len(parts) > 1
    assert parts == [(i, 0, 1) for i in range(len(parts))]


def test_every_example_is_tested() -> None:
    assert sorted(p.stem for p in (ROOT / "examples").glob("langchain_*.py")) == sorted(NAMES)


def test_the_short_one_is_short() -> None:
    source = (ROOT / "examples" / "langchain_rag.py").read_text(encoding="utf-8")
    body = re.sub(r'^"""(.*?)"""', "", source, flags=re.DOTALL).partition("def main")[2]
    code = [line for line in body.splitlines() if line.strip()]
    assert len(code) <= 20


def test_the_stuff_chain_differs_from_stock_in_two_lines() -> None:
    source = (ROOT / "examples" / "langchain_stuff_chain.py").read_text(encoding="utf-8")
    assert source.count("# Was: ") == 2
    assert ChatRagWindows.__name__ in source
