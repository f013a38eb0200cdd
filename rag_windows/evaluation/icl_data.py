"""Data of in-context learning: labelled texts and questions with choices, from files or the Hub.

The classification tasks that papers on many demonstrations use are known by name, each in the two
wordings that their authors released:

- "pcw", Parallel Context Windows (https://arxiv.org/abs/2212.10947): demonstrations stand apart by
  a line "==". The paper has no MR; here it takes the form of SST-2.
- "structured-prompting" (https://arxiv.org/abs/2212.06713): all on one line. Its TREC label
  "Expression" is the class of abbreviations.

Both judge SST-2 and SST-5 by the validation split, and so does Structured Prompting MR; PCW draws
250 texts of it at random, Structured Prompting takes up to 4,000.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, model_validator

from rag_windows.errors import DataError, InputError, MissingExtraError, missing
from rag_windows.evaluation.files import Keys, Place, Source, read, shown
from rag_windows.icl import Template

Wording = Literal["pcw", "structured-prompting"]
Kind = Literal["classification", "multiple choice"]


@dataclass(frozen=True, slots=True)
class Item:
    """One labelled text, or one question with choices: shown as a demonstration, or asked.

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


@dataclass(frozen=True, slots=True)
class Worded:
    """How a task is written: its template, and a word for each class of `Named.classes`."""

    template: Template
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Named:
    """A task by its name.

    Attributes:
        hub: id of the data set on the Hugging Face Hub, and the name of its configuration or None.
        columns: of the texts, and of the classes.
        splits: that demonstrations are drawn from, and that is asked.
        classes: what the column of classes holds, in the order of the words.
        wordings: how it is written.
    """

    hub: tuple[str, str | None]
    columns: tuple[str, str]
    splits: tuple[str, str]
    classes: tuple[int | str, ...]
    wordings: Mapping[Wording, Worded]


def _pcw(text: str, label: str, words: str) -> Worded:
    form = Template(f"{text}: {{text}}\n{label}: {{label}}", separator="\n==\n")
    return Worded(form, tuple(words.split()))


def _structured(text: str, label: str, words: str) -> Worded:
    return Worded(Template(f"{text}: {{text}} {label}: {{label}}"), tuple(words.split()))


NAMED: Mapping[str, Named] = {
    "sst2": Named(
        ("nyu-mll/glue", "sst2"),
        ("sentence", "label"),
        ("train", "validation"),
        (0, 1),
        {
            "pcw": _pcw("Review", "Sentiment", "negative positive"),
            "structured-prompting": _structured("Sentence", "Sentiment", "negative positive"),
        },
    ),
    "sst5": Named(
        ("SetFit/sst5", None),
        ("text", "label"),
        ("train", "validation"),
        (0, 1, 2, 3, 4),
        {
            "pcw": _pcw("Review", "Sentiment", "terrible bad okay good great"),
            "structured-prompting": _structured(
                "Sentence", "Sentiment", "terrible negative neutral positive great"
            ),
        },
    ),
    # The original "trec" needs a loading script, which `datasets` no longer runs.
    "trec": Named(
        ("SetFit/TREC-QC", None),
        ("text", "label_coarse_original"),
        ("train", "test"),
        ("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"),
        {
            "pcw": _pcw(
                "Question", "Type", "abbreviation entity description human location numeric"
            ),
            "structured-prompting": _structured(
                "Question", "Type", "Expression Entity Description Person Location Number"
            ),
        },
    ),
    "mr": Named(
        ("cornell-movie-review-data/rotten_tomatoes", None),
        ("text", "label"),
        ("train", "validation"),
        (0, 1),
        {
            "pcw": _pcw("Review", "Sentiment", "negative positive"),
            "structured-prompting": _structured("Review", "Sentiment", "Negative Positive"),
        },
    ),
    "agnews": Named(
        ("fancyzhx/ag_news", None),
        ("text", "label"),
        ("train", "test"),
        (0, 1, 2, 3),
        {
            "pcw": _pcw("input", "type", "world sports business technology"),
            "structured-prompting": _structured(
                "Article", "Category", "World Sports Business Technology"
            ),
        },
    ),
}


def worded(name: str, wording: Wording) -> Worded:
    """How a named task is written.

    Raises:
        InputError: there is no such wording.
    """
    if wording not in get_args(Wording):
        raise InputError(f"wording={wording!r} is none of {', '.join(get_args(Wording))}.")
    return NAMED[name].wordings[wording]


