"""How demonstrations and the text in question are written."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rag_windows.errors import InputError
from rag_windows.learning.demonstration import Demonstration

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
        for name in ("demonstration", "query", "separator"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise InputError(
                    f"The template's {name} must be a string, not {type(value).__name__}."
                )
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
