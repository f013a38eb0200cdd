"""Reasoning in answers: what a model writes for itself, and what it writes for the user.

transformers' response parser finds both, by the tokenizer's own ``response_template`` where it has
one, else by the markers of the families that are known here.
"""

from __future__ import annotations

import copy
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from rag_windows.prompt.detokenize import Detokenizer

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""What response templates call the field that is not for the user."""

_ANSWER = ("content", "final")
_OPENINGS = {"open", "open_pattern"}
_DELIMITERS = {*_OPENINGS, "close", "close_pattern"}

_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought\n", "<channel|>"),
)
"""Markers around reasoning: of Qwen, DeepSeek-R1, SmolLM, GLM and others; Mistral; Seed; Gemma."""

_CHANNEL = "<|channel|>"
_CHANNELS: dict[str, Any] = {
    "reasoning_content": {
        "open": [
            f"{start}{_CHANNEL}{name}<|message|>"
            for start in ("", "<|start|>assistant")
            for name in ("analysis", "commentary")
        ],
        "close": "<|end|>",
    },
    "final": {
        "open": [f"{start}{_CHANNEL}final<|message|>" for start in ("", "<|start|>assistant")],
        "close": "<|end|>",
    },
    "content": {},
}
"""OpenAI's Harmony format, which gpt-oss writes."""


def _tags_template(opening: str, closing: str) -> dict[str, Any]:
    # Later in an answer, a marker is part of the text.
    thinking = {"open_pattern": rf"\A\s*{re.escape(opening)}", "close": closing}
    return {"reasoning_content": thinking, "content": {}}


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model's answers divide into reasoning and text.

    Attributes:
        template: for transformers' response parser.
        detokenizer: shows the markers, where they are special tokens.
        markers: around the reasoning; None where ``template`` is the tokenizer's own.
        prefix: what was written of the answer before its first token.
    """

    template: Mapping[str, Any]
    detokenizer: Detokenizer
    markers: tuple[str, str] | None
    prefix: str = ""

    @classmethod
    def of(cls, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> ReasoningFormat | None:
        """That of a tokenizer's chat template; None where answers hold no reasoning."""
        added = tokenizer.added_tokens_decoder.items()
        special = {id_: str(token) for id_, token in added if token.special}
        own = getattr(tokenizer, "response_template", None)
        if own is not None:
            fields = {
                name: {key: field[key] for key in field.keys() & _DELIMITERS}
                for name, field in own["fields"].items()
                if name in (*_REASONING, *_ANSWER)
            }
            if "content" not in fields or fields.keys() <= set(_ANSWER):
                return None
            template = {**own, "defaults": {}, "fields": fields}
            return cls(template, Detokenizer(tokenizer, shown=special), None)
        if not getattr(tokenizer, "chat_template", None):
            return None
        shown = tokenizer.get_chat_template(template_kwargs.get("chat_template"))
        fields, markers = {}, ("", "")
        if _CHANNEL in shown:
            fields, markers = _CHANNELS, (f"{_CHANNEL}analysis<|message|>", "<|end|><|start|>")
        else:
            for opening, closing in _TAGS:
                if closing in shown or opening.strip() in shown:
                    fields, markers = _tags_template(opening, closing), (opening, closing)
        if not fields:
            return None
        written = "".join(markers)
        seen = [id_ for id_, token in special.items() if token in written]
        template = {"start_anchor_pattern": r"\A", "fields": fields}
        return cls(template, Detokenizer(tokenizer, shown=seen), markers)

    def after(self, written: str) -> ReasoningFormat:
        """For answers behind what the chat template ``written`` at the end of the prompt."""
        if self.markers is None:
            return replace(self, prefix=written)
        opening, closing = self.markers
        opened = written.rfind(opening.strip()) > written.rfind(closing)
        return replace(self, prefix=opening if opened else "")

    def parts(self) -> AnswerParts:
        """What divides one answer as it comes."""
        return AnswerParts(self)

    def split(self, written: str) -> tuple[str, str]:
        """The reasoning and the text of a whole answer; `detokenizer` gives what was written."""
        parts = self.parts()
        pieces = parts.feed(written), parts.end()
        reasoning, text = ("".join(each) for each in zip(*pieces, strict=True))
        return reasoning, text

    def tokens(self, ids: Sequence[int]) -> int:
        """How many of an answer's tokens are reasoning, markers included."""

        def begun(count: int) -> bool:
            parts = self.parts()
            parts.feed(self.detokenizer.text(ids[:count]))
            return parts.answering

        parts = self.parts()
        parts.feed(self.detokenizer.text(ids))
        if not parts.thought:
            return 0
        return bisect_left(range(len(ids)), True, key=lambda index: begun(index + 1)) + (
            1 if parts.answering else 0
        )


class AnswerParts:
    """Divides one answer as it comes; not for several threads at once.

    White space around the reasoning belongs to neither.

    Attributes:
        thought: whether there is reasoning, or was.
        answering: whether it is over, or there is none.
    """

    def __init__(self, format: ReasoningFormat) -> None:
        self.thought = self.answering = False
        fields = format.template["fields"]
        # Whether an answer follows its reasoning with nothing in front of it.
        self._direct = "final" not in fields and not fields["content"].keys() & _OPENINGS
        # White space that may end the reasoning, or stand between two pieces of it.
        self._held = ""
        self._reasoned = self._said = False
        template: Any = format.template
        self._parser = ResponseParser(template, prefix=format.prefix)
        # A pattern at the end of the prefix waits for what follows.
        self._read([*self._parser.initial_events, *self._parser.feed("")])
        if format.markers is not None and format.prefix:
            self.thought = True
        self._reasoned = self._said = False
        self._held = ""

    def fork(self) -> AnswerParts:
        """A copy that continues independently."""
        other = copy.copy(self)
        other._parser = copy.copy(self._parser)
        return other

    def feed(self, written: str) -> tuple[str, str]:
        """Take a piece of what the model writes; gives what of it is reasoning, and text."""
        return self._read(self._parser.feed(written))

    def end(self) -> tuple[str, str]:
        """The rest of both, where nothing follows."""
        _, events = self._parser.finalize()
        return self._read(events)

    def _read(self, events: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        reasoning, text = "", ""
        for event in events:
            kind, chunk = event["type"], str(event.get("text", ""))
            if event["field"] in _ANSWER:
                self.answering = True
                if self.thought and not self._said:
                    chunk = chunk.lstrip()
                self._said = self._said or bool(chunk)
                text += chunk
            elif kind == "region_open":
                self.thought, self.answering = True, False
                self._held = "\n\n" if self._reasoned else ""
            elif kind == "region_close":
                self._held = ""
                self.answering = self._direct
            else:
                chunk = self._held + chunk if self._reasoned else chunk.lstrip()
                ended = chunk.rstrip()
                self._held = chunk[len(ended) :]
                self._reasoned = self._reasoned or bool(ended)
                reasoning += ended
        return reasoning, text
