"""Tools that a model may call, and its calls, checked before a template sees them.

The shapes are those of OpenAI's chat API, which chat templates are written for. Names and ids are
identifiers, so they steer no template and spell no markup; everything else in a call is the model's
text and is treated as such.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_windows.errors import PromptError

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
