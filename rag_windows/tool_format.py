"""How a model's chat template shows tools and writes calls of them.

The format of calls is read off the template itself: what it writes for an assistant's call in the
history is what the model was trained to write. Recognized are one JSON object (or a list of them)
with ``name`` and ``arguments`` or ``parameters``, between any two markers or none (Hermes, Qwen,
Granite, Llama, Mistral), and ``<function=name><parameter=key>value</parameter></function>``
(Qwen-Coder). A tokenizer's own ``response_template`` (transformers) comes before both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError

from rag_windows.errors import ToolsUnsupportedError

_NAME, _KEY, _VALUE, _RESULT = "probe_tool", "probe_key", "probe_value", "probe_result"
_SAID = "\ue000probe\ue001"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
    },
}
_FUNCTION = {"name": _NAME, "arguments": {_KEY: _VALUE}}
# Nine letters and digits: the form of id that Mistral's templates insist on.
_CALL_ID = "abc123def"
_USER = {"role": "user", "content": "probe"}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": _CALL_ID, "type": "function", "function": _FUNCTION}],
}
_ANSWER = {"role": "tool", "content": _RESULT, "name": _NAME, "tool_call_id": _CALL_ID}
_ADVICE = (
    "Use a model whose chat template supports tools, or pass the documents without tools: "
    "documents need none."
)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """What is needed to read and to force calls.

    Attributes:
        template: for transformers' response parser.
        prefix: the part of the answer that the chat template writes, for that parser.
        own: whether ``template`` is ours: contents of ``tool_calls`` are then texts or
            name-and-arguments objects, otherwise what the tokenizer's author made of them.
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
        """Try the chat template with a tool, a call and a result.

        Args:
            tokenizer: a transformers tokenizer.
            template_kwargs: further variables of the chat template.

        Raises:
            ToolsUnsupportedError: it has no chat template, or one that leaves any of them out, or
                that writes calls in a way not known here.
        """
        if getattr(tokenizer, "chat_template", None) is None:
            raise ToolsUnsupportedError(f"This model has no chat template. {_ADVICE}")

        def render(*messages: Mapping[str, Any], prompt: bool = False) -> str:
            return str(
                tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[_TOOL],
                    tokenize=False,
                    add_generation_prompt=prompt,
                    **template_kwargs,
                )
            )

        try:
            shown = render(_USER, prompt=True)
            if _NAME not in shown:
                raise ToolsUnsupportedError(
                    f"This model's chat template does not show the tools to the model. {_ADVICE}"
                )
            said = render(_USER, {"role": "assistant", "content": _SAID})
            called = render(_USER, _CALL)
            answered = render(_USER, _CALL, _ANSWER)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ToolsUnsupportedError(
                f"This model's chat template refuses a tool call: {error}. {_ADVICE}"
            ) from error
        missing = [
            what
            for what, name, text in (
                ("calls of tools", _VALUE, called),
                ("the tools' answers", _RESULT, answered),
            )
            if name not in text
        ]
        if missing:
            raise ToolsUnsupportedError(
                f"This model's chat template does not show {' and '.join(missing)}. {_ADVICE}"
            )
        special = [str(token) for token in tokenizer.all_special_tokens]
        declared = getattr(tokenizer, "response_template", None)
        if declared is not None:
            return cls(declared, shown, own=False, bare=False, markers=tuple(special))
        thinks = shown.rfind("<think>") > shown.rfind("</think>")
        found = _call_shape(_written(said, called))
        if found is None:
            raise ToolsUnsupportedError(
                "This model's chat template writes calls in a form that is not known here. Set "
                "tokenizer.response_template (see transformers' documentation of response "
                "templates), so that its answers can be read."
            )
        begin, end, opening, middle = found
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
                "response_template of its own. Leave tool_choice out, or switch thinking off with "
                "template_kwargs={'enable_thinking': False} where the template has that."
            )
        return self.opening if name is None else f"{self.opening}{name}{self.middle}"

    def rest(
        self, tools: Sequence[Mapping[str, Any]], name: str | None
    ) -> list[tuple[str, Mapping[str, Any]]]:
        """What is left to write behind `force` before the arguments, and their schema.

        Args:
            tools: their definitions, checked.
            name: of the forced one; None for any of them.
        """
        functions = [tool["function"] for tool in tools]
        return [
            ("" if name else f"{function['name']}{self.middle}", function.get("parameters") or {})
            for function in functions
            if name in (None, function["name"])
        ]


def _written(said: str, called: str) -> str:
    """What the template writes in place of an assistant's text when there is a call."""
    before, _, after = said.partition(_SAID)
    start = _alike(before, called)
    end = min(_alike(after[::-1], called[::-1]), len(called) - start)
    return called[start : len(called) - end]


def _alike(one: str, other: str) -> int:
    """Characters that two strings have in common from their start."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _call_shape(written: str) -> tuple[str, str, str | None, str] | None:
    """Markers around a call, how one begins up to the name, and what follows the name.

    How it begins is None where the name is nested in more, behind the arguments.
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
        try:
            value, length = json.JSONDecoder().raw_decode(written[match.start() :])
        except ValueError:
            continue
        call = value[0] if isinstance(value, list) and len(value) == 1 else value
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and function.get("name") == _NAME:
            begin, end = written[: match.start()], written[match.start() + length :]
            source = written[match.start() :][:length]
            head = re.match(
                rf'(.*?"name":\s*"){_NAME}(",\s*"(?:arguments|parameters)":)',
                source,
                flags=re.DOTALL,
            )
            # An object's order is free: a call whose name is written last may be begun with it.
            key = "parameters" if "parameters" in function else "arguments"
            first, then = (head[1], head[2]) if head else ('{"name": "', f'", "{key}":')
            opening = begin.lstrip() + first if head or function is value else None
            return begin.strip(), end.strip(), opening, then
    return None


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
