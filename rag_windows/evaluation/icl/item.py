"""One labelled text, or one question with choices: shown as a demonstration, or asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ChoicesAs = Literal["text", "letters"]
Kind = Literal["classification", "multiple choice"]

MOST_LETTERS = 26


@dataclass(frozen=True, slots=True)
class Item:
    """What a line of a task holds.

    Attributes:
        key: unique among the items of its split.
        text: the text to label; or the question.
        choices: the labels to choose from, all different; those of the task, or the item's own.
        answer: index of the right one.
        context: a text that the question is about, or None.
    """

    key: str
    text: str
    choices: tuple[str, ...]
    answer: int
    context: str | None = None

    @property
    def label(self) -> str:
        """The right choice."""
        return self.choices[self.answer]


@dataclass(frozen=True, slots=True)
class Items:
    """A task's data.

    Attributes:
        kind: what sort of items they are.
        demonstrations: what may be shown.
        test: what is asked.
        labels: those of a classification; empty for multiple choice.
        stamp: what a manifest keeps of the source: its name and digest. JSON.
    """

    kind: Kind
    demonstrations: tuple[Item, ...]
    test: tuple[Item, ...]
    labels: tuple[str, ...]
    stamp: dict[str, object]


def rendered(item: Item, choices_as: ChoicesAs) -> str:
    """A multiple-choice item as the text of a template: context, question, and letters if asked."""
    lines = [] if item.context is None else [item.context]
    lines.append(f"Question: {item.text}")
    if choices_as == "letters":
        lines += [
            f"{letter}. {choice}"
            for letter, choice in zip(letters(len(item.choices)), item.choices, strict=True)
        ]
    return "\n".join(lines)


def letters(count: int) -> tuple[str, ...]:
    """A, B, C, ... for so many choices, at most 26."""
    return tuple(chr(ord("A") + index) for index in range(count))
