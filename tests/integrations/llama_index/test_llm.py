"""Making an LLM, what LlamaIndex plans with, options of calls, and what is known of an answer."""

from __future__ import annotations

import copy
import json
import pickle  # the LLM's own support of it is tested
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_index.core.base.llms.types import ChatResponse, CompletionResponse
from llama_index.core.bridge.pydantic import ValidationError
from llama_index.core.prompts import PromptTemplate

from llama_index.llms.rag_windows import RagWindowsLLM
from rag_windows import (
    APE,
    PCW,
    Guard,
    InputError,
    MethodError,
    ModelLoadError,
    PromptError,
)
from tests.integrations.cases import PLACES, case, reader
from tests.integrations.llama_index.asking import (
    ENDPOINTS,
    ask,
    llm,
    nodes,
    nodes_of,
    question,
    text_of,
    user,
)


def again(model: RagWindowsLLM) -> RagWindowsLLM:
    """The LLM, made of what it writes down."""
    made: RagWindowsLLM = RagWindowsLLM.from_dict(json.loads(json.dumps(model.to_dict())))
    return made


def test_weights_are_loaded_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Any, **_: Any) -> None:
        raise ModelLoadError("no weights in this test")

    monkeypatch.setattr("rag_windows.integration.shared_models.load_shared", refuse)
    model = RagWindowsLLM("tiny-reader", max_new_tokens=7, device_map="cpu")
    assert (model.metadata.model_name, model.metadata.num_output) == ("tiny-reader", 7)
    assert model.metadata.is_chat_model
    assert not model.metadata.is_function_calling_model
    assert model.to_dict()
    assert model.to_payload()
    assert repr(model)
    pickle.loads(pickle.dumps(model))  # noqa: S301 - made here
    copy.deepcopy(model)
    with pytest.raises(ModelLoadError, match="no weights"):
        model.complete("Where?")


def test_equal_arguments_share_their_weights() -> None:
    first, second = RagWindowsLLM("tiny-reader"), RagWindowsLLM("tiny-reader", method="pcw")
    assert first.lm is second.lm
    assert first.lm.model is RagWindowsLLM("tiny-reader", header="number").lm.model


def test_context_window_is_what_one_prompt_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = RagWindowsLLM("tiny-reader")
    limit = reader().model.config.max_position_embeddings
    assert model.position_limit == limit
    window = model.metadata.context_window
    assert limit / 4 < window < limit
    assert RagWindowsLLM("tiny-reader", context_window=99).metadata.context_window == 99
    assert RagWindowsLLM(lm=reader()).metadata.context_window == window
    longer = RagWindowsLLM("tiny-reader", max_tokens=2000, system_prompt="Be brief. " * 50)
    assert longer.metadata.context_window < window - 500
    # A tokenizer of LlamaIndex's settings is the unit.
    monkeypatch.setattr("llama_index.core.global_tokenizer", model.lm.tokenizer.encode)
    assert window < 0.9 * model.metadata.context_window < limit


def test_loaded_models_and_tokenizers_are_taken(tmp_path: Path) -> None:
    one, inner, tokenizer = case(PLACES[0]), reader().model, reader().tokenizer
    model = RagWindowsLLM(model=inner, tokenizer=tokenizer, max_new_tokens=16)
    assert model.lm.model is inner
    assert model.model_name == inner.config.name_or_path
    assert model.complete(one.question, nodes=nodes_of(one)).text == one.answer
    assert copy.deepcopy(model).lm is model.lm
    with pytest.raises(InputError, match="can't be pickled"):
        pickle.dumps(model)
    tokenizer.save_pretrained(tmp_path)
    for options in (
        {"tokenizer_name": str(tmp_path)},
        {"tokenizer_kwargs": {"padding_side": "left"}},
        {"tokenizer": tokenizer},
    ):
        assert len(RagWindowsLLM("tiny-reader", **options).lm.tokenizer) == len(tokenizer)
    older = RagWindowsLLM("tiny-reader", model_kwargs={"torch_dtype": "float32"})
    assert older.lm.model.dtype == torch.float32


