"""In-context learning: classification and multiple choice, demonstrations in windows."""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, cast

import numpy as np
from pydantic import BaseModel, Field, StringConstraints, model_validator

from rag_windows import Demonstration, Passage, WindowedLM
from rag_windows.errors import InputError, LimitError
from rag_windows.evaluation.files import Keys, Place, read, shown
from rag_windows.evaluation.metrics import accuracy
from rag_windows.evaluation.run import Answered, Arm, Asked
from rag_windows.evaluation.task import Array, Example, ReadPassage, Record, Reference, Score
from rag_windows.icl import Template
from rag_windows.icl.classifier import Classifier, Labels, Normalize
from rag_windows.methods import Method
from rag_windows.request import in_order

USUAL = 8
"""So many windows are filled where nobody says how many, if each gets so many demonstrations."""


class Item(NamedTuple):
    """A text to label, or a question with its context; ``answer`` is the right choice's index."""

    key: str
    text: str
    choices: tuple[str, ...]
    answer: int

    @property
    def right(self) -> str:
        """The right choice."""
        return self.choices[self.answer]


_Filled = Annotated[str, StringConstraints(pattern=r"\S")]


class _Line(BaseModel):
    id: str | int | None = None
    split: Literal["train", "test"] | None = None


class _Text(_Line):
    text: _Filled
    label: _Filled | int

    def item(self, key: str, place: Place, labels: tuple[str, ...]) -> Item:
        label = str(self.label)
        if label not in labels:
            raise place.error(
                f"{shown(label)} is none of the labels {list(labels)}; correct it, or name all "
                "labels with --label."
            )
        return Item(key, self.text, labels, labels.index(label))


class _Question(_Line):
    question: _Filled
    choices: Annotated[list[_Filled], Field(min_length=2)]
    answer: str | int
    context: str | None = None

    @model_validator(mode="after")
    def _indexed(self) -> _Question:
        if len(set(self.choices)) < len(self.choices):
            raise ValueError("two of the choices are the same")
        if self.answer in self.choices:
            self.answer = self.choices.index(str(self.answer))
        if self.answer not in range(len(self.choices)):
            raise ValueError(f'"answer" {shown(self.answer)} is no choice, nor the index of one')
        return self

    def item(self, key: str, place: Place, labels: tuple[str, ...]) -> Item:
        context = f"{self.context}\n" if (self.context or "").strip() else ""
        text = f"{context}Question: {self.question}"
        return Item(key, text, tuple(self.choices), cast(int, self.answer))


class Data(NamedTuple):
    """What may be shown and what is asked; labels, unless questions bring their own choices."""

    demonstrations: list[Item]
    test: list[Item]
    labels: tuple[str, ...]
    stamp: dict[str, Any]


def from_files(
    test: Path, demonstrations: Path | None = None, labels: Sequence[str] | None = None
) -> Data:
    """Read a task from one file, whose lines name their split, or from two.

    Lines are JSON: ``{"text", "label"}``, or ``{"question", "choices", "answer"}`` with an optional
    "context", where the answer is the right choice or its index from 0.
    """
    lines: dict[str, list[Any]] = {"train": [], "test": []}
    stamp: dict[str, Any] = {}
    kind: Any = None
    for part, default, path in (
        ("test", "test", test),
        ("demonstrations", "train", demonstrations),
    ):
        if path is None:
            continue
        source, keys = read(path), Keys()
        stamp[part] = source.stamp
        # All lines are of one kind, that of the first.
        _, first = next(source.records(dict[str, Any]), (None, {}))
        kind = kind or (_Question if {"question", "choices"} & set(first) else _Text)
        for place, line in source.records(kind):
            lines[line.split or default].append((place, keys.take(line.id, place), line))
    if not lines["test"]:
        raise Place(str(test)).error('no line has "split": "test", so there is nothing to ask.')
    known = tuple(labels or ())
    if kind is _Text:
        named = (str(one.label) for _, _, one in lines["train"] or lines["test"])
        known = known or tuple(dict.fromkeys(named))
        if len(known) < 2:
            raise Place(str(test)).error(f"all lines have the label {shown(known[0])}.")
    elif known:
        raise InputError(f"{test} holds questions, which bring their own choices, not labels.")
    items = {
        split: [one.item(key, place, known) for place, key, one in some]
        for split, some in lines.items()
    }
    return Data(items["train"], items["test"], known, stamp)


