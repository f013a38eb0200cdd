"""Calls of tools as models write them: how a template has them, forced, and read from answers.

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

from jinja2.exceptions import TemplateError

from rag_windows.errors import PromptError, ToolsUnsupportedError
from rag_windows.prompt.answer_form import alike, available, call_grammar
from rag_windows.prompt.conversation import Conversation, ToolCall, check_tools, tool_names
from rag_windows.results import Generation

_NAME, _KEY, _VALUE, _RESULT = "probe_tool", "probe_key", "probe_value", "probe_result"
_SAID = "\ue000probe\ue001"
_PARAMETERS = {"type": "object", "properties": {_KEY: {"type": "string"}}}
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "A probe.", "parameters": _PARAMETERS},
}
_FUNCTION = {"name": _NAME, "arguments": {_KEY: _VALUE}}
# Nine letters and digits: the form of id that Mistral's templates insist on.
_CALLED = [{"id": "abc123def", "type": "function", "function": _FUNCTION}]
_USER = {"role": "user", "content": "probe"}
_CALL = {"role": "assistant", "content": "", "tool_calls": _CALLED}
_ANSWER = {"role": "tool", "content": _RESULT, "name": _NAME, "tool_call_id": "abc123def"}
_ADVICE = (
    "Use a model whose chat template supports tools, or pass the documents without tools: "
    "documents need none."
)
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """What is needed to read and to force calls.

    Attributes:
        template: for transformers' response parser.
        prefix: the part of the answer that the chat template writes, for that parser.
        own: whether ``template`` is ours and not the tokenizer's author's.
        bare: whether a call has no markers, and an answer that is no call is text.
        markers: special tokens that the parser must see.
        opening: what a call begins with, up to the tool's name; None if calls can't be forced.
        middle: what follows the name.
    """

    template: Mapping[str, Any]
    prefix: str
    own: bool
    bare: bool
    markers: tuple[str, ...]
    opening: str | None = None
    middle: str = ""

    @classmethod
    def of(cls, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> ToolFormat:
        """Try a chat template with a tool, a call and a result.

        Raises:
            ToolsUnsupportedError: there is none, or one that leaves any of them out, or that writes
                calls in a way not known here.
        """
        if getattr(tokenizer, "chat_template", None) is None:
            raise ToolsUnsupportedError(f"This model has no chat template. {_ADVICE}")

        def render(*messages: Mapping[str, Any], prompt: bool = False) -> str:
            options = {"tools": [_TOOL], "add_generation_prompt": prompt, **template_kwargs}
            return str(tokenizer.apply_chat_template([*messages], tokenize=False, **options))

        try:
            shown = render(_USER, prompt=True)
            _check_shown("the tools to the model", _NAME, shown)
            said = render(_USER, {"role": "assistant", "content": _SAID})
            called = render(_USER, _CALL)
            answered = render(_USER, _CALL, _ANSWER)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ToolsUnsupportedError(
                f"This model's chat template refuses a tool call: {error}. {_ADVICE}"
            ) from error
        _check_shown("calls of tools", _VALUE, called)
        _check_shown("the tools' answers", _RESULT, answered)
        special = [str(token) for token in tokenizer.all_special_tokens]
        declared = getattr(tokenizer, "response_template", None)
        if declared is not None:
            return cls(declared, shown, own=False, bare=False, markers=tuple(special))
        thinks = shown.rfind("<think>") > shown.rfind("</think>")
        begin, end, opening, middle = _call_shape(_written(said, called))
        fields = _fields(begin, end, xml=middle == ">")
        if "<think>" in str(tokenizer.chat_template):
            fields["reasoning_content"] = {"open": "<think>", "close": "</think>"}
        text = begin + end + ("<think></think>" if "reasoning_content" in fields else "")
        return cls(
            {"start_anchor_pattern": r"\A", "fields": fields},
            "<think>" if thinks else "",
            own=True,
            bare=not begin,
            markers=tuple(token for token in special if token in text),
            opening=None if thinks else opening,
            middle=middle,
        )

    def force(self, name: str | None) -> str:
        """How an answer begins that is a call: of this tool, or of any.

        Raises:
            ToolsUnsupportedError: the format does not let a call be begun for the model.
        """
        if self.opening is None:
            raise ToolsUnsupportedError(
                "A call can't be forced with this model: its answers begin with reasoning, its "
                "calls don't begin with the tool's name, or its tokenizer declares a "
                "response_template. Leave tool_choice out, or try "
                "template_kwargs={'enable_thinking': False}."
            )
        return self.opening if name is None else f"{self.opening}{name}{self.middle}"


def _check_shown(what: str, probe: str, rendered: str) -> None:
    if probe not in rendered:
        raise ToolsUnsupportedError(f"This model's chat template does not show {what}. {_ADVICE}")


def _written(said: str, called: str) -> str:
    """What the template writes in place of an assistant's text when there is a call."""
    before, _, after = said.partition(_SAID)
    rest = called[alike(before, called) :]
    return rest[: len(rest) - alike(after[::-1], rest[::-1])]


