"""Tools put into a query, and from what a model wrote to text and calls, whole or piecewise.

transformers' response parser finds the calls; what is in them is checked here.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rag_windows.errors import PromptError
from rag_windows.prompt.answer_form import available, call_grammar
from rag_windows.prompt.conversation import Conversation
from rag_windows.prompt.tool_calls import ToolCall, ToolFormat, check_tools, chosen_tool, tool_names
from rag_windows.results import Generation

_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """A call that can't be used.

    Attributes:
        text: what the model wrote.
        error: what is wrong with it.
    """

    text: str
    error: str


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """An answer in parts.

    Attributes:
        text: what is for the user; while streaming, what was not fed out before.
        reasoning: what the model thought aloud.
        calls: of tools, in order, each with a new id of nine letters and digits.
        broken: calls that can't be used.
    """

    text: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    broken: tuple[BrokenCall, ...] = ()


class AnswerParser:
    """Reads one answer. Not for several threads at once.

    Args:
        tokenizer: of the model.
        format_: how the model writes calls.
        tools: their definitions; arguments written as plain text get the types declared there.
        opening: the beginning of the answer that was written for the model.
        continued: whether the answer goes on with the assistant's last message, so that no
            generation prompt has opened anything, such as reasoning.
    """

    def __init__(
        self,
        tokenizer: Any,
        format_: ToolFormat,
        tools: Sequence[Mapping[str, Any]] = (),
        opening: str = "",
        *,
        continued: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._format = format_
        self._tools = [dict(tool) for tool in tools]
        self._prefix = ("" if continued else format_.prefix) + opening
        self._forced = bool(opening)
        self._parser = tokenizer.get_response_parser(
            dict(format_.template), prefix=self._prefix, tools=self._tools
        )
        self._reasoning = ""
        self._raw = ""
        self._regions: list[tuple[str, Any]] = []
        self._take(self._parser.initial_events)

    def feed(self, text: str) -> str:
        """Take a piece of the answer's text; give what of it is for the user.

        Where markers of calls are special tokens, which the text lacks, and where the tokenizer
        declares its own response template, all of it comes at the end.
        """
        return self._take(self._parser.feed(text)) if self._streams else ""

    def finish(self, generation: Generation) -> ToolAnswer:
        """Read what was not fed out before, and the calls.

        Args:
            generation: the whole answer, every chunk of which was fed.
        """
        if not self._format.own:
            return self._declared(generation)
        shown = ""
        if not self._streams:
            shown = self._take(self._parser.feed(self._decode(generation)))
        shown += self._take(self._parser.finalize()[1])
        calls: list[ToolCall] = []
        broken: list[BrokenCall] = []
        for raw, value in self._regions:
            try:
                calls += self._calls(raw, value)
            except PromptError as error:
                broken.append(BrokenCall(raw, str(error)))
        if self._format.bare and broken and not self._forced:
            return ToolAnswer(generation.text)
        rest = shown if shown.strip() or not (calls or broken) else ""
        return ToolAnswer(rest, self._reasoning, tuple(calls), tuple(broken))

    def whole(self, generation: Generation) -> ToolAnswer:
        """Read a finished answer of which nothing was fed."""
        shown = self.feed(generation.text)
        rest = self.finish(generation)
        return replace(rest, text=shown + rest.text)

    @property
    def _streams(self) -> bool:
        return self._format.own and not self._format.markers

    def _take(self, events: Sequence[Mapping[str, Any]]) -> str:
        """Note what the parser found; give the text among it."""
        shown = ""
        for event in events:
            kind, field = event["type"], event["field"]
            if kind == "region_chunk" and field == "content":
                shown += event["text"]
            elif kind == "region_chunk" and field == "reasoning_content":
                self._reasoning += event["text"]
            elif kind == "region_chunk":
                self._raw += event["text"]
            elif field == "tool_calls" and kind == "region_open":
                self._raw = ""
            elif field == "tool_calls":
                self._regions.append((self._raw, event["value"]))
        return shown

    def _calls(self, raw: str, value: Any) -> list[ToolCall]:
        """The calls in one region.

        Raises:
            PromptError: it holds something else.
        """
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise PromptError(f"The model wrote a call that is no JSON: {error}") from error
        else:
            arguments = self._format.template["fields"]["tool_calls"]["content_args"]
            left = re.sub(arguments["tag_pattern"], "", raw, flags=re.DOTALL).strip()
            if left:
                raise PromptError(f"The model wrote a call that holds more than parameters: {left}")
        return [_call(entry) for entry in (value if isinstance(value, list) else [value])]

    def _declared(self, generation: Generation) -> ToolAnswer:
        """By the tokenizer's own response template."""
        text = self._decode(generation)
        try:
            message = self._tokenizer.parse_response(
                text, dict(self._format.template), prefix=self._prefix, tools=self._tools
            )
            found = message.get("tool_calls") or []
            calls = [_call(entry) for entry in (found if isinstance(found, list) else [found])]
        except (ValueError, PromptError) as error:
            return ToolAnswer("", broken=(BrokenCall(text, str(error)),))
        thoughts = next((message[name] for name in _REASONING if message.get(name)), "")
        return ToolAnswer(str(message.get("content") or ""), str(thoughts), tuple(calls))

    def _decode(self, generation: Generation) -> str:
        """The answer's text with the markers of calls in it, cut where the generation was."""
        tokenizer, markers = self._tokenizer, self._format.markers
        kept = set(tokenizer.convert_tokens_to_ids(list(markers)))
        hidden = set(tokenizer.all_special_ids) - kept
        ids = [token for token in generation.token_ids if token not in hidden]
        exact = {"clean_up_tokenization_spaces": False}
        text = str(tokenizer.decode(ids, skip_special_tokens=False, **exact))
        plain = str(tokenizer.decode(ids, skip_special_tokens=True, **exact))
        if plain.startswith(generation.text):
            text = text.removesuffix(plain[len(generation.text) :])
        return text