@dataclass(frozen=True)
class IclTask:
    """Texts to label, or questions with choices, behind demonstrations in windows.

    An arm's `top_k` is its number of demonstrations; 0 shows none, which is the blind baseline of
    the model itself. Those of a deeper arm begin with those of a shallower one. Examples bring no
    passages: `IclAnswerer` knows the demonstrations.
    """

    name: str
    data: Data
    template: Template
    settings: Mapping[str, Any]

    pool: None = None
    prefix: None = None
    max_new_tokens: int = 1

    @classmethod
    def open(
        cls,
        task: str,
        *,
        demonstrations: str | None = None,
        template: str | None = None,
        labels: Sequence[str] | None = None,
        normalize: Normalize | None = None,
        seed: int = 0,
        windows: int | None = None,
        window_tokens: int | None = None,
        calibrate_with: Sequence[str] = (),
        texts: int | None = None,
        **earlier: object,
    ) -> Self:
        """A task of a file; the arguments are the command's options.

        ``texts`` is its --limit: so many are asked, drawn with the seed. ``earlier`` are options
        that older runs noted; where they changed what was asked, the settings are others, too.
        """
        if windows is not None and window_tokens is not None:
            raise InputError("Give either --windows or --window-tokens, not both.")
        data = from_files(Path(task), Path(demonstrations) if demonstrations else None, labels)
        form = Template() if data.labels else Template("{text}\nAnswer: {label}", "", "\n\n")
        if texts is not None and texts < len(data.test):
            chosen = random.Random(seed).sample(range(len(data.test)), texts)
            data = data._replace(test=[data.test[index] for index in sorted(chosen)])
        form = form if template is None else Template(template)
        settings = {
            "data": data.stamp,
            "kind": "classification" if data.labels else "multiple choice",
            "labels": list(data.labels),
            "template": asdict(form),
            "normalize": normalize or ("sum" if data.labels else "mean"),
            "seeds": [seed],
            "windows": windows,
            "window_tokens": window_tokens,
            "calibrate_with": list(calibrate_with),
            "texts": texts,
            "baselines": baselines(data.test),
            # No command changes these.
            "demonstrations": 32,
            "balanced": True,
            "choices_as": "text",
        }
        return cls(Path(task).stem, data, form, settings)

    @cached_property
    def examples(self) -> tuple[Example, ...]:
        """One a text or question, in the order of the file."""
        return tuple(
            Example(
                key=item.key,
                messages=({"role": "user", "content": item.text},),
                references=(Reference(item.right),),
                group=item.key,
                kinds=(item.right,) if self.data.labels else (),
                passages=(),
                choices=item.choices,
                details={"item": item},
            )
            for item in self.data.test
        )

    @property
    def metrics(self) -> tuple[str, ...]:
        """Accuracy; and macro F1 of a classification."""
        return ("accuracy", "macro_f1") if self.data.labels else ("accuracy",)

    def scores(self, examples: Sequence[Example], records: Sequence[Record]) -> list[Score]:
        """Score one arm's records, one an example in the same order."""
        made = [accuracy(examples, [one.answer for one in records])]
        if self.data.labels:
            made.append(macro_f1(examples, records, self.data.labels))
        return made

    def shown(self, count: int | None) -> list[Demonstration]:
        """So many demonstrations, in order."""
        there = self.data.demonstrations
        if count is None or count > len(there):
            raise InputError(
                f"{count} demonstrations are asked for, and {self.name} has {len(there)}: ask for "
                'fewer (--shots), mark lines with "split": "train", or give --demos FILE.'
            )
        order = drawn(there, self.settings["seeds"][0], balanced=bool(self.data.labels))
        return [Demonstration(one.text, one.right) for one in order[:count]]


def baselines(items: Sequence[Item]) -> dict[str, float]:
    """Accuracy of two readers that see no text, in percent.

    "chance" guesses among the choices; "majority", where all items have the same ones, always says
    that which is right most often.
    """
    found = {"chance": sum(1.0 / len(one.choices) for one in items) / len(items)}
    if len({one.choices for one in items}) == 1:
        found["majority"] = max(Counter(one.answer for one in items).values()) / len(items)
    return {name: round(100.0 * value, 2) for name, value in found.items()}


def drawn(items: Sequence[Item], seed: int, *, balanced: bool) -> list[Item]:
    """All items in the order in which they are shown: the first n make n demonstrations.

    Balanced ones come in rounds of one item a label, in an order drawn anew for each round, until
    the labels run out one by one; else they come in any order.
    """
    rng = random.Random(seed)
    by_label: dict[str, list[Item]] = {}
    for item in rng.sample(items, len(items)):
        by_label.setdefault(item.right if balanced else "", []).append(item)
    made: list[Item] = []
    # Not in the order of the draw, so that every label leads as often as another.
    for row in zip_longest(*(by_label[label] for label in sorted(by_label))):
        found = [item for item in row if item is not None]
        made += rng.sample(found, len(found))
    return made


