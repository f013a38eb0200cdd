"""Linked tokens and the guard, as LangChain's users set and see them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from langchain_rag_windows import ChatRagWindows, RagWindows
from rag_windows import Guard
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
