from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from rag_windows import InputError
from rag_windows_retrievers import (
    BM25Retriever,
    ConversationalRetriever,
    last_turns,
)
from tests.retrievers.small import CORPUS

Condense = Callable[[Sequence[Mapping[str, Any]]], str]
TALK: list[Mapping[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who bakes?"},
    {"role": "assistant", "content": "Bakers do."},
    {"role": "user", "content": "Is there a harbour?"},
    {"role": "assistant", "content": None, "tool_calls": [{}]},
    {"role": "tool", "content": "irrelevant"},
    {"role": "assistant", "content": "Yes, at Halden."},
    {"role": "user", "content": "When was its bridge built?"},
]


def query(condense: Condense | None = None, talk: list[Mapping[str, Any]] = TALK) -> str:
    return ConversationalRetriever(BM25Retriever(CORPUS), condense).query(talk)


@pytest.mark.parametrize(
    ("condense", "expected"),
    [
        (last_turns(0), "When was its bridge built?"),
        (last_turns(1, weight=0), "Is there a harbour?\nWhen was its bridge built?"),
        (
            None,
            "Who bakes?\nIs there a harbour?\nWhen was its bridge built?"
            + "\n\nWhen was its bridge built?" * 3,
        ),
    ],
)
def test_what_is_looked_for(condense: Condense | None, expected: str) -> None:
    assert query(condense) == expected


def test_a_question_alone_is_asked_as_it_is() -> None:
    def never(messages: object) -> str:
        raise NotImplementedError

    retriever = ConversationalRetriever(BM25Retriever(CORPUS), never)
    expected = BM25Retriever(CORPUS).retrieve("lakes")
    assert retriever.retrieve("lakes") == expected
    assert retriever.retrieve([TALK[0], {"role": "user", "content": "lakes"}]) == expected


@pytest.mark.parametrize(
    "talk", [[], TALK[:3], [{"content": "x"}], [{"role": "user", "content": ["x"]}]]
)
def test_what_is_refused(talk: list[Any]) -> None:
    with pytest.raises(InputError, match="must end with a user's message"):
        query(None, talk)
    with pytest.raises(InputError, match="at least 0, not -1 and 3"):
        last_turns(-1)
