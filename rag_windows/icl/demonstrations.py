"""Demonstrations, how they are written, and how they fill windows."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from rag_windows.errors import InputError, LimitError


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A text with its right label.

    Raises:
        InputError: one of them is no string, or blank.
    """

    text: str
    label: str

    def __post_init__(self) -> None:
        for name, value in (("text", self.text), ("label", self.label)):
            check_text(f"A demonstration's {name}", value)


DemonstrationLike = Demonstration | tuple[str, str] | Sequence[str] | Mapping[str, Any]
"""A demonstration, a pair (text, label), or a mapping with these two keys."""


def check_text(name: str, value: object) -> None:
    """Refuse what is no string, or blank."""
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{name} must be a string that is not blank, not {value!r}.")


def demonstrations_of(values: Sequence[DemonstrationLike]) -> list[Demonstration]:
    """Demonstrations as callers give them; the error names one by its index."""
    if isinstance(values, str | Mapping | Demonstration):
        raise InputError("demonstrations must be a list of (text, label) pairs; wrap it in [].")
    made = []
    for index, value in enumerate(values):
        try:
            made.append(demonstration_of(value))
        except (InputError, TypeError) as error:
            raise InputError(
                f"Demonstration {index} must be a (text, label) pair, a mapping with the keys "
                f"'text' and 'label', or a Demonstration, not {value!r}: {error}"
            ) from error
    return made


def demonstration_of(value: DemonstrationLike) -> Demonstration:
    """One of them; a TypeError or an `InputError` says what is wrong."""
    if isinstance(value, Demonstration):
        return value
    if isinstance(value, str):
        raise TypeError("it is a single string")
    return Demonstration(**value) if isinstance(value, Mapping) else Demonstration(*value)


_FIELD = re.compile(r"(\{text\}|\{label\})")


@dataclass(frozen=True, slots=True)
class Template:
    r"""Forms of a demonstration and of the question.

    ``{text}`` and ``{label}`` stand for the two; no other brace means anything, in the forms or in
    the texts.

    Attributes:
        demonstration: holds ``{text}`` and ``{label}``.
        query: holds ``{text}``; what a model goes on from. Empty: the demonstration up to its
            label, without the white space before it.
        separator: stands between two demonstrations of one window. Windows themselves end with a
            blank line, as passages do.

    Raises:
        InputError: a form lacks its ``{text}`` or ``{label}``, or the separator is empty.
    """

    demonstration: str = "{text}: {label}"
    query: str = ""
    separator: str = "\n"

    def __post_init__(self) -> None:
        given = (self.demonstration, self.query, self.separator)
        if not all(isinstance(part, str) for part in given):
            raise InputError(f"The template's parts must be strings, not {given!r}.")
        for field in ("{text}", "{label}"):
            if field not in self.demonstration:
                raise InputError(
                    f"The template's demonstration {self.demonstration!r} lacks {field}; write "
                    'something like "{text}: {label}".'
                )
        if not self.query:
            derived = self.demonstration.partition("{label}")[0].rstrip()
            object.__setattr__(self, "query", derived)
        if "{text}" not in self.query or "{label}" in self.query:
            raise InputError(
                f"The template's query {self.query!r} must hold {{text}} and no {{label}}; give "
                'one beside the demonstration, such as ("{label}: {text}", "{text}:").'
            )
        if not self.separator:
            raise InputError('The template\'s separator is empty; "\\n" puts one on each line.')

    @classmethod
    def of(cls, value: Template | str | tuple[str, str] | None) -> Template:
        """A template from itself, a demonstration's form, a pair with the query's, or the default.

        Raises:
            InputError: none of these, or see the class.
        """
        if value is None:
            return cls()
        if isinstance(value, Template):
            return value
        if isinstance(value, str):
            return cls(value)
        if isinstance(value, tuple) and len(value) == 2:
            return cls(*value)
        raise InputError(
            f"template must be a Template, a string or a pair of strings, not {value!r}."
        )

    @property
    def gap(self) -> str:
        """The white space between a query and its label, where they are one text."""
        before = self.demonstration.partition("{label}")[0]
        return "" if self.query[-1].isspace() else before[len(before.rstrip()) :]

    def show(self, demonstration: Demonstration) -> str:
        """A demonstration in its form."""
        return _fill(self.demonstration, demonstration.text, demonstration.label)

    def ask(self, text: str) -> str:
        """A text in the form of the query."""
        return _fill(self.query, text, "")


def _fill(form: str, text: str, label: str) -> str:
    """In one pass, so that a field's name inside of a text stays what it is."""
    values = {"{text}": text, "{label}": label}
    return "".join(values.get(part, part) for part in _FIELD.split(form))


def fill(
    shown: Sequence[str],
    separator: str,
    size_of: Callable[[str], int],
    room: int,
    windows: int | None = None,
) -> list[str]:
    """Texts of windows of about ``room`` tokens at most that hold whole demonstrations, in order.

    Few more where a tokenizer makes more tokens of neighbours than of each by itself.
    """
    around = size_of("")
    sizes = [size_of(text + separator) - around for text in shown]
    for index, size in enumerate(sizes):
        if size > room - around:
            raise LimitError(
                f"Demonstration {index} ({shown[index][:40]!r}...) needs a window of "
                f"{size + around} tokens, and a window holds {room}. Shorten it or leave it out; a "
                "demonstration is never cut."
            )
    packed = pack(sizes, room - around, windows)
    return [separator.join(shown[one.start : one.stop]) for one in packed]


def pack(sizes: Sequence[int], room: int, windows: int | None = None) -> list[range]:
    """Put neighbours into as few windows as hold them, or into so many, all about as full.

    Each size is at most ``room``. Ranges of indices, which follow each other, none of them empty.
    """
    if not sizes:
        return []
    if windows is not None and not 1 <= windows <= len(sizes):
        raise InputError(
            f"windows={windows} must be between 1 and the number of demonstrations, {len(sizes)}."
        )
    sums = [0, *accumulate(sizes)]
    fewest = start = 0
    while start < len(sizes):
        start = bisect_right(sums, sums[start] + room) - 1
        fewest += 1
    count = windows or fewest
    if count < fewest:
        raise LimitError(
            f"{len(sizes)} demonstrations make {sums[-1]} tokens, and a window holds {room}: "
            f"windows={count} are too few, {fewest} would hold them."
        )
    # The first demonstration from which on the last windows hold all the rest.
    earliest = [len(sizes)]
    for _ in range(count):
        earliest.append(bisect_left(sums, sums[earliest[-1]] - room))
    ends = [0]
    for left in range(count - 1, 0, -1):
        ideal = sums[-1] * (count - left) / count
        near = bisect_left(sums, ideal)
        if near and ideal - sums[near - 1] < sums[near] - ideal:
            near -= 1
        furthest = bisect_right(sums, sums[ends[-1]] + room) - 1
        least = max(earliest[left], ends[-1] + 1)
        ends.append(max(least, min(near, furthest, len(sizes) - left)))
    return [range(a, b) for a, b in pairwise([*ends, len(sizes)])]
