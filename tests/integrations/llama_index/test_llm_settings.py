"""Making an LLM: names, laziness, serialization, and what LlamaIndex plans with."""

from __future__ import annotations

import copy
import json
import pickle  # the LLM's own support of it is tested
import threading
from typing import Any

import pytest
import torch
from llama_index.core import Settings
from llama_index.core.bridge.pydantic import ValidationError
from llama_index.core.prompts import PromptTemplate
from transformers import AutoTokenizer

from llama_index.llms.rag_windows import RagWindowsLLM
from rag_windows import (
    APE,
    PCW,
    InputError,
    MethodError,
    ModelLoadError,
    Passage,
    PromptError,
    RagWindowsError,
)
from rag_windows.integration import method_of
from rag_windows.loading import embedded_path
from tests.integrations.llama_index.cases import llm, one_for_each_place, reader
from tests.integrations.llama_index.endpoints import user


def no_weights(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []

    def refuse(model: Any, **_: Any) -> None:
        asked.append(str(model))
        raise ModelLoadError("no weights in this test")

    monkeypatch.setattr("rag_windows.integration.shared_models.load_shared", refuse)
    return asked


def test_weights_are_loaded_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = no_weights(monkeypatch)
    model = RagWindowsLLM("tiny-reader", max_new_tokens=7, device_map="cpu")
    assert model.metadata.model_name == "tiny-reader"
    assert model.metadata.num_output == 7
    assert model.metadata.is_chat_model
    assert not model.metadata.is_function_calling_model
    model.to_dict()
    model.to_payload()
    repr(model)
    pickle.loads(pickle.dumps(model))  # noqa: S301 - made here
    copy.deepcopy(model)
    assert asked == []
    with pytest.raises(ModelLoadError, match="no weights"):
        model.complete("Where?")
    assert asked == ["tiny-reader"]


def test_context_window_is_what_one_prompt_holds() -> None:
    model = RagWindowsLLM("tiny-reader")
    limit = reader().model.config.max_position_embeddings
    assert model.position_limit == limit
    assert limit / 4 < model.metadata.context_window < limit
    assert RagWindowsLLM("tiny-reader", context_window=99).metadata.context_window == 99
    loaded = RagWindowsLLM(lm=reader())
    assert loaded.metadata.context_window == model.metadata.context_window
    longer = RagWindowsLLM("tiny-reader", max_tokens=2000, system_prompt="Be brief. " * 50)
    assert longer.metadata.context_window < model.metadata.context_window - 500


def test_a_tokenizer_of_settings_is_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = RagWindowsLLM("tiny-reader")
    before = model.metadata.context_window
    monkeypatch.setattr("llama_index.core.global_tokenizer", model.lm.tokenizer.encode)
    assert before < 0.9 * model.metadata.context_window < (model.position_limit or 0)


def test_equal_arguments_share_their_weights() -> None:
    first, second = RagWindowsLLM("tiny-reader"), RagWindowsLLM("tiny-reader", method="pcw")
    assert first.lm is second.lm
    assert first.lm.model is RagWindowsLLM("tiny-reader", header="number").lm.model


def test_threads_that_ask_at_once_load_once() -> None:
    model = RagWindowsLLM("tiny-reader", max_window_tokens=333)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(model.lm)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len(set(map(id, found))) == 1
    assert model.lm.max_window_tokens == 333


def test_a_loaded_model_is_taken_as_it_is() -> None:
    asked = one_for_each_place()[0]
    inner, tokenizer = reader().model, reader().tokenizer
    model = RagWindowsLLM(model=inner, tokenizer=tokenizer, max_new_tokens=16)
    assert model.lm.model is inner
    assert model.model_name == inner.config.name_or_path
    assert model.complete(asked.question, nodes=asked.nodes).text == asked.answer
    assert copy.deepcopy(model).lm is model.lm
    with pytest.raises(InputError, match="can't be pickled"):
        pickle.dumps(model)


def test_a_tokenizer_can_come_by_name(tmp_path: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_path("tiny-reader"))
    tokenizer.save_pretrained(tmp_path)
    for options in (
        {"tokenizer_name": str(tmp_path)},
        {"tokenizer_kwargs": {"padding_side": "left"}},
        {"tokenizer": tokenizer},
    ):
        model = RagWindowsLLM("tiny-reader", **options)
        assert len(model.lm.tokenizer) == len(tokenizer)
    assert RagWindowsLLM("tiny-reader", tokenizer=tokenizer).lm.tokenizer is tokenizer


def test_serialization_gives_the_same_llm_again() -> None:
    model = RagWindowsLLM(
        "tiny-reader",
        method=APE(temperature=0.8, scale=0.7),
        model_kwargs={"dtype": torch.float32, "token": "hf_secret", "revision": "main"},
        generate_kwargs={"do_sample": False},
        max_new_tokens=11,
        system_prompt="Be brief.",
        header="number+title",
        max_window_tokens=200,
        stopping_ids=[3],
        citations=False,
    )
    data = json.loads(json.dumps(model.to_dict()))
    assert "hf_secret" not in json.dumps(data)
    assert data["model_kwargs"]["dtype"] == "float32"
    again = RagWindowsLLM.from_dict(data)
    assert again.to_dict() == model.to_dict()
    assert again.method == APE(temperature=0.8, scale=0.7)
    assert again.class_name() == data["class_name"] == "RagWindowsLLM"
    pickled = pickle.loads(pickle.dumps(model))  # noqa: S301 - made here
    assert pickled.to_dict() == model.to_dict()
    assert pickled.lm.max_window_tokens == 200


def test_what_has_no_plain_form_leaves_its_name() -> None:
    def header(passage: Passage, number: int) -> str:
        return f"No. {number}"

    model = RagWindowsLLM("tiny-reader", header=header)
    assert model.lm.generate("Who?", ["One."]).windows
    again = RagWindowsLLM.from_dict(model.to_dict())
    with pytest.raises(PromptError, match="header"):
        again.complete("Who?")
    data = RagWindowsLLM("x", method=PCW(), model_kwargs={"a": (torch.bfloat16,)}).to_dict()
    assert (data["method"], data["model_kwargs"]) == ({"name": "pcw"}, {"a": ["bfloat16"]})
    with pytest.raises(MethodError, match="temperatur"):
        method_of({"name": "ape", "temperatur": 1.0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Give one of model_name"),
        ({"model_name": "tiny-reader", "lm": "reader"}, "Give one of model_name"),
        ({"model_name": "tiny-reader", "model": "loaded"}, "Give one of"),
        ({"lm": "reader", "model_kwargs": {"dtype": "float32"}}, "model_kwargs"),
        ({"lm": "reader", "header": "number"}, "header"),
        ({"model_name": "x", "messages_to_prompt": lambda messages: "x"}, "chat template"),
        ({"model_name": "x", "completion_to_prompt": lambda text: text}, "chat template"),
        ({"model_name": "x", "query_wrapper_prompt": PromptTemplate("<|u|>{query_str}")}, "chat"),
        ({"model_name": "x", "query_wrapper_prompt": "<|u|>{query_str}"}, "chat template"),
        ({"model_name": "x", "method": "best"}, "Unknown method"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    if arguments.get("lm") == "reader":
        arguments = {**arguments, "lm": reader()}
    with pytest.raises(RagWindowsError, match=message):
        RagWindowsLLM(**arguments)


def test_numbers_are_checked_as_llama_index_does() -> None:
    for name in ("max_new_tokens", "context_window", "max_window_tokens"):
        wrong: dict[str, Any] = {name: 0}
        with pytest.raises(ValidationError):
            RagWindowsLLM("tiny-reader", **wrong)


def test_defaults_of_huggingface_llm_ask_for_nothing() -> None:
    model = RagWindowsLLM("tiny-reader", query_wrapper_prompt=PromptTemplate("{query_str}"))
    assert model.query_wrapper_prompt is None


def test_older_and_hub_names_are_understood() -> None:
    model = RagWindowsLLM("tiny-reader", model_kwargs={"torch_dtype": "float32"})
    assert model.lm.model.dtype == torch.float32
    with pytest.raises(ModelLoadError, match="nowhere"):
        _ = RagWindowsLLM("./nowhere").metadata
    with pytest.raises(ModelLoadError, match="trust_remote_code"):
        RagWindowsLLM("tiny-reader", tokenizer_kwargs={"trust_remote_code": True}).complete("a")
    with pytest.raises(ModelLoadError, match="trust_remote_code"):
        RagWindowsLLM("tiny-reader", model_kwargs={"trust_remote_code": True}).complete("a")


def test_stopping_ids_end_an_answer() -> None:
    asked = one_for_each_place()[0]
    whole = reader().generate(asked.question, asked.passages, max_new_tokens=16)
    model = RagWindowsLLM(lm=reader(), stopping_ids=[whole.token_ids[0]])
    response = model.chat(user(asked.question), nodes=asked.nodes)
    assert response.raw["usage"]["completion_tokens"] == 1
    assert response.raw["finish_reason"] == "stop"


def test_generate_kwargs_reach_the_model() -> None:
    options = {"do_sample": True, "temperature": 5.0, "min_new_tokens": 8}
    model = RagWindowsLLM(lm=reader(), max_new_tokens=8, generate_kwargs=options)
    first, same, other = (model.complete("Who?", seed=seed).text for seed in (1, 1, 2))
    assert first == same != other


def test_the_system_prompt_stands_where_a_conversation_brings_none() -> None:
    model = RagWindowsLLM(lm=reader(), system_prompt="Be brief and kind.")
    without = llm().chat(user("Who?")).raw["usage"]["prompt_tokens"]
    for response in (model.chat(user("Who?")), model.complete("Who?")):
        assert response.raw["usage"]["prompt_tokens"] > without


def test_it_serves_as_the_llm_of_settings() -> None:
    before = Settings._llm
    try:
        Settings.llm = llm()
        assert Settings.llm is llm()
    finally:
        Settings._llm = before


def test_options_that_no_model_knows_are_errors_of_ours() -> None:
    for name in ("complete", "stream_complete"):
        with pytest.raises(TypeError, match="temprature") as caught:
            list(getattr(llm(), name)("Who?", temprature=1.0))
        assert isinstance(caught.value, RagWindowsError)
