"""LangChain's cache of answers: other documents, methods or options never get another's answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from pydantic import SecretStr

from langchain_rag_windows import ChatRagWindows, RagWindows, WindowDocumentPrompt
from rag_windows import APE, WindowedLM
from tests.integrations.langchain.drawn import reader

QUESTION = "Where was Alra Ashden born?"
TOWNS = ("Arava", "Velum")


@pytest.fixture(autouse=True)
def cache() -> Iterator[InMemoryCache]:
    made = InMemoryCache()
    set_llm_cache(made)
    yield made
    set_llm_cache(None)


def document(town: str) -> Document:
    text = f"Alra Ashden was born in {town}. Alra Ashden keeps a dog."
    return Document(page_content=text, metadata={"title": "Alra Ashden"})


def keyword(model: Any, town: str) -> Any:
    return model.invoke(QUESTION, documents=[document(town)])


def awaited(model: Any, town: str) -> Any:
    return asyncio.run(model.ainvoke(QUESTION, documents=[document(town)]))


def bound(model: Any, town: str) -> Any:
    return model.bind(documents=[document(town)]).invoke(QUESTION)


def batch(model: Any, town: str) -> Any:
    return model.bind(documents=[document(town)]).batch([QUESTION])[0]


def block(model: Any, town: str) -> Any:
    plain = {"type": "text-plain", "text": document(town).page_content, "title": "Alra Ashden"}
    return model.invoke([HumanMessage([plain, {"type": "text", "text": QUESTION}])])


def artifact(model: Any, town: str) -> Any:
    call = {"name": "search", "args": {}, "id": "1", "type": "tool_call"}
    result = ToolMessage("found", tool_call_id="1", artifact=[document(town)])
    return model.invoke([HumanMessage(QUESTION), AIMessage("", tool_calls=[call]), result])


def marked(model: Any, town: str) -> Any:
    text = WindowDocumentPrompt().format(page_content=document(town).page_content)
    return model.invoke(f"{text}\n\n{QUESTION}")


CHAT = [keyword, awaited, bound, batch, block, artifact, marked]
TEXT = [keyword, awaited, bound, batch, marked]


def text_of(answer: Any) -> str:
    return answer if isinstance(answer, str) else str(answer.text)


@pytest.mark.parametrize(
    ("model", "way"),
    [*[(ChatRagWindows, way) for way in CHAT], *[(RagWindows, way) for way in TEXT]],
)
def test_other_documents_get_their_own_answer(
    model: Callable[..., Any], way: Callable[[Any, str], Any]
) -> None:
    made = model(lm=reader(), max_tokens=16)
    assert [text_of(way(made, town)) for town in TOWNS] == list(TOWNS)
    asked = len(reader().generations)
    assert [text_of(way(made, town)) for town in TOWNS] == list(TOWNS)
    assert len(reader().generations) == asked, "the second time it must come from the cache"


OPTIONS: list[dict[str, Any]] = [
    {"method": "pcw"},
    {"method": APE(0.8, 0.9)},
    {"max_tokens": 3},
    {"temperature": 0},
    {"stop": ["a"]},
    {"seed": 3},
    {"generate_kwargs": {"min_new_tokens": 3}},
]


@pytest.mark.parametrize("model", [ChatRagWindows, RagWindows])
@pytest.mark.parametrize("other", OPTIONS)
@pytest.mark.parametrize("of_the_call", [False, True])
def test_other_options_are_another_entry(
    model: Callable[..., Any], other: dict[str, Any], of_the_call: bool
) -> None:
    keyword(model(lm=reader()), "Arava")
    asked = len(reader().generations)
    made, given = (model(lm=reader()), other) if of_the_call else (model(lm=reader(), **other), {})
    made.invoke(QUESTION, documents=[document("Arava")], **given)
    assert len(reader().generations) == asked + 1


@pytest.mark.parametrize("model", [ChatRagWindows, RagWindows])
def test_options_of_a_call_do_not_hide_the_constructor_s(model: Callable[..., Any]) -> None:
    """Both hold: what the one and the other say of ``generate_kwargs`` is put together."""
    for minimum in (3, 6):
        made = model(lm=reader(), generate_kwargs={"min_new_tokens": minimum})
        made.invoke(QUESTION, documents=[document("Arava")], generate_kwargs={"top_k": 5})
        assert len(reader().generations[-1].token_ids) >= minimum


@pytest.mark.parametrize(
    "other",
    [
        {"model": "elsewhere"},
        {"revision": "v2"},
        {"dtype": "bfloat16"},
        {"model_kwargs": {"attn_implementation": "eager"}},
        {"max_window_tokens": 64},
        {"header": "none"},
        {"header": lambda passage, number: "x"},
        {"template_kwargs": {"enable_thinking": False}},
        {"text_tokens": ("<x>",)},
        {"device_map": "cpu"},
    ],
)
@pytest.mark.parametrize("model", [ChatRagWindows, RagWindows])
def test_another_model_or_window_is_another_identity(model: Any, other: dict[str, Any]) -> None:
    known = model(model="tiny-reader")._identifying_params
    assert model(model="tiny-reader")._identifying_params == known
    assert model(**{"model": "tiny-reader", **other})._identifying_params != known


def test_a_model_saved_again_is_another_identity(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"one")
    before = ChatRagWindows(model=tmp_path)._identifying_params
    (tmp_path / "model.safetensors").write_bytes(b"other")
    assert ChatRagWindows(model=str(tmp_path))._identifying_params != before


def test_engines_that_were_handed_over_are_told_apart() -> None:
    lm = reader()
    other = WindowedLM(lm.model, lm.tokenizer)
    ours = ChatRagWindows(lm=lm)._identifying_params
    assert ChatRagWindows(lm=lm)._identifying_params == ours
    assert ChatRagWindows(lm=other)._identifying_params != ours


def test_no_secret_is_part_of_it() -> None:
    model = ChatRagWindows(
        model="tiny-reader", api_key=SecretStr("hush"), model_kwargs={"token": "hush"}
    )
    assert "hush" not in f"{model._identifying_params} {model!r} {model.asdict()}"
