"""Calls of tools: as messages hold them, and as models write them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError

from rag_windows.errors import PromptError, ToolsUnsupportedError

_IDENTIFIER = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_DEEPEST = 32


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call.

    Attributes:
        name: of the tool.
        arguments: a JSON object.
        id: the caller's name for the call, or None.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None

    @classmethod
    def of(cls, value: object, where: str) -> ToolCall:
        """Read ``{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}``.

        Args:
            value: the mapping; ``arguments`` is an object or its JSON.
            where: what errors call it, such as ``message 3``.

        Raises:
            PromptError: it has another shape.
        """
        function = value.get("function") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(function, Mapping):
            raise PromptError(
                f"A tool call of {where} must look like "
                '{"id": ..., "function": {"name": ..., "arguments": {...}}}.'
            )
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise PromptError(
                    f"The arguments of a tool call of {where} are no JSON: {error}. Leave the call "
                    "out, or repair its arguments."
                ) from error
        if not isinstance(arguments, Mapping):
            raise PromptError(f"The arguments of a tool call of {where} must be a JSON object.")
        plain = _plain(arguments, f"the arguments of a tool call of {where}")
        identity = value.get("id")
        if identity is not None:
            identity = identifier(identity, f"The id of a tool call of {where}")
        name = identifier(function.get("name"), f"The name of a tool call of {where}")
        return cls(name, plain, identity)


def identifier(value: object, what: str) -> str:
    """The value, if it is an identifier.

    Raises:
        PromptError: it is not.
    """
    if isinstance(value, str) and _IDENTIFIER.fullmatch(value):
        return value
    raise PromptError(
        f"{what} must be 1 to 128 of the characters A-Z a-z 0-9 _ . : -, not {value!r}."
    )


def check_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """A copy of the tools' definitions.

    Args:
        tools: ``{"type": "function", "function": {"name", "description", "parameters"}}`` each,
            ``parameters`` being a JSON schema.

    Raises:
        PromptError: a definition has another shape, or two have one name.
    """
    checked = []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            raise PromptError(
                f"Tool {index} must look like "
                '{"type": "function", "function": {"name": ..., "parameters": {...}}}.'
            )
        name = identifier(function.get("name"), f"The name of tool {index}")
        if name in names:
            raise PromptError(f"Two tools have the name {name!r}; rename one.")
        names.add(name)
        checked.append(_plain(tool, f"tool {name}"))
    return tuple(checked)


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of checked tools, in order."""
    return [str(tool["function"]["name"]) for tool in tools]


def chosen_tool(choice: Any, names: Sequence[str]) -> tuple[bool, str | None]:
    """Whether a call is wanted, and of which tool; None for any of several.

    Args:
        choice: None, False or "auto" want none; "any", "required" or True want one; a tool's name,
            or OpenAI's ``{"type": "function", "function": {"name": ...}}``, wants that one.
        names: of the tools.

    Raises:
        PromptError: it names no tool.
    """
    if choice is None or choice is False or choice == "auto":
        return False, None
    if choice is True or choice in ("any", "required"):
        return True, names[0] if len(names) == 1 else None
    if isinstance(choice, Mapping):
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, Mapping) else None
    if choice in names:
        return True, str(choice)
    raise PromptError(
        f"tool_choice names no tool that is bound. Use one of {list(names)}, 'auto', 'any' or "
        "'none'."
    )


def strings(value: Any) -> Iterator[str]:
    """Every string in JSON data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield key
            yield from strings(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from strings(entry)


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A deep copy made of dict, list, str, int, float, bool and None."""
    if depth > _DEEPEST:
        raise PromptError(f"There are more than {_DEEPEST} levels in {where}; flatten them.")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise PromptError(f"Keys in {where} must be strings.")
        return {key: _plain(entry, where, depth + 1) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, where, depth + 1) for entry in value]
    raise PromptError(f"There is a {type(value).__name__} in {where}; only JSON values can be.")


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
        for what, value, text in (
            ("calls of tools", _VALUE, called),
            ("the tools' answers", _RESULT, answered),
        ):
            if value not in text:
                raise ToolsUnsupportedError(
                    f"This model's chat template does not show {what}. {_ADVICE}"
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