def _call_shape(written: str) -> tuple[str, str, str | None, str]:
    """Markers around a call, how one begins up to the name, and what follows the name.

    How it begins is None where the name is nested in more, behind the arguments.

    Raises:
        ToolsUnsupportedError: the call is written in no form that is known here.
    """
    xml = re.fullmatch(
        rf"(.*?)(<function=){_NAME}(>\s*<parameter={_KEY}>\s*{_VALUE}\s*</parameter>\s*</function>)"
        r"(.*)",
        written,
        flags=re.DOTALL,
    )
    if xml:
        begin, function, _, end = xml.groups()
        return begin.strip(), end.strip(), begin.lstrip() + function, ">"
    for match in re.finditer(r"[\[{]", written):
        begin, rest = written[: match.start()], written[match.start() :]
        try:
            value, length = json.JSONDecoder().raw_decode(rest)
        except ValueError:
            continue
        call = value[0] if isinstance(value, list) and len(value) == 1 else value
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and function.get("name") == _NAME:
            head = re.match(
                rf'(.*?"name":\s*"){_NAME}(",\s*"(?:arguments|parameters)":)',
                rest[:length],
                flags=re.DOTALL,
            )
            # An object's order is free: a call whose name is written last may be begun with it.
            key = "parameters" if "parameters" in function else "arguments"
            first, then = (head[1], head[2]) if head else ('{"name": "', f'", "{key}":')
            opening = begin.lstrip() + first if head or function is value else None
            return begin.strip(), rest[length:].strip(), opening, then
    raise ToolsUnsupportedError(
        "This model's chat template writes calls in a form that is not known here. Set "
        "tokenizer.response_template (see transformers' documentation of response templates), so "
        "that its answers can be read."
    )


def _fields(begin: str, end: str, *, xml: bool) -> dict[str, Any]:
    """The fields of a response template; the names are transformers'."""
    calls: dict[str, Any] = {"repeats": True, "content": "text"}
    if xml:
        calls["open_pattern"] = rf"\s*{re.escape(begin)}\s*<function=(?P<name>[^>\n]+)>"
        calls["close_pattern"] = rf"</function>\s*{re.escape(end)}"
        calls["content"] = "xml-inline"
        calls["content_args"] = {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
        }
        calls["transform"] = {"function": {"name": "{name}", "arguments": "{content}"}}
    else:
        calls["open_pattern"] = rf"\s*{re.escape(begin)}" if begin else r"\A\s*(?=\{)"
        if end:
            calls["close"] = end
    content = {"content": "text", "content_args": {"strip": False}, "repeats": True, "join": ""}
    return {"tool_calls": calls, "content": content}


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """A call that can't be used: what the model wrote, and what is wrong with it."""

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
        tokenizer: of the model; None without tools, as all others.
        form: how the model writes calls.
        tools: definitions, checked; arguments written as plain text get the types declared there.
        opening: the beginning of a forced call, written for the model.
        forced: names of tools of which one is to be called.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        form: ToolFormat | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        opening: str = "",
        forced: Sequence[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._form = form
        self._tools = [dict(tool) for tool in tools]
        self._opening = opening
        self._forced = forced
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
            choice: None, False or "auto" force no call; "any", "required" or True force one; a
                tool's name, or OpenAI's ``{"type": "function", "function": {"name": ...}}``, forces
                that one. With "none", the tools are not shown.

        Raises:
            ToolsUnsupportedError: the template shows no tools, its calls can't be read, or forced.
            PromptError: a definition, or the choice, can't be used.
        """
        if not tools or choice == "none":
            return cls()
        checked = check_tools(tools)
        names = tool_names(checked)
        form = ToolFormat.of(tokenizer, template_kwargs)
        if choice is None or choice is False or choice == "auto":
            return cls(tokenizer, form, checked)
        if choice is not True and choice not in ("any", "required"):
            if isinstance(choice, Mapping):
                function = choice.get("function")
                choice = function.get("name") if isinstance(function, Mapping) else None
            if choice not in names:
                raise PromptError(
                    f"tool_choice names no tool that is bound. Use one of {names}, 'auto', 'any' "
                    "or 'none'."
                )
            names = [choice]
        opening = form.force(names[0] if len(names) == 1 else None)
        return cls(tokenizer, form, checked, opening, names)

    def grammar(self) -> str | None:
        """For ``generate``: what holds a forced call to its tool's schema.

        None where no call is forced, where arguments are not written as JSON, where a schema says
        what can't be held to, or without the extra ``structured``.
        """
        form, forced = self._form, self._forced
        if form is None or not forced or not form.middle.endswith(":") or not available():
            return None
        calls = [
            (
                "" if len(forced) == 1 else f"{name}{form.middle}",
                tool["function"].get("parameters") or {},
            )
            for name, tool in zip(tool_names(self._tools), self._tools, strict=True)
            if name in forced
        ]
        return call_grammar(calls, self._opening + calls[0][0])

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
        shown = text = ""
        try:
            if not self._streams:
                text = self._decode(self._form, generation)
                shown = self._take(self._parser.feed(text))
            message, events = self._parser.finalize()
            shown += self._take(events)
        except ValueError as error:  # a template of the tokenizer's author may parse JSON itself
            return ToolAnswer("", broken=(BrokenCall(text, str(error)),))
        calls: list[ToolCall] = []
        broken: list[BrokenCall] = []
        for raw, value in self._regions:
            try:
                calls += _calls(self._form, raw, value)
            except PromptError as error:
                broken.append(BrokenCall(raw, str(error)))
        if self._form.bare and broken and not self._opening:
            return ToolAnswer(generation.text)
        if not self._form.own:
            shown = str(message.get("content") or "")
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
            elif kind == "region_chunk" and field in _REASONING:
                self._reasoning += event["text"]
            elif kind == "region_chunk":
                self._raw += event["text"]
            elif field == "tool_calls" and kind == "region_open":
                self._raw = ""
            elif field == "tool_calls":
                self._regions.append((self._raw, event["value"]))
        return shown

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
    elif form.own:
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
    # Nine letters and digits, see above.
    letters = string.ascii_letters + string.digits
    new = "".join(secrets.choice(letters) for _ in range(9))
    return replace(ToolCall.of(value, "the answer"), id=new)
