"""Tools put into a query, and from what a model wrote to text and calls, whole or piecewise.

transformers' response parser finds the calls; what is in them is checked here.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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


class AnswerReader:
    """Puts the tools of one request into its query and reads the calls out of its answer.

    Without tools, query and answer pass through. Not for several threads at once.

    Args:
        tokenizer: of the model; None without tools.
        form: how the model writes calls; None without tools.
        tools: definitions of those shown to the model, checked; arguments written as plain text get
            the types declared there.
        opening: the beginning of a forced call, written for the model.
        rest: what is left to write of a forced call for each tool, and its arguments' schema.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        form: ToolFormat | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        opening: str = "",
        rest: Sequence[tuple[str, Mapping[str, Any]]] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._form = form
        self._tools = [dict(tool) for tool in tools]
        self._opening = opening
        self._rest = rest
        self._begin("" if form is None else form.prefix)

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
        # Only where arguments are JSON; elsewhere they are text between markers.
        rest = form.rest(checked, name) if wanted and form.middle.endswith(":") else ()
        return cls(tokenizer, form, checked, opening, rest)

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
        if query.continued:
            # No generation prompt has opened anything, such as reasoning.
            self._begin("")
        return query

    def feed(self, text: str) -> str:
        """Take a chunk of a stream; give what of it is text and no call, nor may become one.

        Where markers of calls are special tokens, which the text lacks, and where the tokenizer
        declares its own response template, all of it comes at the end.
        """
        if self._form is None:
            return text
        return self._take(self._parser.feed(text)) if self._streams else ""

    def last(self, generation: Generation) -> ToolAnswer:
        """The end of a stream whose chunks were all fed: the rest of the text, and the calls."""
        if self._form is None:
            return ToolAnswer("")
        if not self._form.own:
            return self._declared(self._form, generation)
        shown = ""
        if not self._streams:
            shown = self._take(self._parser.feed(self._decode(self._form, generation)))
        shown += self._take(self._parser.finalize()[1])
        calls: list[ToolCall] = []
        broken: list[BrokenCall] = []
        for raw, value in self._regions:
            try:
                calls += _calls(self._form, raw, value)
            except PromptError as error:
                broken.append(BrokenCall(raw, str(error)))
        if self._form.bare and broken and not self._opening:
            return ToolAnswer(generation.text)
        rest = shown if shown.strip() or not (calls or broken) else ""
        return ToolAnswer(rest, self._reasoning, tuple(calls), tuple(broken))

    def whole(self, generation: Generation) -> ToolAnswer:
        """An answer of which nothing was fed; one of several, where there are alternatives."""
        self._begin(self._prefix)
        shown = self.feed(generation.text)
        rest = self.last(generation)
        return replace(rest, text=shown + rest.text)

    def _begin(self, prefix: str) -> None:
        """Read an answer from its start, which stands behind this part of the template's text."""
        self._prefix = prefix
        self._reasoning = self._raw = ""
        self._regions: list[tuple[str, Any]] = []
        if self._form is not None:
            self._parser = self._tokenizer.get_response_parser(
                dict(self._form.template), prefix=prefix + self._opening, tools=self._tools
            )
            self._take(self._parser.initial_events)

    @property
    def _streams(self) -> bool:
        return self._form is not None and self._form.own and not self._form.markers

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

    def _declared(self, form: ToolFormat, generation: Generation) -> ToolAnswer:
        """By the tokenizer's own response template."""
        text = self._decode(form, generation)
        prefix = self._prefix + self._opening
        try:
            message = self._tokenizer.parse_response(
                text, dict(form.template), prefix=prefix, tools=self._tools
            )
            found = message.get("tool_calls") or []
            calls = [_call(entry) for entry in (found if isinstance(found, list) else [found])]
        except (ValueError, PromptError) as error:
            return ToolAnswer("", broken=(BrokenCall(text, str(error)),))
        thoughts = next((message[name] for name in _REASONING if message.get(name)), "")
        return ToolAnswer(str(message.get("content") or ""), str(thoughts), tuple(calls))

    def _decode(self, form: ToolFormat, generation: Generation) -> str:
        """The answer's text with the markers of calls in it, cut where the generation was."""
        tokenizer = self._tokenizer
        kept = set(tokenizer.convert_tokens_to_ids(list(form.markers)))
        hidden = set(tokenizer.all_special_ids) - kept
        ids = [token for token in generation.token_ids if token not in hidden]
        exact = {"clean_up_tokenization_spaces": False}
        text = str(tokenizer.decode(ids, skip_special_tokens=False, **exact))
        plain = str(tokenizer.decode(ids, skip_special_tokens=True, **exact))
        if plain.startswith(generation.text):
            text = text.removesuffix(plain[len(generation.text) :])
        return text


def _calls(form: ToolFormat, raw: str, value: Any) -> list[ToolCall]:
    """The calls in one region of an answer.

    Raises:
        PromptError: it holds something else.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise PromptError(f"The model wrote a call that is no JSON: {error}") from error
    else:
        arguments = form.template["fields"]["tool_calls"]["content_args"]
        left = re.sub(arguments["tag_pattern"], "", raw, flags=re.DOTALL).strip()
        if left:
            raise PromptError(f"The model wrote a call that holds more than parameters: {left}")
    return [_call(entry) for entry in (value if isinstance(value, list) else [value])]


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
