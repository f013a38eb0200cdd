"""One solved example that a model is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_windows.errors import InputError


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
            if not isinstance(value, str) or not value.strip():
                raise InputError(
                    f"A demonstration's {name} must be a string that is not blank, not {value!r}."
                )


DemonstrationLike = Demonstration | tuple[str, str] | Sequence[str] | Mapping[str, Any]
"""A demonstration, a pair (text, label), or a mapping with these two keys."""


def demonstrations_of(values: Sequence[DemonstrationLike]) -> list[Demonstration]:
    """Read demonstrations as callers give them.

    Raises:
        InputError: naming the one that can't be read, by its index.
    """
    if isinstance(values, str | Mapping | Demonstration):
        raise InputError("demonstrations must be a list of (text, label) pairs; wrap it in [].")
    made = []
    for index, value in enumerate(values):
        try:
            made.append(_demonstration_of(value))
        except InputError as error:
            raise InputError(f"Demonstration {index}: {error}") from error
    return made


def _demonstration_of(value: DemonstrationLike) -> Demonstration:
    if isinstance(value, Demonstration):
        return value
    if isinstance(value, Mapping):
        if value.keys() != {"text", "label"}:
            raise InputError(
                f"a mapping must have the keys 'text' and 'label', not "
                f"{sorted(map(str, value.keys()))}."
            )
        return Demonstration(value["text"], value["label"])
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise InputError(
            f"it must be a (text, label) pair, a mapping or a Demonstration, not {value!r}."
        )
    return Demonstration(value[0], value[1])