class AnswerReader:
    """Puts the tools of one request into its query and reads the calls out of its answer.

    Without tools, query and answer pass through. Not for several threads at once.

    Args:
        tools: those shown to the model, checked.
        opening: the beginning of a forced call.
        parser: makes what reads one answer; None without tools.
        rest: what is left to write of a forced call for each tool, and its arguments' schema.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]] = (),
        opening: str = "",
        parser: Callable[..., AnswerParser] | None = None,
        rest: Sequence[tuple[str, Mapping[str, Any]]] = (),
    ) -> None:
        self._rest = rest
        self._tools = tools
        self._opening = opening
        self._make = parser
        self._parser = None if parser is None else parser()

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
        choice: Any = None,
    ) -> AnswerReader:
        """A reader for one request.

        Args:
            tokenizer: of the model.
            template_kwargs: further variables of its chat template.
            tools: definitions, see `check_tools`.
            choice: see `chosen_tool`; with "none", the tools are not shown.

        Raises:
            ToolsUnsupportedError: the template shows no tools, its calls can't be read, or forced.
            PromptError: a definition, or the choice, can't be used.
        """
        if not tools or choice == "none":
            return cls()
        checked = check_tools(tools)
        form = ToolFormat.of(tokenizer, template_kwargs)
        wanted, name = chosen_tool(choice, tool_names(checked))
        opening = form.force(name) if wanted else ""
        parser = partial(AnswerParser, tokenizer, form, checked, opening)
        # Only where arguments are JSON; elsewhere they are text between markers.
        rest = form.rest(checked, name) if wanted and form.middle.endswith(":") else ()
        return cls(checked, opening, parser, rest)

    def grammar(self) -> str | None:
        """For ``generate``: what holds a forced call to its tool's schema.

        None where no call is forced, where arguments are not written as JSON, where a schema says
        what can't be held to, or without the extra ``structured``.
        """
        if not self._rest or not available():
            return None
        return call_grammar(self._rest, self._opening + self._rest[0][0])

    def query(self, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        """The query for the engine; messages as `Conversation.of` takes them."""
        query = Conversation.of(messages, tools=self._tools, opening=self._opening)
        if query.continued and self._make is not None:
            self._make = partial(self._make, continued=True)
            self._parser = self._make()
        return query

    def feed(self, text: str) -> str:
        """Take a chunk of a stream; give what of it is text and no call, nor may become one."""
        return text if self._parser is None else self._parser.feed(text)

    def last(self, generation: Generation) -> ToolAnswer:
        """The end of a stream whose chunks were all fed: the rest of the text, and the calls."""
        return ToolAnswer("") if self._parser is None else self._parser.finish(generation)

    def whole(self, generation: Generation) -> ToolAnswer:
        """An answer of which nothing was fed; one of several, where there are alternatives."""
        if self._make is None:
            return ToolAnswer(generation.text)
        return self._make().whole(generation)


def _call(value: object) -> ToolCall:
    """A call of ``{"name", "arguments"}`` (or ``parameters``), alone or under ``function``."""
    function = value.get("function", value) if isinstance(value, Mapping) else value
    if isinstance(function, Mapping):
        arguments = function.get("arguments", function.get("parameters"))
        value = {"function": {"name": function.get("name"), "arguments": arguments}}
    return replace(ToolCall.of(value, "the answer"), id=_call_id())


def _call_id() -> str:
    """Nine letters and digits: Mistral's templates refuse any other form."""
    letters = string.ascii_letters + string.digits
    return "".join(secrets.choice(letters) for _ in range(9))
