"""Options that several commands take, as one dataclass for all of them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, get_type_hints

_Command = Callable[..., None]


def spreading(*, without: Collection[str] = ()) -> Callable[[_Command], _Command]:
    """Let a command take dataclasses: each of their fields becomes an option in its place.

    The command line knows flat parameters only. A field may be a dataclass of options itself.

    Args:
        without: fields that are no options of this command and keep their defaults.
    """

    def decorate(command: _Command) -> _Command:
        hints = get_type_hints(command, include_extras=True)
        given = inspect.signature(command).parameters
        flat = [
            option
            for name, parameter in given.items()
            for option in _options(name, hints[name], parameter.default, without)
        ]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(**{name: _gathered(name, hints[name], values) for name in given})

        annotations = {option.name: option.annotation for option in flat}
        run.__annotations__ = {**annotations, "return": None}
        run.__signature__ = inspect.Signature(flat, return_annotation=None)  # type: ignore[attr-defined]  # what inspect looks at first
        return run

    return decorate


def _options(
    name: str, hint: Any, default: Any, without: Collection[str]
) -> Iterator[inspect.Parameter]:
    if not dataclasses.is_dataclass(hint):
        keyword = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(name, keyword, default=default, annotation=hint)
        return
    hints = get_type_hints(hint, include_extras=True)
    for field in dataclasses.fields(hint):
        if field.name not in without:
            yield from _options(field.name, hints[field.name], field.default, without)


def _gathered(name: str, hint: Any, values: Mapping[str, Any]) -> Any:
    if not isinstance(hint, type) or not dataclasses.is_dataclass(hint):
        return values[name]
    hints = get_type_hints(hint, include_extras=True)
    own = [field.name for field in dataclasses.fields(hint)]
    return hint(
        **{
            one: _gathered(one, hints[one], values)
            for one in own
            if one in values or dataclasses.is_dataclass(hints[one])
        }
    )