def from_hub(name: str, words: Worded) -> Items:
    """Download a named task, or take it from the cache of `datasets`.

    Raises:
        MissingExtraError: `datasets` is not installed.
        DataError: there is no network, or the data set is not what it was.
    """
    named = NAMED[name]
    demonstrations, first = _split(name, named.splits[0], words)
    test, second = _split(name, named.splits[1], words)
    stamp: dict[str, object] = {"hub": named.hub[0], "demonstrations": first, "test": second}
    return Items("classification", demonstrations, test, words.labels, stamp)


def _split(name: str, split: str, words: Worded) -> tuple[tuple[Item, ...], dict[str, object]]:
    """The texts of a split, without the blank ones; and what a manifest keeps of it."""
    named = NAMED[name]
    place = Place(f"{named.hub[0]}, split {split}")
    digest, items, blank = hashlib.sha256(), [], 0
    for number, row in enumerate(_rows(name, split), start=1):
        text, label = (row.get(column) for column in named.columns)
        digest.update(json.dumps([text, label]).encode())
        if not isinstance(text, str) or label not in named.classes:
            raise place.at(f"row {number}").error(
                f"the columns {named.columns[0]!r} and {named.columns[1]!r} hold {shown(text)} and "
                f"{shown(label)}, not a text and one of {list(named.classes)}; the data set has "
                "changed. Give local files with --demos and --test."
            )
        if text.strip():
            answer = named.classes.index(label)
            items.append(Item(f"{split}/{number}", text.strip(), words.labels, answer))
        else:
            blank += 1
    if not items:
        raise place.error(f"it holds no texts but {blank} blank ones.")
    return tuple(items), {"split": split, "blank": blank, "sha256": digest.hexdigest()}


def _rows(name: str, split: str) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        what = f"The task {name!r}, which comes from the Hugging Face Hub,"
        raise MissingExtraError(
            f"{missing(what, 'datasets', 'eval-hub')}, or give local files with --demos and --test."
        ) from error
    hub, config = NAMED[name].hub
    try:
        return load_dataset(hub, config, split=split)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise DataError(
            f"The task {name!r} can't be loaded from the Hugging Face Hub ({hub}, split {split}: "
            f"{reason}). Without a network, give local files: --task {name} --demos FILE --test "
            'FILE, JSON lines such as {"text": "...", "label": "..."}.'
        ) from error


class _Line(BaseModel):
    """A line of a local file: ``{"text", "label"}``, or ``{"question", "choices", "answer"}``."""

    id: str | int | None = None
    split: Literal["train", "test"] | None = None
    text: str | None = None
    label: str | int | None = None
    question: str | None = None
    choices: list[str] | None = None
    answer: str | int | None = None
    context: str | None = None

    @property
    def kind(self) -> Kind:
        chosen = self.question is not None or self.choices is not None
        return "multiple choice" if chosen else "classification"

    @model_validator(mode="after")
    def _whole(self) -> _Line:
        for name in (
            ("text", "label")
            if self.kind == "classification"
            else ("question", "choices", "answer")
        ):
            value = getattr(self, name)
            if value is None:
                raise ValueError(f'"{name}" is missing')
            if isinstance(value, str) and not value.strip():
                raise ValueError(f'"{name}" is blank; fill it in, or take the line out')
        choices = self.choices
        if choices is not None:
            if len(choices) < 2 or len(set(choices)) < len(choices):
                raise ValueError('"choices" must hold at least two, and all of them different')
            if not all(one.strip() for one in choices):
                raise ValueError('one of the "choices" is blank; take it out')
            if isinstance(self.answer, str) and self.answer not in choices:
                raise ValueError(f'"answer" {shown(self.answer)} is none of the choices')
            if isinstance(self.answer, int) and not 0 <= self.answer < len(choices):
                raise ValueError(
                    f'"answer" is {self.answer}, but indices of {len(choices)} choices go from 0 '
                    f"to {len(choices) - 1}"
                )
        return self

    def item(self, key: str) -> Item:
        """The question, or the text without its label's place among others."""
        if self.choices is None:
            return Item(key, self.text or "", (), 0)
        right = (
            self.answer if isinstance(self.answer, int) else self.choices.index(self.answer or "")
        )
        context = self.context if (self.context or "").strip() else None
        return Item(key, self.question or "", tuple(self.choices), right, context)


