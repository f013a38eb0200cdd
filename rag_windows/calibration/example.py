"""What a method is judged on: a question, its passages, and the right answer where it is known."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_windows.errors import InputError
from rag_windows.passage import Passage
from rag_windows.prompt.conversation import Conversation
from rag_windows.prompt.visible_text import strict_json
from rag_windows.request import Messages, PassageLike

_KEYS = ("query", "question", "passages", "answer", "kind")


@dataclass(frozen=True, slots=True)
class Example:
    """One question that stands for those the model will get.

    Attributes:
        query: a question or a conversation, as in `WindowedLM.generate`.
        passages: what the retriever found for it, the useless ones included.
        answer: the right answer, or None for an unlabelled example.
        kind: "multi-hop" marks a question whose answer needs several passages together; any other
            value, and None, counts as a question that one passage answers.

    Raises:
        InputError: a field has the wrong type, or the answer is blank.
    """

    query: Messages
    passages: Sequence[PassageLike] = ()
    answer: str | None = None
    kind: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.query, str | Sequence | Conversation):
            raise InputError("An example needs a 'query' (or 'question').")
        if not all(isinstance(text, str | None) for text in (self.answer, self.kind)):
            raise InputError(
                f"An example's answer and kind must be strings: {self.answer!r}, {self.kind!r}."
            )
        if self.answer is not None and not self.answer.strip():
            raise InputError("An example's answer is blank; leave it out where there is none.")
        if isinstance(self.passages, str) or not isinstance(self.passages, Sequence):
            raise InputError(f"An example's passages must be a list, not {self.passages!r}.")
        object.__setattr__(self, "passages", tuple(map(Passage.of, self.passages)))

    @property
    def multi_hop(self) -> bool:
        """Whether the answer is said to need several passages."""
        return self.kind == "multi-hop"

    @classmethod
    def of(cls, value: Example | Mapping[str, Any]) -> Example:
        """Make an example from one, or from a mapping as a line of JSONL holds it.

        Args:
            value: keys ``query`` (or ``question``), ``passages``, ``answer``, ``kind``. Others are
                an error, so that no field is lost by a typo.

        Raises:
            InputError: no question, an unknown key, or a wrong type.
        """
        if isinstance(value, Example):
            return value
        if not isinstance(value, Mapping):
            raise InputError(f"An example must be an Example or a mapping, not {value!r}.")
        if unknown := sorted(str(key) for key in value if key not in _KEYS):
            raise InputError(f"Unknown example keys {unknown}; use {list(_KEYS)}.")
        given = {
            key: value[key] for key in ("passages", "answer", "kind") if value.get(key) is not None
        }
        return cls(value.get("query", value.get("question")), **given)


def read_examples(path: str | Path) -> list[Example]:
    """Read examples from a JSONL file, one a line; blank lines are left out.

    Raises:
        InputError: the file can't be read, or a line is no example; the message names the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The examples {str(path)!r} can't be read: {error}.") from error
    examples = []
    # Not splitlines(): a JSON string may hold U+2028 and its like as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            examples.append(Example.of(json.loads(strict_json(line))))
        except (ValueError, InputError) as error:
            raise InputError(
                f"{str(path)!r}, line {number}, is no example: {error} Write one a line, such as "
                '{"query": "...", "passages": ["...", "..."], "answer": "..."}.'
            ) from error
    if not examples:
        raise InputError(f"{str(path)!r} holds no examples.")
    return examples
