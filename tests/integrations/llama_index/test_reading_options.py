"""Linked tokens and the guard, as LlamaIndex's users set and see them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from llama_index.llms.rag_windows import RagWindowsLLM
from rag_windows import Guard, InputError, MethodError, ProfileError, WindowedLM
from rag_windows.integration import describe
from tests.integrations.profiles import GUARD, PROFILED, saved, stamped
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
    assert dict(last.raw or {})["fallback"]["taken"]


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


def test_a_profile_brings_the_method_and_the_threshold(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    folder = saved(tmp_path / "model")
    profile = stamped(folder, GUARD)
    profile.save(path)

    def method_of(**options: Any) -> Any:
        llm = RagWindowsLLM(folder, max_new_tokens=4, profile=path, **options)
        assert llm.lm.profile == profile
        return llm.complete("What?", passages=PASSAGES).raw["method"]

    assert method_of() == describe(PROFILED)
    assert method_of(method="pcw") == {"name": "pcw"}
    made = RagWindowsLLM(folder, profile=str(path))
    again = RagWindowsLLM.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again.profile == profile
    assert again.method is None
    assert again.lm is made.lm
    assert copy.deepcopy(made).profile == profile


def test_a_profile_that_cannot_be_used_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="can't be read"):
        RagWindowsLLM("no/such-model", profile=tmp_path / "none.json")
    with pytest.raises(ProfileError, match="is no rag-windows calibration profile"):
        RagWindowsLLM("no/such-model", profile={"a": 1})
    with pytest.raises(InputError, match=r"profile.*set them on the WindowedLM"):
        ask({"profile": stamped(saved(tmp_path))})


def test_an_engine_that_is_given_keeps_its_method() -> None:
    lm = WindowedLM.from_pretrained(small.model(), tokenizer=small.tokenizer(), method="pcw")
    made = RagWindowsLLM(lm=lm, max_new_tokens=4)
    assert made.complete("What?", passages=PASSAGES).raw["method"] == {"name": "pcw"}
    assert made.complete("What?", passages=PASSAGES, method="ape").raw["method"]["name"] == "ape"