@dataclass(frozen=True, slots=True)
class _Read:
    """A line with its place; `label` is None for multiple choice."""

    place: Place
    split: str | None
    kind: Kind
    item: Item
    label: str | None


def from_files(
    test: Path,
    demonstrations: Path | None = None,
    *,
    name: str | None = None,
    words: Worded | None = None,
    labels: Sequence[str] | None = None,
) -> Items:
    """Read a task from one file, whose lines name their split, or from two.

    Args:
        test: JSON lines, or a list: ``{"text", "label"}``, or ``{"question", "choices", "answer"}``
            with an optional "context", where the answer is the right choice or its index from 0;
            "split" is "train" or "test", "id" any name. Other fields count for nothing.
        demonstrations: likewise; all of its lines may be shown, and none of the other file's.
        name: of a named task that the files hold, with its words or its classes as labels.
        words: how that is written.
        labels: to choose from; None for those of the lines that may be shown, or of all where there
            are none.

    Raises:
        DataError: naming file, line and field.
        InputError: labels for multiple choice.
    """
    known = words.labels if words else None if labels is None else tuple(labels)
    classes = NAMED[name].classes if name and words else ()
    source = read(test)
    stamp: dict[str, object] = {"test": source.stamp}
    asked = list(_lines(source, known, classes))
    if demonstrations is None:
        train = [one for one in asked if one.split == "train"]
        asked = [one for one in asked if one.split != "train"]
        wrong = next((one for one in asked if train and one.split is None), None)
        if wrong is not None:
            raise wrong.place.error('"split" is missing; it must be "train" or "test".')
    else:
        second = read(demonstrations)
        stamp["demonstrations"] = second.stamp
        train = list(_lines(second, known, classes))
        for lines, split in ((asked, "train"), (train, "test")):
            if wrong := next((one for one in lines if one.split == split), None):
                raise wrong.place.error(
                    f'"split" is {split!r}, but demonstrations come from a file of their own; take '
                    "the field out, or put the line into the other file."
                )
    if not asked:
        raise source.place.error('no line has "split": "test", so there is nothing to ask.')
    kind = asked[0].kind
    if other := next((one for one in (*train, *asked) if one.kind != kind), None):
        raise other.place.error(
            f"this is {other.kind}, but {asked[0].place.record} of {asked[0].place.file} is "
            f"{kind}; keep them in files of their own."
        )
    if kind == "classification":
        return _labelled(train, asked, known, stamp)
    if name is not None:
        raise asked[0].place.error(f'{name} has texts with labels, "text" and "label" a line.')
    if labels is not None:
        raise InputError("labels are of a classification; multiple choice brings its own.")
    return Items(kind, tuple(a.item for a in train), tuple(b.item for b in asked), (), stamp)


def _lines(
    source: Source, known: tuple[str, ...] | None, classes: tuple[int | str, ...]
) -> Iterator[_Read]:
    keys = Keys()
    for place, line in source.records(_Line):
        label = line.label
        if label is not None and known is not None and label in classes:
            label = known[classes.index(label)]
        named = None if label is None else str(label)
        if named is not None and known is not None and named not in known:
            raise place.error(f"{shown(named)} is none of the labels {list(known)}.")
        item = line.item(keys.take(line.id, place))
        yield _Read(place, line.split, line.kind, item, named)


def _labelled(
    train: Sequence[_Read],
    asked: Sequence[_Read],
    known: tuple[str, ...] | None,
    stamp: dict[str, object],
) -> Items:
    labels = known or tuple(dict.fromkeys(one.label or "" for one in train or asked))
    if unknown := next((one for one in asked if one.label not in labels), None):
        raise unknown.place.error(
            f"no demonstration has the label {shown(unknown.label)}; correct it, or name all "
            "labels with --label."
        )
    if len(labels) < 2:
        raise asked[0].place.error(
            f"all lines have the label {shown(labels[0])}; there must be two to choose from."
        )
    shown_items, asked_items = (
        tuple(
            replace(one.item, choices=labels, answer=labels.index(one.label or "")) for one in lines
        )
        for lines in (train, asked)
    )
    return Items("classification", shown_items, asked_items, labels, stamp)
