"""Linked tokens and the guard, as LangChain's users set and see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from langchain_rag_windows import ChatRagWindows, RagWindows
from rag_windows import Guard, WindowedLM
from rag_windows.integration import describe
from tests.integrations.profiles import GUARD, PROFILED, saved, stamped
from tests.rag_windows import small

DOCUMENTS = ["The tower is old.", "The river is wide.", "The bridge is new."]


def model(kind: type[Any] = ChatRagWindows, **options: Any) -> Any:
    return kind(lm=small.lm(), max_tokens=8, temperature=0, **options)


def ask(llm: Any, **options: Any) -> Any:
    return llm.invoke("What?", documents=DOCUMENTS, **options)


def test_linked_tokens() -> None:
    ordinary, parallel = ask(model(method="sequential")), ask(model())
    assert ordinary.content != parallel.content
    linked = ask(model(link_tokens="all"))
    assert linked.content == ordinary.content
    assert linked.response_metadata["method"]["name"] == "linked"
    assert linked.response_metadata["method"]["reader"]["name"] == "ape"
    assert ask(model(link_tokens="all"), link_tokens=0).content == parallel.content
    assert ask(model(), link_tokens="all").content == ordinary.content
    text = ask(model(RagWindows, link_tokens="all"))
    assert text == ordinary.content


def test_a_fallback_stands_in_the_metadata() -> None:
    found = ask(model(fallback=Guard(passages=3))).response_metadata["fallback"]
    assert (found["signal"], found["taken"]) == ("few short passages", True)
    assert found["measured"] <= found["threshold"] == Guard().tokens
    assert (
        ask(model(fallback=Guard(passages=3)), fallback=None).response_metadata["fallback"] is None
    )
    chunks = list(model(fallback="sequential").stream("What?", documents=DOCUMENTS[:2]))
    (last,) = (one for one in chunks if "fallback" in one.response_metadata)
    assert last.response_metadata["fallback"]["taken"]


def test_they_tell_answers_apart() -> None:
    keys = [
        repr(model(**options)._identifying_params)
        for options in (
            {},
            {"link_tokens": 1},
            {"link_tokens": 1.0},
            {"link_tokens": 1, "link_choose": "deviation"},
            {"fallback": "sequential"},
            {"fallback": Guard(passages=9)},
        )
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "options",
    [
        {"link_tokens": -1},
        {"link_choose": "last"},
        {"link_tokens": 3, "method": "ensemble"},
        {"fallback": "pcw"},
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        model(**options)


def test_a_profile_brings_the_method_and_the_threshold(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    folder = saved(tmp_path / "model")
    profile = stamped(folder, GUARD)
    profile.save(path)
    of: dict[str, Any] = {"model": folder, "max_tokens": 8, "temperature": 0}
    for given in (path, str(path), profile):
        made = ChatRagWindows(**of, calibration=given)
        assert ask(made).response_metadata["method"] == describe(PROFILED)
        assert made.windowed_lm().profile == profile
        # One engine for equal profiles, whichever way they came, so that calls share batches.
        assert made.windowed_lm() is ChatRagWindows(**of, calibration=path).windowed_lm()
    # As in from_pretrained a method beside it counts, and a call's before both.
    beside = ChatRagWindows(**of, calibration=path, method="pcw")
    assert ask(beside).response_metadata["method"] == {"name": "pcw"}
    assert beside.windowed_lm().profile == profile
    assert ask(ChatRagWindows(**of, calibration=path), method="pcw").content == ask(beside).content
    text = RagWindows(**of, calibration=path)
    assert (
        text.invoke("What?", documents=DOCUMENTS)
        == ask(ChatRagWindows(**of, calibration=path)).text
    )
    keys = {
        repr(ChatRagWindows(**of, **options)._identifying_params)
        for options in (
            {},
            {"calibration": path},
            {"calibration": stamped(folder)},
            {"method": PROFILED},
        )
    }
    assert len(keys) == 4 - 1, "a profile without a threshold is its method, and no more"


def test_a_profile_that_cannot_be_used_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="can't be read"):
        ChatRagWindows(model="no/such-model", calibration=tmp_path / "none.json")
    with pytest.raises(ValidationError, match="must be a Profile or the path"):
        ChatRagWindows(model="no/such-model", calibration=3)
    with pytest.raises(ValidationError, match="give it as profile= to the"):
        model(calibration=stamped(saved(tmp_path)))


def test_an_engine_that_is_given_keeps_its_method() -> None:
    lm = WindowedLM.from_pretrained(small.model(), tokenizer=small.tokenizer(), method="pcw")
    made = ChatRagWindows(lm=lm, max_tokens=4)
    assert ask(made).response_metadata["method"] == {"name": "pcw"}
    made = ChatRagWindows(lm=lm, max_tokens=4, method="ape")
    assert ask(made).response_metadata["method"]["name"] == "ape"
