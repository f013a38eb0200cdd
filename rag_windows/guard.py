"""The guard: reads passages in one prompt where windows are likely to answer worse, and reports it.

docs/which_method.md says when to use it, benchmarks/results/guard.md what its signal is worth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rag_windows.errors import InputError
from rag_windows.passage import WindowTokens
from rag_windows.results import Fallback
from rag_windows.sampling import whole_number


@dataclass(frozen=True, slots=True)
class Guard:
    """What makes ``fallback=`` read the passages one after the other instead of in windows.

    Attributes:
        passages, tokens: signal "few short passages": at most this many passages with at most this
            many tokens together are read one after the other. 0 passages switch the signal off.

    Raises:
        InputError: a number is out of range.
    """

    passages: int = 4
    tokens: int = 1024

    def __post_init__(self) -> None:
        for name in ("passages", "tokens"):
            whole_number(f"Guard {name}", getattr(self, name), 0)


FallbackOption = Literal["sequential"] | Guard | None
"""What ``fallback=`` takes: "sequential" is a `Guard` with its defaults."""


def guard_of(option: FallbackOption | Mapping[str, Any]) -> Guard | None:
    """The guard that ``fallback=`` asks for: "sequential", a `Guard`, or its fields.

    Raises:
        InputError: it is none of them.
    """
    if option is None or isinstance(option, Guard):
        return option
    try:
        return Guard() if option == "sequential" else Guard(**option)
    except TypeError as error:
        raise InputError(
            f"fallback must be None, 'sequential' or a Guard, not {option!r}: {error}."
        ) from error


def few_short_passages(guard: Guard, windows: Sequence[WindowTokens]) -> Fallback | None:
    """The signal "few short passages"; costs nothing."""
    passages = len({window.passage for window in windows})
    tokens = sum(len(window.ids) for window in windows)
    if passages > guard.passages or tokens > guard.tokens:
        return None
    reason = (
        f"there are only {passages} passages with {tokens} tokens together (the limits are "
        f"{guard.passages} and {guard.tokens})"
    )
    return Fallback("few short passages", float(tokens), float(guard.tokens), True, reason)