def test_serialization_gives_the_same_llm_again() -> None:
    model = RagWindowsLLM(
        "tiny-reader",
        method=APE(temperature=0.8, scale=0.7),
        model_kwargs={"dtype": torch.float32, "token": "hf_secret", "revision": "main"},
        generate_kwargs={"do_sample": False},
        header="number+title",
        max_window_tokens=200,
        stopping_ids=[3],
        link_tokens=0.2,
        fallback=Guard(passages=7, tokens=512),
    )
    data = model.to_dict()
    assert "hf_secret" not in json.dumps(data)
    assert data["model_kwargs"]["dtype"] == "float32"
    made = again(model)
    assert made.to_dict() == data
    assert (made.method, made.fallback) == (model.method, model.fallback)
    assert made.class_name() == data["class_name"] == "RagWindowsLLM"
    pickled = pickle.loads(pickle.dumps(model))  # noqa: S301 - made here
    assert pickled.to_dict() == data
    assert pickled.lm.max_window_tokens == 200
    # What has no plain form leaves its name, and fails with that.
    named = again(RagWindowsLLM("tiny-reader", header=lambda passage, number: "x"))
    with pytest.raises(PromptError, match="header"):
        named.complete("Who?")
    plain = RagWindowsLLM("x", method=PCW(), model_kwargs={"a": (torch.bfloat16,)}).to_dict()
    assert (plain["method"], plain["model_kwargs"]) == ({"name": "pcw"}, {"a": ["bfloat16"]})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, InputError, "Exactly one of model_name"),
        ({"model_name": "tiny-reader", "lm": "reader"}, InputError, "Exactly one of model_name"),
        ({"lm": "reader", "model_kwargs": {"dtype": "float32"}}, InputError, "model_kwargs"),
        ({"messages_to_prompt": lambda messages: "x"}, InputError, "chat template"),
        ({"query_wrapper_prompt": PromptTemplate("<|u|>{query_str}")}, InputError, "chat"),
        ({"method": "best"}, MethodError, "Unknown method"),
        ({"fallback": "pcw"}, InputError, "fallback must be"),
        ({"profile": "none.json"}, InputError, "can't be used"),
        ({"max_new_tokens": 0}, ValidationError, "greater than"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    if arguments and not arguments.keys() & {"lm", "model"}:
        arguments = {"model_name": "no/such-model", **arguments}
    if arguments.get("lm") == "reader":
        arguments = {**arguments, "lm": reader()}
    with pytest.raises(error, match=message):
        RagWindowsLLM(**arguments)


def test_what_is_missing_is_told() -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        _ = RagWindowsLLM("./nowhere").metadata
    for name in ("tokenizer_kwargs", "model_kwargs"):
        options: dict[str, Any] = {name: {"trust_remote_code": True}}
        with pytest.raises(ModelLoadError, match="trust_remote_code"):
            RagWindowsLLM("tiny-reader", **options).complete("a")


# Calls


@pytest.mark.parametrize(("verb", "way"), ENDPOINTS)
def test_raw_is_json_with_all_that_is_known(verb: str, way: str) -> None:
    one = case(PLACES[1])
    asked = question(verb, one.question)
    text, _, pieces = ask(llm(), verb, way, asked, nodes=nodes_of(one), min_new_tokens=6)
    kind = CompletionResponse if verb == "complete" else ChatResponse
    assert all(isinstance(piece, kind) for piece in pieces)
    *before, raw = [piece.raw for piece in pieces]
    assert before == [None] * len(before)
    assert json.loads(json.dumps(raw)) == raw
    usage = raw["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert (raw["method"]["name"], raw["finish_reason"]) == ("ape", "stop")
    assert 0 < raw["timings"]["encode_s"] < raw["timings"]["ttft_s"] < raw["timings"]["total_s"]
    masses = [entry["mass"] for entry in raw["citations"]]
    assert sum(masses) + raw["prefix_mass"] + raw["query_mass"] == pytest.approx(1, abs=1e-3)
    if "stream" in way:
        assert len(pieces) > 2
        assert "".join(piece.delta for piece in pieces) == text
        assert all(text.startswith(text_of(piece)) for piece in pieces)


@pytest.mark.parametrize(("verb", "way"), ENDPOINTS)
def test_wrong_passages_are_refused(verb: str, way: str) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"passages": ["a"], "nodes": nodes("b")}, "in several ways at once"),
        ({"nodes": ["a text"]}, "as passages= instead"),
        ({"passages": "a text"}, "Wrap a single one in"),
    ]
    for options, message in wrong:
        with pytest.raises(InputError, match=message):
            ask(llm(), verb, way, question(verb, "Where?"), **options)


def test_options_of_a_call_go_before_those_of_the_llm() -> None:
    told: list[tuple[int, int]] = []
    options: dict[str, Any] = {"method": "pcw", "max_new_tokens": 1, "citations": False}
    options["on_encoded"] = lambda done, total: told.append((done, total))
    raw = llm().complete("Who?", nodes=nodes("One.", "Two."), **options).raw
    assert (raw["method"], raw["usage"]["completion_tokens"]) == ({"name": "pcw"}, 1)
    assert raw["citations"] is None
    assert told[-1] == (2, 2)
    raw = llm().complete("Who?", passages=["One."], method="sequential").raw
    assert raw["windows"] == []
    response = llm().chat(user("Who is there?"), passages=[], nodes=None)
    assert response.raw["windows"] == response.raw["citations"] == []
    assert len(response.message.blocks) == 1
    with pytest.raises(InputError, match=r"'temprature'. Did you mean 'temperature'"):
        llm().complete("Who?", temprature=1.0)


def test_arguments_of_the_constructor_hold_for_every_call() -> None:
    one = case(PLACES[0])
    first = reader().generate(one.question, one.passages, max_new_tokens=16).token_ids[0]
    ending = RagWindowsLLM(lm=reader(), stopping_ids=[first])
    raw = ending.chat(user(one.question), nodes=nodes_of(one)).raw
    assert (raw["usage"]["completion_tokens"], raw["finish_reason"]) == (1, "stop")
    options = {"do_sample": True, "temperature": 5.0, "min_new_tokens": 8}
    drawing = RagWindowsLLM(lm=reader(), max_new_tokens=8, generate_kwargs=options)
    texts = [drawing.complete("Who?", seed=seed).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
