"""Messages that an adapter adds one by one, as a conversation and the passages that they bring."""

from __future__ import annotations

from rag_windows import Passage
from rag_windows.integration import Transcript, call_entry

NOTE = "2 documents; they stand at the beginning of this conversation."
CALL = call_entry("search", {"q": "Vara"}, "a")
FOUND = [Passage("One."), Passage("Two.")]


def searched() -> Transcript:
    """A question, a call of a tool, and its result of two passages."""
    transcript = Transcript()
    transcript.add("user", "Who?")
    transcript.add("assistant", "Let me see.", calls=[CALL])
    transcript.bring("results", FOUND)
    transcript.add("tool", "", brought=2, call_id="a", name="search")
    return transcript


def test_a_result_of_passages_becomes_a_note() -> None:
    transcript = searched()
    assert transcript.ways == {"results": FOUND}
    assert transcript.count() == 2
    result = {"role": "tool", "content": NOTE, "tool_call_id": "a", "name": "search"}
    assert transcript.conversation(tools=True) == [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
        result,
    ]
    other = Transcript("passages")
    other.add("tool", "", brought=2, call_id="b")
    assert other.messages.pop()["content"] == NOTE.replace("documents", "passages")
    other.add("tool", "They are in the register.", brought=2, call_id="a")
    assert other.messages[0]["content"] == "They are in the register."


def test_without_tools_calls_that_brought_only_passages_are_left_out() -> None:
    assert searched().conversation(tools=False) == [{"role": "user", "content": "Who?"}]
    transcript = searched()
    transcript.messages[1]["tool_calls"].append(call_entry("count", {}, "b"))
    transcript.add("tool", "42", call_id="b")
    shown = transcript.conversation(tools=False)
    assert [one["content"] for one in shown] == ["Who?", "Let me see.", NOTE, "42"]


def test_what_held_nothing_but_passages_is_left_out_and_one_role_is_joined() -> None:
    transcript = Transcript()
    transcript.add("system", "Be brief.")
    transcript.add("user", " ", brought=1)
    transcript.add("user", "Hello.")
    transcript.add("user", "Who?", brought=1)
    transcript.add("user", "")
    shown = transcript.conversation(tools=False)
    assert [one["content"] for one in shown] == ["Be brief.", "Hello.\n\nWho?"]
    assert len(transcript.messages) == 5
