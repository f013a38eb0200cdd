"""What was said so far in a conversation whose every turn retrieves anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Dialogue:
    """What was said so far.

    Attributes:
        messages: of roles "user" and "assistant", oldest first.
    """

    messages: list[Mapping[str, str]] = field(default_factory=list)

    def with_question(self, question: str) -> list[Mapping[str, str]]:
        """The messages so far and a new question."""
        return [*self.messages, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        """Keep a turn."""
        self.messages = [
            *self.with_question(question),
            {"role": "assistant", "content": answer},
        ]

    def search_text(self, question: str) -> str:
        """What to retrieve with: a follow-up such as "When was she born?" names nothing itself.

        The question counts four times, the turn before it twice, and the two turns before that
        once: several follow-ups in a row still find the entity that the first of them named.
        """
        before = [message["content"] for message in self.messages[-6:]]
        return "\n".join([*[question] * 4, *before, *before[-2:]])
