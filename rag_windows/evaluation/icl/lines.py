"""A task's data from local files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rag_windows.errors import InputError
from rag_windows.evaluation.data.fields import Place, checked, optional, record_of, shown
from rag_windows.evaluation.data.fields import strings as strings_of
from rag_windows.evaluation.data.keys import Keys, filled
from rag_windows.evaluation.data.reading import Source, read
from rag_windows.evaluation.icl.item import Item, Items, Kind
from rag_windows.evaluation.icl.named import NAMED, Worded

_SPLITS = ("train", "test")


@dataclass(frozen=True, slots=True)
class _Line:
    """A line, read: `label` is None for multiple choice."""

    place: Place
    split: str | None
    item: Item
    label: str | None

    @property
    def kind(self) -> Kind:
        return "multiple choice" if self.label is None else "classification"


@dataclass(frozen=True, slots=True)
class _Labels:
    """Names of labels: `known` if they are fixed, else whatever the lines hold."""

    known: tuple[str, ...] | None
    classes: tuple[int | str, ...]

    def name(self, value: Any, place: Place) -> str:
        """A label as a word; a named task's files may hold its classes instead, as the Hub does."""
        if self.known is not None and value in self.classes and not isinstance(value, bool):
            return self.known[self.classes.index(value)]
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        name = checked(value, str, place, '"label"')
        if not name.strip():
            raise place.error('"label" is blank; give the line a label.')
        if self.known is not None and name not in self.known:
            raise place.error(f"{shown(name)} is none of the labels {list(self.known)}.")
        return name


def load(
    test: Path,
    demonstrations: Path | None = None,
    *,
    name: str | None = None,
    worded: Worded | None = None,
    labels: Sequence[str] | None = None,
) -> Items:
    """Read a task from one file, whose lines name their split, or from two.

    Args:
        test: JSON lines, or a list: ``{"text", "label"}``, or ``{"question", "choices", "answer"}``
            with an optional "context", where the answer is the right choice or its index from 0;
            "split" is "train" or "test", "id" any name. Other fields count for nothing.
        demonstrations: likewise; all of its lines may be shown, and none of the other file's.
        name: of a named task that the files hold.
        worded: how that is written: its words are the labels.
        labels: to choose from; None for those of the lines that may be shown, or of all where there
            are none.

    Raises:
        DataError: naming file, line and field.
        InputError: labels for multiple choice.
    """
    known = worded.labels if worded else None if labels is None else tuple(labels)
    names = _Labels(known, NAMED[name].classes if name and worded else ())
    source = read(test)
    lines = list(_lines(source, names))
    stamp: dict[str, object] = {"test": source.stamp}
    if demonstrations is None:
        train = [one for one in lines if one.split == "train"]
        asked = [one for one in lines if one.split != "train"]
        missing = next((one for one in asked if one.split is None), None)
        if train and missing is not None:
            raise missing.place.error('"split" is missing; it must be "train" or "test".')
    else:
        shown_from = read(demonstrations)
        stamp["demonstrations"] = shown_from.stamp
        train = list(_lines(shown_from, names))
        wrong = next((one for one in lines if one.split == "train"), None)
        wrong = wrong or next((one for one in train if one.split == "test"), None)
        if wrong is not None:
            raise wrong.place.error(
                f'"split" is {wrong.split!r}, but demonstrations come from a file of their own; '
                "take the field out, or put the line into the other file."
            )
        asked = lines
    if not asked:
        raise source.place.error('no line has "split": "test", so there is nothing to ask.')
    kind = _kind([*train, *asked])
    if kind == "multiple choice":
        if name is not None:
            raise asked[0].place.error(f'{name} has texts with labels, "text" and "label" a line.')
        if labels is not None:
            raise InputError("labels are of a classification; multiple choice brings its own.")
        shown_items, asked_items = (tuple(one.item for one in some) for some in (train, asked))
        return Items(kind, shown_items, asked_items, (), stamp)
    found, shown_items, asked_items = _labelled(train, asked, known)
    return Items(kind, shown_items, asked_items, found, stamp)


def _lines(source: Source, names: _Labels) -> Iterator[_Line]:
    keys = Keys()
    for number, (place, value) in enumerate(source.records(), start=1):
        record = record_of(value, place)
        split = optional(record, "split", str, place)
        if split is not None and split not in _SPLITS:
            raise place.error(f'"split" must be "train" or "test", not {shown(split)}.')
        key = keys.take(record, number, place)
        if "question" in record or "choices" in record:
            yield _Line(place, split, _choice(record, key, place), None)
        else:
            text = filled(record, "text", place)
            if "label" not in record:
                raise place.error('"label" is missing; it must be a string.')
            label = names.name(record["label"], place)
            yield _Line(place, split, Item(key, text, (), 0), label)


def _choice(record: dict[str, Any], key: str, place: Place) -> Item:
    question = filled(record, "question", place)
    choices = strings_of(record, "choices", place)
    blank = next((number for number, one in enumerate(choices, 1) if not one.strip()), None)
    if blank is not None:
        raise place.error(f'entry {blank} of "choices" is blank; take it out.')
    if len(choices) < 2:
        raise place.error(f'"choices" must hold at least two, not {len(choices)}.')
    if len(set(choices)) < len(choices):
        twice = next(one for i, one in enumerate(choices) if one in choices[:i])
        raise place.error(f'"choices" holds {shown(twice)} twice; every choice must differ.')
    if "answer" not in record:
        raise place.error('"answer" is missing; it must be one of the choices, or its index.')
    answer = record["answer"]
    if isinstance(answer, str):
        if answer not in choices:
            raise place.error(f'"answer" {shown(answer)} is none of the choices.')
        index = choices.index(answer)
    else:
        index = checked(answer, int, place, '"answer", if it is no text,')
        if not 0 <= index < len(choices):
            raise place.error(
                f'"answer" is {index}, but indices of {len(choices)} choices go from 0 to '
                f"{len(choices) - 1}."
            )
    context = optional(record, "context", str, place)
    return Item(key, question, tuple(choices), index, context if (context or "").strip() else None)


def _kind(lines: Sequence[_Line]) -> Kind:
    other = next((one for one in lines if one.kind != lines[0].kind), None)
    if other is not None:
        raise other.place.error(
            f"this is {other.kind}, but {lines[0].place.record} of {lines[0].place.file} is "
            f"{lines[0].kind}; keep them in files of their own."
        )
    return lines[0].kind


def _labelled(
    train: Sequence[_Line], asked: Sequence[_Line], known: tuple[str, ...] | None
) -> tuple[tuple[str, ...], tuple[Item, ...], tuple[Item, ...]]:
    """Labels, and the items with them."""
    labels = known or tuple(dict.fromkeys(one.label or "" for one in train or asked))
    unknown = next((one for one in asked if one.label not in labels), None)
    if unknown is not None:
        raise unknown.place.error(
            f"no demonstration has the label {shown(unknown.label)}; correct it, or name all "
            "labels with --label."
        )
    if len(labels) < 2:
        raise asked[0].place.error(
            f"all lines have the label {shown(labels[0])}; there must be two to choose from."
        )

    def items(lines: Sequence[_Line]) -> tuple[Item, ...]:
        return tuple(
            replace(one.item, choices=labels, answer=labels.index(one.label or "")) for one in lines
        )

    return labels, items(train), items(asked)