def macro_f1(
    examples: Sequence[Example], records: Sequence[Record], labels: Sequence[str]
) -> Score:
    """Mean over labels of F1, in percent; a label that is neither right nor chosen counts not.

    An answer that is no label, as that of an error is, misses its own label and hits no other.
    """
    right = np.array([[one.references[0].text == label for label in labels] for one in examples])
    chosen = np.array([[one.answer == label for label in labels] for one in records])
    # For each label twice the hits, and how often it is right or chosen.
    rows = np.concatenate([2.0 * (right & chosen), 1.0 * right + chosen], axis=1)
    return Score.of_sums("macro_f1", rows, _macro)


def _macro(sums: Array) -> Array:
    """(..., 2 x labels) -> (...) percent."""
    hits, whole = np.split(sums, 2, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        each = np.where(whole > 0, hits / whole, 0.0)
        return np.asarray(100.0 * each.sum(axis=-1) / (whole > 0).sum(axis=-1))


@dataclass(frozen=True, slots=True)
class IclAnswerer:
    """Answers an `IclTask`, so many examples in an encoding, behind a system prompt or None."""

    task: IclTask
    prefix: str | None
    batch: int = 32

    def answer(self, lm: WindowedLM, arm: Arm, asked: Sequence[Asked]) -> list[Answered]:
        """Answer examples by one arm; the passages beside them count for nothing."""
        form, method = self.task.template, cast(Method, arm.method)
        classifier = Classifier(lm.engine, form, method, self.prefix)
        items: list[Item] = [one.details["item"] for one, _ in asked]
        settings, texts = self.task.settings, [item.text for item in items]
        known = {choices: classifier.labels(choices) for choices in {one.choices for one in items}}
        choices = [known[item.choices] for item in items]
        demonstrations = self.task.shown(arm.top_k)
        windows, left_out = self._windows(classifier, demonstrations, texts, choices)
        begun = time.perf_counter()
        found, reading = classifier.judge(
            windows, texts, choices, settings["normalize"], settings["calibrate_with"]
        )
        seconds = (time.perf_counter() - begun) / len(items)
        passages = tuple(
            ReadPassage.of(
                Passage(text, f"window {number}"),
                spans=((0, len(text)),) if classifier.method.windowed else (),
            )
            for number, text in enumerate(windows, start=1)
        )
        context, parts = reading.context, reading.parts
        context_tokens = len(parts.prefix_ids) + sum(len(one.ids) for one in parts.windows)
        made = []
        for number, label in enumerate(found):
            # The first of a batch pays for what the others find.
            first = number == 0
            encoded = context.encoded_windows if first else 0
            record = Record(
                key=items[number].key,
                arm=arm.name,
                answer=label.label,
                finish_reason="chosen",
                passages=passages,
                left_out=left_out,
                prompt_tokens=context_tokens + reading.query_tokens[number],
                cached_tokens=context.cached_tokens if first else context_tokens,
                windows_encoded=encoded,
                windows_reused=context.cached_windows + context.encoded_windows - encoded,
                encode_s=reading.encode_s / len(items),
                ttft_s=seconds,
                total_s=seconds,
                scores=label.scores,
                notes=tuple(note.message for note in label.notes),
            )
            made.append(Answered(record, tuple(windows)))
        return made

    def _windows(
        self,
        classifier: Classifier,
        demonstrations: Sequence[Demonstration],
        texts: Sequence[str],
        choices: Sequence[Labels],
    ) -> tuple[list[str], int]:
        """Windows of demonstrations, and how many of these are left out.

        Windows side by side always fit; one after the other, the first ones are read. Where not
        even one of them fits, the engine says so.
        """
        settings, longest = self.task.settings, max(texts, key=len)
        number, tokens = settings["windows"], settings["window_tokens"]

        def packed(count: int) -> list[str]:
            given = ([*texts, *settings["calibrate_with"]], demonstrations[:count], choices)
            if number is not None or tokens is not None:
                return classifier.pack(*given, number and max(1, min(number, count)), tokens)
            try:
                return classifier.pack(*given, max(1, min(USUAL, count // USUAL)))
            except LimitError:
                # So many windows are too few.
                return classifier.pack(*given)

        def too_many(count: int) -> bool:
            return not classifier.fits(packed(count), longest, choices)

        kept = len(demonstrations)
        if in_order(classifier.method) and too_many(kept):
            kept = max(1, bisect_left(range(kept), True, lo=1, key=too_many) - 1)
        return packed(kept), len(demonstrations) - kept
