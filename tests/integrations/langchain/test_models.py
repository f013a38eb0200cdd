"""Constructors, options of a call, what is told of answers, identities for caches, errors."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.exceptions import (
    ContextOverflowError,
    ModelInvalidRequestError,
    ModelNotFoundError,
)
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, HumanMessage
from pydantic import SecretStr, ValidationError

from langchain_rag_windows import ChatRagWindows, RagWindows
from rag_windows import (
    APE,
    PCW,
    Guard,
    InputError,
    LimitError,
    MethodError,
    PromptError,
    RagWindowsError,
    WindowedLM,
)
from tests.integrations.cases import case, reader
from tests.integrations.langchain.asking import WAYS, Told, chat, streamed, text_model, text_of
from tests.integrations.langchain.test_routes import ROUTES, Route, history_aware
from tests.rag_windows import small

BORN = "Where was Alra Ashden born?"
DOCUMENT = Document(
    page_content="Alra Ashden was born in Arava.",
    metadata={"title": "Alra Ashden", "source": "https://example.org/alra"},
    id="alra",
)
OTHER = Document(page_content="Belra Dorby was born in Velum.", metadata={"title": "Belra Dorby"})
BOTH: dict[str, Any] = {"documents": [OTHER, DOCUMENT]}
KINDS = pytest.mark.parametrize("kind", [ChatRagWindows, RagWindows])


# Constructors


@KINDS
def test_names_from_other_integrations_are_known(kind: Any) -> None:
    given: list[tuple[str, str, Any]] = [
        ("model_name", "model", "tiny-reader"),
        ("model_id", "model", "tiny-reader"),
        ("max_new_tokens", "max_tokens", 7),
        ("pipeline_kwargs", "generate_kwargs", {"top_k": 3}),
        ("stop_sequences", "stop", ["x"]),
        ("request_timeout", "timeout", 3.0),
        ("concurrency", "batch_rows", 3),
    ]
    for theirs, ours, value in given:
        model = {} if ours == "model" else {"model": "tiny-reader"}
        assert getattr(kind(**model, **{theirs: value}), ours) == value
        with pytest.raises(ValidationError, match="the same argument"):
            kind(**model, **{theirs: value, ours: value})


@KINDS
@pytest.mark.parametrize(
    "arguments",
    [
        *({"model": None}, {"model": "a", "lm": "reader"}, {"model": 3}, {"temprature": 1}),
        *({"temperature": -1}, {"top_p": 0}, {"max_tokens": 0}, {"timeout": 0}, {"batch_rows": 0}),
        *({"batch_bytes": 0}, {"batch_bytes": "lots"}),
        *({"method": "telepathy"}, {"link_tokens": -1}, {"link_tokens": 3, "method": "ensemble"}),
        *({"fallback": "pcw"}, {"calibration": "none.json"}, {"calibration": 3}),
    ],
)
def test_arguments_that_can_t_be_used_are_refused(kind: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        kind(**{"model": "no/such-model", **arguments})


def test_nothing_is_loaded_before_the_first_call_and_copies_share() -> None:
    model = ChatRagWindows(model="tiny-reader", max_tokens=4)
    assert ChatRagWindows(model="./nowhere").max_tokens is None
    lm = model.windowed_lm()
    assert model.windowed_lm() is lm
    assert ChatRagWindows(model="tiny-reader", method="pcw").windowed_lm() is lm
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own
        assert twin.windowed_lm() is lm
    numbered = ChatRagWindows(model="tiny-reader", header="number").windowed_lm()
    assert numbered is not lm
    assert numbered.model is lm.model
    assert model.model_copy(update={"header": "number"}).windowed_lm() is numbered
    for loaded in (chat(), text_model()):
        with pytest.raises(TypeError, match=r"Make it with model= \(a name or a folder\)"):
            pickle.dumps(loaded)


def test_token_counts_are_the_model_s_own() -> None:
    ids = reader().tokenizer(BORN, add_special_tokens=False)["input_ids"]
    for model in (chat(), text_model()):
        assert (model.get_token_ids(BORN), model.get_num_tokens(BORN)) == (ids, len(ids))
    assert chat(custom_get_token_ids=lambda text: [1]).get_num_tokens(BORN) == 1


# Options of a call


def test_options_of_a_call_stand_above_the_constructor_s_and_reach_the_engine() -> None:
    long: dict[str, Any] = {"min_new_tokens": 6, "documents": [DOCUMENT]}
    whole = chat(stop="r").invoke(BORN, stop=["none"], **long).text
    last = whole.split()[-1]
    assert chat().invoke(BORN, stop=[last], **long).text == whole.partition(last)[0]
    short = chat().invoke(BORN, max_new_tokens=1, documents=[DOCUMENT])
    assert short.response_metadata["finish_reason"] == "length"
    assert short.usage_metadata is not None
    assert short.usage_metadata["output_tokens"] == 1
    warm: dict[str, Any] = {"temperature": 5.0, "min_new_tokens": 8}
    assert len({chat(seed=seed).invoke(BORN, **warm).text for seed in range(4)}) > 1
    assert chat(seed=3).invoke(BORN, **warm).text == chat(seed=1).invoke(BORN, seed=3, **warm).text
    own = chat(temperature=5.0, pipeline_kwargs={"min_new_tokens": 8, "top_k": 9}, max_tokens=9)
    of_call: dict[str, Any] = {"generate_kwargs": {"top_k": 1}}
    greedy = chat().invoke(BORN, min_new_tokens=8, max_tokens=9).text
    assert own.invoke(BORN, **of_call).text == own.invoke(BORN, temperature=0).text == greedy
    several: dict[str, Any] = {"num_beams": 2, "num_return_sequences": 2, **BOTH}
    (made,) = chat().generate([[HumanMessage(BORN)]], **several).generations
    assert len(made) == 2
    assert made[0].text == "Arava"


def test_bad_input_gets_langchain_s_kinds_of_error() -> None:
    refused: list[tuple[type[Exception], type[Exception], str, dict[str, Any]]] = [
        (ModelInvalidRequestError, PromptError, " ", {}),
        (ModelInvalidRequestError, ValueError, " ", {}),
        (ModelInvalidRequestError, MethodError, "a", {"method": "telepathy"}),
        (ModelInvalidRequestError, RagWindowsError, "a", {"output_attentions": True}),
        (ModelInvalidRequestError, RagWindowsError, "a", {"model": "another"}),
        (ContextOverflowError, LimitError, "a " * 9000, {}),
    ]
    for theirs, ours, question, options in refused:
        with pytest.raises(theirs) as caught:
            chat().invoke(question, documents=["b"], **options)
        assert isinstance(caught.value, ours)
    with pytest.raises(ModelNotFoundError) as missing:
        ChatRagWindows(model="./nowhere").invoke("a")
    assert isinstance(missing.value, RagWindowsError)
    good, bad = chat().bind(documents=[DOCUMENT]).batch([BORN, " "], return_exceptions=True)
    assert isinstance(bad, ModelInvalidRequestError)
    assert isinstance(good, AIMessage)
    assert good.text == "Arava"


# What is told of an answer


def test_what_is_told_of_an_answer_whole_and_streamed() -> None:
    answer = chat(method="pcw").invoke(BORN, **BOTH)
    metadata, usage = answer.response_metadata, answer.usage_metadata
    assert (answer.content, metadata["method"]) == ("Arava", {"name": "pcw"})
    assert (metadata["finish_reason"], metadata["model_provider"]) == ("stop", "rag_windows")
    other, alra = metadata["citations"]
    assert (alra["index"], alra["id"], alra["cited"]) == (1, "alra", True)
    assert (other["id"], other["cited"]) == (None, False)
    assert alra["mass"] > other["mass"] > 0
    assert usage is not None
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_token_details"] == {"cache_read": 0}
    chunks = list(chat(method=PCW()).stream(BORN, **BOTH))
    assert sum(chunk.usage_metadata is not None for chunk in chunks) == 1
    assert sum(bool(chunk.response_metadata) for chunk in chunks) == 1
    assert chunks[-1].chunk_position == "last"
    together = streamed(chat(method="pcw"), BORN, **BOTH)
    assert (together.text, together.usage_metadata) == (answer.text, usage)
    timings = [told.pop("timings").keys() for told in (metadata, together.response_metadata)]
    assert timings == [{"encode_s", "ttft_s", "total_s"}] * 2
    assert together.response_metadata == metadata
    (made,) = text_model(method="pcw").generate([BORN], **BOTH).generations[0]
    assert made.generation_info is not None
    assert made.generation_info.pop("timings")
    assert made.generation_info == {**metadata, "usage_metadata": usage}


def test_content_blocks_cite_the_document_that_carried_the_answer() -> None:
    answer, v1 = chat().invoke(BORN, **BOTH), chat(output_version="v1")
    ((said,),) = [answer.response_metadata["statements"]]
    assert [one["passage"] for one in said["citations"]] == [1]
    mass = said["citations"][0]["mass"]
    citation = {
        "type": "citation",
        "start_index": 0,
        "end_index": 5,
        "cited_text": DOCUMENT.page_content,
        "title": "Alra Ashden",
        "url": "https://example.org/alra",
        "extras": {"index": 1, "id": "alra", "metadata": DOCUMENT.metadata, "mass": mass},
    }
    expected = [{"type": "text", "text": "Arava", "annotations": [citation]}]
    assert answer.content_blocks == streamed(chat(), BORN, **BOTH).content_blocks == expected
    assert v1.invoke(BORN, **BOTH).content == expected
    (block,) = streamed(v1, BORN, **BOTH).content_blocks
    assert {key: value for key, value in block.items() if key != "index"} == expected[0]


def test_documents_can_be_left_out() -> None:
    answer = chat().invoke(BORN, **BOTH, citations="removal")
    metadata: Any = answer.response_metadata
    other, alra = metadata["citations"]
    assert metadata["supported"] is True
    assert (alra["supports"], alra["cited"]) == ("yes", True)
    assert alra["drop"] > 2 > other["drop"]
    ((note,),) = [block["annotations"] for block in cast(Any, answer.content_blocks)]
    assert (note["start_index"], note["end_index"]) == (0, len(answer.text))
    assert note["extras"]["supports"] == "yes"
    with pytest.raises(InputError, match="'sequential' encodes each passage"):
        chat(method="sequential").invoke(BORN, **BOTH, citations="removal")


def test_beside_calls_of_tools_no_sentence_of_theirs_is_cited() -> None:
    """Their places are those of the whole answer, whose text holds the calls."""
    entry = {"index": 0, "id": "a", "title": None, "metadata": {}, "mass": 0.5, "drop": None}
    entry |= {"supports": None, "cited": True, "text": "A."}
    said = {"start": 0, "end": 40, "text": "x" * 40, "citations": [{"passage": 0, "mass": 0.5}]}
    metadata: dict[str, Any] = {
        "model_provider": "rag_windows",
        "finish_reason": "tool_calls",
        "length": 55,
        "citations": [entry],
        "statements": [said],
    }
    call = {"name": "look", "args": {}, "id": "1", "type": "tool_call"}
    for content, ends in (("", []), ("Wait.", [5])):
        message = AIMessage(content, tool_calls=[call], response_metadata=metadata)
        blocks = cast(Any, message.content_blocks)
        notes = [note for block in blocks for note in block.get("annotations", ())]
        assert [note["end_index"] for note in notes] == ends
        assert [block["type"] for block in blocks] == [*["text"] * bool(content), "tool_call"]
    metadata["finish_reason"] = "stop"
    whole = {**entry, "index": 1, "id": "b"}
    metadata["citations"] = [entry, whole]
    message = AIMessage("y" * 55, response_metadata=metadata)
    (block,) = cast(Any, message.content_blocks)
    places = [(note["extras"]["id"], note["end_index"]) for note in block["annotations"]]
    assert places == [("a", 40), ("b", 55)]  # the second carried no sentence by itself


# LangChain's cache of answers


@pytest.fixture
def cache() -> Iterator[InMemoryCache]:
    made = InMemoryCache()
    set_llm_cache(made)
    yield made
    set_llm_cache(None)


@pytest.mark.parametrize("route", [one for one in ROUTES if one is not history_aware])
@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_other_documents_get_their_own_answer(route: Route, way: str, cache: InMemoryCache) -> None:
    one = case(0)
    shorter = dataclasses.replace(one, passages=one.passages[1:])
    answers = []
    for given in (one, shorter) * 2:
        runnable, asked = route(given, Told())
        answers.append(text_of(WAYS[way](runnable, asked)))
    assert answers[:2] == answers[2:]
    assert answers[0] == one.answer != answers[1]
    assert len(cache._cache) == 2


OPTIONS: list[dict[str, Any]] = [
    *({"method": "pcw"}, {"method": APE(0.8, 0.9)}, {"max_tokens": 3}, {"temperature": 0}),
    *({"stop": ["a"]}, {"seed": 3}, {"generate_kwargs": {"min_new_tokens": 3}}),
    *({"fallback": "sequential"}, {"link_tokens": 1}),
]


@KINDS
def test_other_options_are_another_entry(kind: Any, cache: InMemoryCache) -> None:
    for options in [{}, *OPTIONS]:
        kind(lm=small.lm(), **{"max_tokens": 4, **options}).invoke("Who?", documents=["A text."])
    for options in OPTIONS:
        kind(lm=small.lm(), max_tokens=4).invoke("Who?", documents=["A text."], **options)
    assert len(cache._cache) == 1 + 2 * len(OPTIONS)


@KINDS
def test_another_model_or_window_is_another_identity(kind: Any, tmp_path: Path) -> None:
    others: list[dict[str, Any]] = [
        *({}, {"model": "elsewhere"}, {"revision": "v2"}, {"dtype": "bfloat16"}),
        *({"model_kwargs": {"attn_implementation": "eager"}}, {"device_map": "cpu"}),
        *({"max_window_tokens": 64}, {"header": "none"}, {"header": lambda passage, number: "x"}),
        *({"template_kwargs": {"enable_thinking": False}}, {"text_tokens": ("<x>",)}),
        *({"link_tokens": 1}, {"link_tokens": 0.5}, {"link_tokens": 1, "link_choose": "deviation"}),
        *({"fallback": "sequential"}, {"fallback": Guard(passages=9)}),
    ]
    made = [kind(**{"model": "tiny-reader", **other}) for other in others]
    keys = {repr(one._identifying_params) for one in made}
    assert len(keys) == len(others)
    assert keys == {repr(one._identifying_params) for one in made}
    ours, again = (kind(lm=reader())._identifying_params for _ in range(2))
    other = WindowedLM(reader().model, reader().tokenizer)
    assert ours == again != kind(lm=other)._identifying_params
    secret: dict[str, Any] = {"api_key": SecretStr("hush"), "model_kwargs": {"token": "hush"}}
    model = kind(model="tiny-reader", **secret)
    assert "hush" not in f"{model._identifying_params} {model!r} {model.asdict()}"
    (tmp_path / "model.safetensors").write_bytes(b"one")
    before = kind(model=tmp_path)._identifying_params
    (tmp_path / "model.safetensors").write_bytes(b"other")
    assert kind(model=str(tmp_path))._identifying_params != before
