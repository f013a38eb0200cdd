"""Messages that make a conversation, and those that don't."""

from __future__ import annotations

from typing import Any

import pytest

from rag_windows import PromptError
from rag_windows.prompt.conversation import Conversation, Message


def test_a_question_alone_and_an_instruction_from_both_places() -> None:
    assert Conversation.of("Who?") == Conversation("", (Message("user", "Who?"),))
    messages = [{"role": "system", "content": "Second."}, {"role": "user", "content": "Who?"}]
    both = Conversation.of(messages, "First.")
    assert both == Conversation("First.\n\nSecond.", (Message("user", "Who?"),))
    assert Conversation.of("Who?", "").system == ""
    with pytest.raises(PromptError, match="prefix must be a string"):
        Conversation.of("Who?", 3)  # type: ignore[arg-type]  # the mistake under test


@pytest.mark.parametrize(
    ("query", "match"),
    [
        ([], "non-empty list"),
        (7, "must be a question"),
        ([{"role": "user"}], "'role' and 'content'"),
        (["hello"], "'role' and 'content'"),
        ([{"role": "tool", "content": "x"}], "role 'tool'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "must be a string"),
        ([{"role": "user", "content": "x", "name": "y"}], "keys \\['name'\\]"),
        ([{"role": "system", "content": ""}], "hold no text"),
    ],
)
def test_conversations_that_make_no_sense_are_refused(query: Any, match: str) -> None:
    with pytest.raises(PromptError, match=match):
        Conversation.of(query)
