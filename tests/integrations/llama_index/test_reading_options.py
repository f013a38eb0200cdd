"""Linked tokens and the guard, as LlamaIndex's users set and see them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llama_index.llms.rag_windows import RagWindowsLLM
from rag_windows import Guard
from rag_windows.errors import InputError, MethodError
from tests.rag_windows import small

PASSAGES = ["The tower is old.", "The river is wide.", "The bridge is new."]


def ask(options: dict[str, Any], **of_call: Any) -> Any:
    llm = RagWindowsLLM(
        lm=small.lm(), max_new_tokens=8, generate_kwargs={"do_sample": False}, **options
    )
    return llm.complete("What?", passages=PASSAGES, **of_call)


def test_linked_tokens() -> None:
    ordinary, parallel = ask({"method": "sequential"}), ask({})
    assert ordinary.text != parallel.text
    linked = ask({"link_tokens": "all"})
    assert linked.text == ordinary.text
    assert linked.raw["method"]["name"] == "linked"
    assert linked.raw["method"]["reader"]["name"] == "ape"
    assert ask({"link_tokens": "all"}, link_tokens=0).text == parallel.text
    assert ask({}, link_tokens="all").text == ordinary.text


def test_a_fallback_stands_in_raw() -> None:
    assert ask({}).raw["fallback"] is None
    made = ask({"fallback": Guard(passages=3)})
    assert made.text == ask({"method": "sequential"}).text
    found = json.loads(json.dumps(made.raw))["fallback"]
    assert (found["signal"], found["taken"]) == ("few short passages", True)
    llm = RagWindowsLLM(lm=small.lm(), max_new_tokens=8, fallback="sequential")
    *_, last = llm.stream_complete("What?", passages=PASSAGES[:2])
    assert last.raw["fallback"]["taken"]


@pytest.mark.parametrize("fallback", ["sequential", Guard(passages=7, spread=0.5)])
def test_they_survive_serialization(fallback: Any) -> None:
    made = RagWindowsLLM("tiny-reader", link_tokens=0.2, link_choose="deviation", fallback=fallback)
    again = RagWindowsLLM.from_dict(json.loads(json.dumps(made.to_dict())))
    assert (again.link_tokens, again.link_choose) == (0.2, "deviation")
    assert again.fallback == made.fallback
    assert isinstance(again.fallback, Guard)


@pytest.mark.parametrize(
    "options",
    [{"link_tokens": -1}, {"fallback": "pcw"}, {"fallback": {"pages": 3}}],
)
def test_what_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises((InputError, MethodError)):
        RagWindowsLLM("tiny-reader", **options)
