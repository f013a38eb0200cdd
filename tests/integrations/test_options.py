"""Linked tokens, the guard and calibrations, as users of both frameworks set and see them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from langchain_rag_windows import ChatRagWindows
from llama_index.llms.rag_windows import RagWindowsLLM
from rag_windows import Guard, InputError
from tests.blackbox.test_compare import stamped
from tests.rag_windows import small

PASSAGES = ["The tower is old.", "The river is wide.", "The bridge is new."]
KINDS = pytest.mark.parametrize("kind", [ChatRagWindows, RagWindowsLLM])
Kind = Callable[..., Any]


def ask(kind: Kind, given: dict[str, Any], **of_call: Any) -> tuple[str, dict[str, Any]]:
    """The text of an answer, and what is told of it."""
    own = {} if "model_name" in given else {"lm": small.lm()}
    model = kind(**{**own, "max_new_tokens": 8, "temperature": 0, **given})
    if kind is RagWindowsLLM:
        response = model.complete("What?", passages=PASSAGES, **of_call)
        return response.text, response.raw
    message = model.invoke("What?", documents=PASSAGES, **of_call)
    return message.text, message.response_metadata


@KINDS
def test_linked_tokens(kind: Kind) -> None:
    ordinary, _ = ask(kind, {"method": "sequential"})
    parallel, _ = ask(kind, {})
    assert ordinary != parallel
    linked, told = ask(kind, {"link_tokens": "all"})
    assert linked == ordinary
    assert (told["method"]["name"], told["method"]["reader"]["name"]) == ("linked", "ape")
    assert ask(kind, {"link_tokens": "all"}, link_tokens=0)[0] == parallel
    assert ask(kind, {}, link_tokens="all")[0] == ordinary


@KINDS
def test_a_fallback_is_told(kind: Kind) -> None:
    assert ask(kind, {})[1]["fallback"] is None
    text, told = ask(kind, {"fallback": Guard(passages=3)})
    assert text == ask(kind, {"method": "sequential"})[0]
    found = json.loads(json.dumps(told))["fallback"]
    assert (found["signal"], found["taken"]) == ("few short passages", True)
    assert found["measured"] <= found["threshold"] == Guard().tokens
    if kind is not RagWindowsLLM:
        assert ask(kind, {"fallback": Guard(passages=3)}, fallback=None)[1]["fallback"] is None


@KINDS
def test_an_engine_that_is_given_keeps_its_method(kind: Kind) -> None:
    lm = small.wrapped(method="pcw")
    assert ask(kind, {"lm": lm})[1]["method"] == {"name": "pcw"}
    assert ask(kind, {"lm": lm, "method": "ape"})[1]["method"]["name"] == "ape"
    assert ask(kind, {"lm": lm}, method="ape")[1]["method"]["name"] == "ape"


@KINDS
def test_a_profile_brings_the_method(kind: Kind, tmp_path: Path) -> None:
    folder, path = tmp_path / "model", tmp_path / "profile.json"
    small.model().save_pretrained(folder)
    small.tokenizer().save_pretrained(folder)
    profile = stamped()
    profile.save(path)
    name = "profile" if kind is RagWindowsLLM else "calibration"

    def method(**options: Any) -> Any:
        return ask(kind, {"model_name": str(folder), **options})[1]["method"]

    for given in (str(path), profile):
        assert method(**{name: given}) == method(method=profile.method) != method()
        model = kind(model_name=str(folder), **{name: given})
        lm = model.lm if kind is RagWindowsLLM else model.windowed_lm()
        assert lm.profile == lm.with_cache(None).profile == profile
        # One engine for equal profiles, whichever way they came, so that calls share batches.
        again = copy.deepcopy(kind(model_name=str(folder), **{name: path}))
        assert lm is (again.lm if kind is RagWindowsLLM else again.windowed_lm())
    # As in from_pretrained a method beside it counts.
    assert method(**{name: path, "method": "pcw"}) == {"name": "pcw"}
    with pytest.raises((InputError, ValueError), match="no effect with lm="):
        ask(kind, {name: profile})
    if kind is RagWindowsLLM:
        made = RagWindowsLLM.from_dict(json.loads(json.dumps(model.to_dict())))
        assert (made.profile, made.method, made.lm) == (profile, None, lm)
