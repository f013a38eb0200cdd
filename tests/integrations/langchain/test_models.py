"""Constructor, options of a call, what comes back, and errors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.exceptions import (
    ContextOverflowError,
    ModelInvalidRequestError,
    ModelNotFoundError,
)
from langchain_core.messages import AIMessage, HumanMessage
from pydantic import SecretStr, ValidationError

from langchain_rag_windows import ChatRagWindows, RagWindows
from rag_windows import PCW, LimitError, MethodError, PromptError, RagWindowsError
from rag_windows.integration import sampling_options
from tests.integrations.langchain.drawn import reader

BORN = "Where was Alra Ashden born?"
DOCUMENT = Document(
    page_content="Alra Ashden was born in Arava.",
    metadata={"title": "Alra Ashden", "source": "https://example.org/alra"},
    id="alra",
)
OTHER = Document(page_content="Belra Dorby was born in Velum.", metadata={"title": "Belra Dorby"})


def chat(**arguments: Any) -> ChatRagWindows:
    return ChatRagWindows(lm=reader(), **{"max_tokens": 16, **arguments})


@pytest.mark.parametrize(
    ("theirs", "ours", "value"),
    [
        ("model_name", "model", "tiny-reader"),
        ("model_id", "model", "tiny-reader"),
        ("max_new_tokens", "max_tokens", 7),
        ("pipeline_kwargs", "generate_kwargs", {"top_k": 3}),
        ("stop_sequences", "stop", ["x"]),
        ("request_timeout", "timeout", 3.0),
    ],
)
@pytest.mark.parametrize("model", [ChatRagWindows, RagWindows])
def test_names_from_other_integrations_are_known(
    model: Any, theirs: str, ours: str, value: Any
) -> None:
    arguments = {"model": "tiny-reader"} if ours != "model" else {}
    assert getattr(model(**{**arguments, theirs: value}), ours) == value
    with pytest.raises(ValidationError, match="one argument"):
        model(**{**arguments, theirs: value, ours: value})


@pytest.mark.parametrize("model", [ChatRagWindows, RagWindows])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"model": "a", "lm": reader},
        {"model": "a", "temprature": 1},
        {"model": "a", "temperature": -1},
        {"model": "a", "top_p": 0},
        {"model": "a", "max_tokens": 0},
        {"model": "a", "method": "telepathy"},
        {"model": "a", "method": 3},
        {"model": "a", "timeout": 0},
        {"model": 3},
    ],
)
def test_arguments_that_can_t_be_used_are_refused(model: Any, arguments: dict[str, Any]) -> None:
    if "lm" in arguments:
        arguments = {**arguments, "lm": arguments["lm"]()}
    with pytest.raises(ValidationError):
        model(**arguments)


def test_standard_arguments_are_tolerated() -> None:
    model = ChatRagWindows(
        model="tiny-reader",
        api_key=SecretStr("hush"),
        max_retries=2,
        timeout=60,
        streaming=True,
        stop="x",
    )
    assert model.invoke(BORN, documents=[DOCUMENT]).text == "Arava"


@pytest.mark.parametrize(
    ("temperature", "top_p", "options"),
    [
        (None, None, {}),
        (0, None, {"do_sample": False}),
        (0, 0.9, {"do_sample": False}),
        (0.7, None, {"do_sample": True, "temperature": 0.7}),
        (None, 0.9, {"do_sample": True, "top_p": 0.9}),
        (0.7, 0.9, {"do_sample": True, "temperature": 0.7, "top_p": 0.9}),
    ],
)
def test_temperature_and_top_p(
    temperature: float | None, top_p: float | None, options: dict[str, Any]
) -> None:
    assert sampling_options(temperature, top_p) == options


def test_options_of_a_call_stand_above_the_constructor_s() -> None:
    model = chat(temperature=0.5, stop="a", seed=1, generate_kwargs={"top_k": 3, "min_p": 0.1})
    assert model._options(None, {}) == {
        "do_sample": True,
        "temperature": 0.5,
        "max_new_tokens": 16,
        "stop": "a",
        "seed": 1,
        "top_k": 3,
        "min_p": 0.1,
    }
    given = {"temperature": 0, "max_tokens": 2, "seed": 5, "generate_kwargs": {"top_k": 9}}
    assert model._options(["b"], {**given, "num_beams": 2}) == {
        "do_sample": False,
        "max_new_tokens": 2,
        "stop": ["b"],
        "seed": 5,
        "top_k": 9,
        "min_p": 0.1,
        "num_beams": 2,
    }


def test_generate_kwargs_hold_where_no_argument_says_otherwise() -> None:
    theirs = {"max_new_tokens": 10, "seed": 4, "stop": ["a"]}
    model = ChatRagWindows(lm=reader(), pipeline_kwargs=theirs)  # type: ignore[call-arg]  # another name
    assert model._options(None, {}) == theirs
    assert model._options(["b"], {"max_tokens": 3, "seed": None}) == {
        "max_new_tokens": 3,
        "seed": None,
        "stop": ["b"],
    }


def test_options_reach_the_engine() -> None:
    long: dict[str, Any] = {"min_new_tokens": 6, "documents": [DOCUMENT]}
    whole = chat().invoke(BORN, **long)
    assert whole.usage_metadata is not None
    last = whole.text.split()[-1]
    assert chat().invoke(BORN, stop=[last], **long).text == whole.text.partition(last)[0]
    short = chat().invoke(BORN, max_new_tokens=1, documents=[DOCUMENT])
    assert short.response_metadata["finish_reason"] == "length"
    assert short.usage_metadata is not None
    assert short.usage_metadata["output_tokens"] == 1
    warm: dict[str, Any] = {"temperature": 5.0, "min_new_tokens": 8}
    drawn = {chat(seed=seed).invoke(BORN, **warm).text for seed in range(4)}
    assert len(drawn) > 1
    assert chat(seed=3).invoke(BORN, **warm).text == chat().invoke(BORN, seed=3, **warm).text
    pcw = chat().invoke(BORN, method=PCW(), documents=[DOCUMENT])
    assert pcw.response_metadata["method"] == {"name": "pcw"}


def test_several_answers_to_one_question() -> None:
    options: dict[str, Any] = {
        "num_beams": 2,
        "num_return_sequences": 2,
        "documents": [DOCUMENT, OTHER],
    }
    (made,) = chat().generate([[HumanMessage(BORN)]], **options).generations
    assert len(made) == 2
    assert made[0].text == "Arava"
    assert len(RagWindows(lm=reader()).generate([BORN], **options).generations[0]) == 2


def test_token_counts_are_the_model_s_own() -> None:
    tokenizer: Any = reader().tokenizer
    ids = tokenizer(BORN, add_special_tokens=False)["input_ids"]
    for model in (chat(), RagWindows(lm=reader())):
        assert model.get_token_ids(BORN) == ids
        assert model.get_num_tokens(BORN) == len(ids)
    assert chat(custom_get_token_ids=lambda text: [1]).get_num_tokens(BORN) == 1


def test_tracing_parameters() -> None:
    params = chat(temperature=0.5, stop="x")._get_ls_params(max_new_tokens=3, temperature=0.7)
    assert params["ls_provider"] == "rag_windows"
    assert params["ls_model_type"] == "chat"
    assert params["ls_temperature"] == 0.7
    assert params["ls_max_tokens"] == 3
    assert params["ls_stop"] == ["x"]
    assert RagWindows(model="tiny-reader")._get_ls_params()["ls_model_name"] == "tiny-reader"


def test_nothing_is_loaded_before_the_first_call_and_copies_share() -> None:
    model = ChatRagWindows(model="tiny-reader", max_tokens=4)
    assert model._source is None
    lm = model.windowed_lm()
    assert model.windowed_lm() is lm
    assert ChatRagWindows(model="tiny-reader", method="pcw").windowed_lm() is lm
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own
        assert twin.windowed_lm() is lm
    numbered = ChatRagWindows(model="tiny-reader", header="number").windowed_lm()
    assert numbered is not lm
    assert numbered.model is lm.model
    moved = model.model_copy(update={"header": "number"})
    assert moved.windowed_lm() is numbered


def test_bad_input_gets_langchain_s_kinds_of_error() -> None:
    model = chat()
    with pytest.raises(ModelInvalidRequestError, match="question is blank") as refused:
        model.invoke(" ")
    assert isinstance(refused.value, PromptError | ValueError)
    with pytest.raises(ModelInvalidRequestError) as unknown:
        model.invoke("a", method="telepathy")
    assert isinstance(unknown.value, MethodError)
    with pytest.raises(ContextOverflowError) as long:
        model.invoke("a " * 9000, documents=["b"])
    assert isinstance(long.value, LimitError)
    with pytest.raises(ModelInvalidRequestError):
        model.invoke("a", documents=["b"], output_attentions=True)
    with pytest.raises(ModelInvalidRequestError, match="can't be changed in a call"):
        model.invoke("a", model="another")
    with pytest.raises(ModelNotFoundError) as missing:
        ChatRagWindows(model="./nowhere").invoke("a")
    assert isinstance(missing.value, RagWindowsError)
    with pytest.raises(ValueError, match="Invalid input type"):
        model.invoke(3)  # type: ignore[arg-type]  # what is refused


def test_an_error_in_a_batch_can_be_returned_and_others_are_answered() -> None:
    model = chat().bind(documents=[DOCUMENT])
    good, bad = model.batch([BORN, " "], return_exceptions=True)
    assert isinstance(bad, ModelInvalidRequestError)
    assert isinstance(good, AIMessage)
    assert good.text == "Arava"
