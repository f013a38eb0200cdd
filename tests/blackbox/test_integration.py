"""What those who write adapters are promised: the example of the docs, and what stands in it."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rag_windows import Chunk, Citation, Generation, InputError, MethodError, Passage, WindowedLM
from rag_windows import integration as promised
from tests.blackbox.conftest import ANSWER, QUESTION


def test_the_example_of_the_docstring() -> None:
    example = textwrap.dedent((promised.__doc__ or "").partition("::\n")[2])
    told: dict[str, Any] = {name: getattr(promised, name) for name in promised.__all__}
    exec(example, told)  # noqa: S102 - our own
    assert told["answer"] == "Sulava"


def test_every_name_is_there() -> None:
    assert [name for name in promised.__all__ if not hasattr(promised, name)] == []


def read(_: promised.Call, generation: Generation) -> str:
    return generation.text


def pieces(_: promised.Call, chunk: Chunk) -> Iterator[str]:
    yield chunk.text


@pytest.mark.parametrize("rows", [1, 8])
def test_every_way_of_asking_gives_the_answer(
    rows: int, reader: WindowedLM, passages: list[Passage]
) -> None:
    calls = promised.Calls(rows)

    def prepare() -> promised.Call:
        return promised.Call(lm=reader, query=QUESTION, passages=passages)

    async def awaited() -> list[str]:
        streamed = [piece async for piece in calls.stream_async(prepare, pieces)]
        both = await asyncio.gather(*(calls.answer_async(prepare, read) for _ in range(2)))
        return ["".join(streamed), *both]

    assert calls.answer(prepare, read) == ANSWER
    assert calls.answer_all([prepare] * 3, read) == [ANSWER] * 3
    assert "".join(calls.stream(prepare, pieces)) == ANSWER
    assert asyncio.run(awaited()) == [ANSWER] * 3


def test_files_are_read_before_weights(small_folder: Path, monkeypatch: Any) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("nothing has to be loaded for this")

    monkeypatch.setattr("rag_windows.integration.shared_models.load_shared", refuse)
    source = promised.ModelSource(small_folder, template_kwargs={"a": 1})
    assert promised.position_limit(source.config()) == 1024
    assert source.tokenizer().encode("a")
    assert source.template_kwargs() == {"a": 1}
    assert source.by_name
    assert source.tool_format() is None
    monkeypatch.undo()
    assert source.lm() is promised.ModelSource(str(small_folder), template_kwargs={"a": 1}).lm()


def test_what_users_write_becomes_objects(tmp_path: Path) -> None:
    method = promised.method_of("ape", {"temperature": 0.5}, link_tokens=2)
    assert promised.describe(method)["reader"]["temperature"] == 0.5
    assert promised.method_of(promised.describe(method)) == method
    with pytest.raises(MethodError, match="sacle"):
        promised.method_of("ape", {"sacle": 1})
    guard = promised.guard_of("sequential")
    assert guard is not None
    assert promised.guard_of({"passages": guard.passages}) == guard
    with pytest.raises(InputError, match="fallback must be"):
        promised.guard_of("always")  # type: ignore[arg-type]  # what is refused
    assert promised.profile_of(None) is None
    with pytest.raises(InputError):
        promised.profile_of(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("masses", "expected"),
    [
        ([0.4, 0.01, 0.02], [0]),
        ([0.2, 0.01, 0.3, 0.01], [2, 0]),
        ([0.1, 0.1, 0.1], [0, 1, 2]),
        ([], []),
    ],
)
def test_who_carried_an_answer(masses: list[float], expected: list[int]) -> None:
    citations = [Citation(i, None, mass) for i, mass in enumerate(masses)]
    assert [citation.passage for citation in promised.carried(citations)] == expected
    assert promised.carried(None) == ()


@pytest.mark.parametrize(
    ("temperature", "top_p", "options"),
    [
        (None, None, {}),
        (0, 0.9, {"do_sample": False}),
        (0.7, None, {"do_sample": True, "temperature": 0.7}),
        (0.7, 0.9, {"do_sample": True, "temperature": 0.7, "top_p": 0.9}),
    ],
)
def test_temperature_and_top_p(temperature: Any, top_p: Any, options: dict[str, Any]) -> None:
    assert promised.sampling_options(temperature, top_p) == options
