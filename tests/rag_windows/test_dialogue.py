from __future__ import annotations

from rag_windows.prompt.conversation import Dialogue


def test_follow_ups_search_with_what_was_said() -> None:
    dialogue = Dialogue()
    assert dialogue.search_text("Who built it?").split("\n") == ["Who built it?"] * 4
    dialogue.add("Who built the bridge?", "Mara Olsen")
    dialogue.add("And the tower?", "Ada Berg")
    assert dialogue.search_text("When was she born?").split("\n") == [
        *["When was she born?"] * 4,
        *["Who built the bridge?", "Mara Olsen"],
        *["And the tower?", "Ada Berg"] * 2,
    ]
    assert len(dialogue.messages) == 4
