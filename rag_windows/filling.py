"""Messages whose texts can be swapped for placeholders that no text can forge."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from rag_windows.conversation import Conversation, Message
from rag_windows.tool_calls import ToolCall

SLOT = -1
"""Index of the placeholder of the passages."""


class Filling:
    """The messages of one conversation as a chat template gets them.

    Attributes:
        turns: the messages.
        continued: whether the answer goes on with the last one.
        tools: definitions of tools, for the template.
        slot: whether the passages' placeholder stands in the first user message.
        texts: the untrusted texts, empty ones left out: contents, and strings of tool calls.
        owners: for each text, the index of its message.
        encoded: indices of texts that a template may write as JSON strings.
        optional: indices of texts that a template may leave out: what an assistant says beside
            its calls.
        index: placeholder -> index into ``texts``.
        marks: matches any placeholder, as a group.

    Args:
        conversation: the turns and tools.
        system: the instruction as a message of its own, or None.
        folded: text put before the passages in the first user message.
        slot: whether there are passages.
    """

    def __init__(
        self, conversation: Conversation, *, system: str | None, folded: str, slot: bool
    ) -> None:
        self.turns = [Message("system", system)] if system is not None else []
        self.turns += conversation.turns
        self.continued = conversation.continued
        self.tools = conversation.tools
        self.slot = slot
        self.texts: list[str] = []
        self.owners: list[int] = []
        self.encoded: set[int] = set()
        self.optional: set[int] = set()
        self._contents: list[list[int]] = []
        self._calls: list[list[Any]] = []
        first_user = next((i for i, turn in enumerate(self.turns) if turn.role == "user"), None)
        for i, turn in enumerate(self.turns):
            layout = self._add(folded, i) if i == first_user else []
            if slot and i == first_user:
                layout.append(SLOT)
            own = self._add(turn.content, i)
            if turn.role == "tool":
                self.encoded.update(own)
            if turn.calls:
                self.optional.update(own)
            self._contents.append(layout + own)
            self._calls.append([self._call(call, i) for call in turn.calls])
        self._nonce = _nonce()
        while any(self._nonce in text for text in self.texts):
            self._nonce = _nonce()
        self.index = {self.mark(i): i for i in range(len(self.texts))}
        self.marks = re.compile(f"({self._nonce}[\ue100-\uf0ff]{{2}})")

    def mark(self, index: int) -> str:
        """Placeholder of a text, or of the passages: private-use characters survive trimming."""
        high, low = divmod(index + 1, 4096)
        return f"{self._nonce}{chr(0xE100 + high)}{chr(0xE100 + low)}"

    def messages(self, real: set[int]) -> list[dict[str, Any]]:
        """Messages with the true texts where their index is in ``real``, else placeholders."""

        def text(indices: Sequence[int]) -> str:
            return "".join(self.texts[i] if i in real else self.mark(i) for i in indices)

        def value(shape: Any) -> Any:
            if isinstance(shape, _Text):
                return text(shape)
            if isinstance(shape, dict):
                return {value(key): value(entry) for key, entry in shape.items()}
            return [value(entry) for entry in shape] if isinstance(shape, list) else shape

        made: list[dict[str, Any]] = []
        for turn, content, calls in zip(self.turns, self._contents, self._calls, strict=True):
            message: dict[str, Any] = {"role": turn.role, "content": text(content)}
            if calls:
                message["tool_calls"] = [value(call) for call in calls]
            if turn.call_id is not None:
                message["tool_call_id"] = turn.call_id
            if turn.name is not None:
                message["name"] = turn.name
            made.append(message)
        return made

    def fill(self, written: Sequence[str], texts: Sequence[str]) -> str:
        """The rendered prompt with texts in place of their placeholders."""
        return "".join(texts[self.index[p]] if p in self.index else p for p in written)

    def _add(self, text: str, message: int) -> list[int]:
        if not text:
            return []
        self.texts.append(text)
        self.owners.append(message)
        return [len(self.texts) - 1]

    def _call(self, call: ToolCall, message: int) -> dict[str, Any]:
        function = {
            "name": self._shape(call.name, message),
            "arguments": self._shape(call.arguments, message),
        }
        identity = {} if call.id is None else {"id": call.id}
        return {**identity, "type": "function", "function": function}

    def _shape(self, value: Any, message: int) -> Any:
        """JSON data with its strings, keys included, turned into texts."""
        if isinstance(value, str):
            indices = self._add(value, message)
            self.encoded.update(indices)
            return _Text(indices)
        if isinstance(value, Mapping):
            return {self._shape(k, message): self._shape(v, message) for k, v in value.items()}
        if isinstance(value, list):
            return [self._shape(entry, message) for entry in value]
        return value


class _Text(tuple[int, ...]):
    """Indices of the texts that make a string; none for an empty one."""

    __slots__ = ()


def _nonce() -> str:
    return "".join(chr(0xE000 + secrets.randbelow(256)) for _ in range(16))
