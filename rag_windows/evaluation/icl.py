"""In-context learning: classification and multiple choice, demonstrations in windows."""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np

from rag_windows import Demonstration, Passage, WindowedLM
from rag_windows.errors import InputError, LimitError
from rag_windows.evaluation.asking import Answered, Asked
from rag_windows.evaluation.icl_data import (
    NAMED,
    Item,
    Items,
    Wording,
    from_files,
    from_hub,
    worded,
)
from rag_windows.evaluation.metrics import accuracy
from rag_windows.evaluation.record import ReadPassage, Record
from rag_windows.evaluation.run import Arm
from rag_windows.evaluation.task import Array, Example, Reference, Score
from rag_windows.icl import Template
from rag_windows.icl.classifier import Shown, check_normalize, labels_for
from rag_windows.icl.demonstrations import Labels, Normalize
from rag_windows.icl.packing import Sizes

ChoicesAs = Literal["text", "letters"]

USUAL_WINDOWS = 8
"""So many windows are filled where nobody says how many..."""
USUAL_DEMONSTRATIONS = 8
"""...if there are as many demonstrations for each: fewer windows otherwise."""

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CHOICE = Template("{text}\nAnswer: {label}", separator="\n\n")


@dataclass(frozen=True, slots=True)
class IclOptions:
    """Options of an `IclTask`.

    Attributes:
        demonstrations: how many are shown by an arm that names no number of its own.
        seeds: of the draw of demonstrations; every text is asked once for each.
        windows: how many windows they are spread over, at most one a demonstration.
        window_tokens: or how long a window is at most. None for both: a window for every eight
            demonstrations, up to eight windows; more where eight don't hold them.
        normalize: whether choices are compared by the "sum" or the "mean" of their tokens'
            log-probabilities. None: the mean for the texts of multiple choice, else the sum.
        calibrate_with: content-free texts whose label probabilities divide the others; see
            `WindowedLM.classify`.
        template: instead of the task's own.
        labels: of a classification, instead of those that its demonstrations have.
        wording: of a named task: "pcw" or "structured-prompting".
        choices_as: whether multiple choice is answered by the "text" of a choice or by its letter,
            with all choices in the question ("letters").
        texts: how many are asked, drawn with the first seed; None for all.

    Raises:
        InputError: an option that can't be used.
    """

    demonstrations: int = 32
    seeds: tuple[int, ...] = (0,)
    windows: int | None = None
    window_tokens: int | None = None
    normalize: Normalize | None = None
    calibrate_with: Sequence[str] = ()
    template: Template | None = None
    labels: Sequence[str] | None = None
    wording: Wording = "pcw"
    choices_as: ChoicesAs = "text"
    texts: int | None = None

    def __post_init__(self) -> None:
        if self.normalize is not None:
            check_normalize(self.normalize)
        if self.choices_as not in get_args(ChoicesAs):
            raise InputError(f"choices_as={self.choices_as!r} must be 'text' or 'letters'.")
        Sizes(self.windows, self.window_tokens)
        for name, least in (("demonstrations", 0), ("windows", 1), ("texts", 1)):
            given = getattr(self, name)
            if given is not None and given < least:
                raise InputError(f"{name} must be at least {least}, not {given}.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise InputError(f"seeds must be different numbers, at least one, not {self.seeds}.")
        if not all(one.strip() for one in self.calibrate_with):
            raise InputError("calibrate_with must be a list of texts that are not blank.")

    def sizes(self, shown: int) -> tuple[Sizes, ...]:
        """Ways to fill windows with so many demonstrations, the wanted one first."""
        if self.window_tokens is not None:
            return (Sizes(window_tokens=self.window_tokens),)
        if self.windows is not None:
            return (Sizes(windows=max(1, min(self.windows, shown))),)
        usual = min(USUAL_WINDOWS, shown // USUAL_DEMONSTRATIONS)
        return Sizes(windows=max(1, usual)), Sizes()


class IclTask:
    """Texts to label, or questions with choices, behind demonstrations in windows.

    An arm's `top_k` is its number of demonstrations; 0 shows none, which is the blind baseline of
    the model itself. The first n of an order that the seed draws make n demonstrations, so those of
    a deeper arm begin with those of a shallower one. Examples bring no passages: `answerer` knows
    the demonstrations.

    Args:
        name: stands in manifest and report.
        items: the data.
        template: how demonstrations and texts are written.
        options: how they are asked.

    Raises:
        InputError: options that don't go with the data.
    """

    pool: Sequence[Passage] | None = None
    prefix: str | None = None
    max_new_tokens = 1

    def __init__(self, name: str, items: Items, template: Template, options: IclOptions) -> None:
        self.name = name
        self.items = items
        self.template = template
        self.options = options
        self.by_letter = items.kind == "multiple choice" and options.choices_as == "letters"
        self._orders: dict[int, list[Item]] = {}
        long = next((one for one in items.test if len(one.choices) > len(_LETTERS)), None)
        if self.by_letter and long is not None:
            raise InputError(
                f"The question {long.key!r} has {len(long.choices)} choices, more than there are "
                "letters; use choices_as='text'."
            )

    @classmethod
    def open(
        cls,
        task: str,
        *,
        demonstrations: Path | None = None,
        test: Path | None = None,
        options: IclOptions | None = None,
    ) -> Self:
        """A task by its name, from the Hub or from local files, or by its file.

        Args:
            task: one of `NAMED`, or a file; see `from_files`.
            demonstrations: a file of what may be shown, unless it stands in the other.
            test: of a named task: a local file instead of the Hub.
            options: how it is asked.

        Raises:
            DataError: naming file, line and field; or the Hub can't be reached.
            InputError: neither a name nor a file, or options that don't go with it.
            MissingExtraError: `datasets` is needed and not installed.
        """
        options = options or IclOptions()
        if task in NAMED:
            words = worded(task, options.wording)
            if options.labels is not None:
                raise InputError(f"{task} has labels of its own; leave --label out.")
            if test is not None:
                items = from_files(test, demonstrations, name=task, words=words)
            elif demonstrations is None:
                items = from_hub(task, words)
            else:
                raise InputError(f"The texts of {task} to ask are missing: give --test FILE.")
            return cls(task, items, options.template or words.template, options)
        path = Path(task)
        if not path.suffix and not path.exists():
            raise InputError(
                f"--task {task!r} is neither a file nor one of {', '.join(sorted(NAMED))}."
            )
        if test is not None:
            raise InputError("--test goes with a named task; name the file by --task alone.")
        items = from_files(path, demonstrations, labels=options.labels)
        default = _CHOICE if items.kind == "multiple choice" else Template()
        return cls(path.stem, items, options.template or default, options)

    @cached_property
    def examples(self) -> tuple[Example, ...]:
        """Each text once for each seed; all of one seed come first."""
        several = len(self.options.seeds) > 1
        made = []
        for seed in self.options.seeds:
            for item in self.asked.values():
                kinds = (item.label,) if self.items.labels else ()
                made.append(
                    Example(
                        key=f"{item.key}/seed {seed}" if several else item.key,
                        messages=({"role": "user", "content": self.text_of(item)},),
                        references=(Reference(item.label),),
                        group=item.key,
                        kinds=(*kinds, f"demonstrations of seed {seed}") if several else kinds,
                        passages=(),
                        choices=item.choices,
                        details={"seed": seed, "item": item.key},
                    )
                )
        return tuple(made)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Digests of the data, the template, labels, options, and what blind readers get."""
        options = self.options
        return {
            "data": dict(self.items.stamp),
            "kind": self.items.kind,
            "labels": list(self.items.labels),
            "template": {
                "demonstration": self.template.demonstration,
                "query": self.template.query,
                "separator": self.template.separator,
            },
            "normalize": self.normalize,
            "demonstrations": options.demonstrations,
            "seeds": list(options.seeds),
            "balanced": True,
            "windows": options.windows,
            "window_tokens": options.window_tokens,
            "calibrate_with": list(options.calibrate_with),
            "choices_as": options.choices_as,
            "texts": options.texts,
            "baselines": self.baselines,
        }

    @property
    def baselines(self) -> dict[str, float]:
        """Accuracy of two readers that see no text, in percent.

        "chance" guesses among the choices; "majority", where all examples have the same choices,
        always says the label which most of them have.
        """
        examples = self.examples
        chance = sum(1.0 / len(one.choices) for one in examples) / len(examples)
        told = {"chance": round(100.0 * chance, 2)}
        if all(one.choices == examples[0].choices for one in examples):
            most = max(Counter(one.references[0].text for one in examples).values())
            told["majority"] = round(100.0 * most / len(examples), 2)
        return told

    @property
    def normalize(self) -> Normalize:
        """As asked for, or what suits the task."""
        by_text = self.items.kind == "multiple choice" and not self.by_letter
        return self.options.normalize or ("mean" if by_text else "sum")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Accuracy; and macro F1 of a classification."""
        return ("accuracy", "macro_f1") if self.items.labels else ("accuracy",)

    def scores(self, examples: Sequence[Example], records: Sequence[Record]) -> list[Score]:
        """Score one arm's records, one an example in the same order."""
        made = [accuracy(examples, [one.answer for one in records])]
        if self.items.labels:
            made.append(macro_f1(examples, records, self.items.labels))
        return made

    def answerer(self, prefix: str | None = None, batch: int = 32) -> IclAnswerer:
        """What answers this task's examples, so many in an encoding, behind a system prompt."""
        return IclAnswerer(self, prefix or None, batch)

    def shown(self, count: int | None, seed: int) -> list[Demonstration]:
        """The demonstrations of a seed, in order.

        Args:
            count: how many; None for the options' number.
            seed: one of the options' seeds.

        Raises:
            InputError: there are fewer, or the number is negative.
        """
        count = self.options.demonstrations if count is None else count
        there = len(self.items.demonstrations)
        if not 0 <= count <= there:
            raise InputError(
                f"{count} demonstrations are asked for, and {self.name} has {there}. "
                + (
                    "Ask for fewer, or give more."
                    if there
                    else 'Mark lines with "split": "train", or give --demos FILE.'
                )
            )
        if seed not in self._orders:
            balanced = bool(self.items.labels)
            self._orders[seed] = drawn(self.items.demonstrations, seed, balanced=balanced)
        return [
            Demonstration(self.text_of(one), self.choices_of(one)[one.answer])
            for one in self._orders[seed][:count]
        ]

    def text_of(self, item: Item) -> str:
        """What stands for ``{text}`` in the template: of a question with its context."""
        if self.items.kind == "classification":
            return item.text
        lines = [] if item.context is None else [item.context]
        lines.append(f"Question: {item.text}")
        if self.by_letter:
            lines += [
                f"{letter}. {one}" for letter, one in zip(_LETTERS, item.choices, strict=False)
            ]
        return "\n".join(lines)

    def choices_of(self, item: Item) -> tuple[str, ...]:
        """What the model chooses from, in the order of the item's choices."""
        return tuple(_LETTERS[: len(item.choices)]) if self.by_letter else item.choices

    @cached_property
    def asked(self) -> Mapping[str, Item]:
        """The items that are asked, by their keys."""
        test, most = self.items.test, self.options.texts
        if most is not None and most < len(test):
            rng = random.Random(self.options.seeds[0])
            test = tuple(test[index] for index in sorted(rng.sample(range(len(test)), most)))
        return {one.key: one for one in test}


def drawn(items: Sequence[Item], seed: int, *, balanced: bool) -> list[Item]:
    """All items in the order in which they are shown: the first n make n demonstrations.

    Args:
        items: in the order of the file.
        seed: of a private generator; the same everywhere.
        balanced: rounds of one item a label, in an order drawn anew for each round, until the
            labels run out one by one. False: in any order.
    """
    rng = random.Random(seed)
    order = rng.sample(range(len(items)), len(items))
    if not balanced:
        return [items[index] for index in order]
    by_label: dict[str, list[Item]] = {}
    for index in order:
        by_label.setdefault(items[index].label, []).append(items[index])
    # Not in the order of the draw, so that every label leads as often as another.
    names = sorted(by_label)
    made: list[Item] = []
    for number in range(max(map(len, by_label.values()), default=0)):
        row = [by_label[name][number] for name in names if number < len(by_label[name])]
        made += rng.sample(row, len(row))
    return made


def macro_f1(
    examples: Sequence[Example], records: Sequence[Record], labels: Sequence[str]
) -> Score:
    """Mean over labels of F1, in percent; a label that is neither right nor chosen counts not.

    An answer that is no label, as that of an error is, misses its own label and hits no other.
    """
    index = {label: number for number, label in enumerate(labels)}
    # Hits, false alarms and misses of each label.
    rows = np.zeros((len(examples), 3, len(labels)))
    for row, example, record in zip(rows, examples, records, strict=True):
        right, chosen = index[example.references[0].text], index.get(record.answer)
        if chosen == right:
            row[0, right] = 1
            continue
        row[2, right] = 1
        if chosen is not None:
            row[1, chosen] = 1
    return Score.of_sums("macro_f1", rows.reshape(len(examples), -1), _macro)


def _macro(sums: Array) -> Array:
    """(..., 3 x labels) -> (...) percent."""
    hits, alarms, misses = np.split(sums, 3, axis=-1)
    whole = 2 * hits + alarms + misses
    counted = whole > 0
    each = np.divide(2 * hits, whole, out=np.zeros_like(whole), where=counted)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(100.0 * each.sum(axis=-1) / counted.sum(axis=-1))


@dataclass(frozen=True, slots=True)
class _Ready:
    """An arm's demonstrations in windows, ready for texts.

    Attributes:
        shown: judges texts.
        left_out: demonstrations that did not fit.
        passages: the windows, as a record keeps them.
    """

    shown: Shown
    left_out: int
    passages: tuple[ReadPassage, ...]


class _Measured:
    """A task in a model's tokens: how long its texts and choices are."""

    def __init__(self, task: IclTask, lm: WindowedLM) -> None:
        self.lm = lm
        self._task = task
        self._limit = lm.engine.position_limit
        self._labels: dict[tuple[str, ...], Labels] = {}

    def labels(self, item: Item) -> Labels:
        """The item's choices.

        Raises:
            InputError: two of them are the same tokens.
        """
        choices = self._task.choices_of(item)
        if choices not in self._labels:
            self._labels[choices] = labels_for(self.lm.engine, self._task.template, choices)
        return self._labels[choices]

    def apart(self, item: Item) -> bool:
        """Whether an item gets windows of its own size.

        It does if it takes more than half of the model's positions, so that one overlong text makes
        nobody else's windows short; or if its choices can't be used, which is told of it alone.
        """
        size = self._sizes[item.key]
        return size is None or (self._limit is not None and size > self._limit // 2)

    @cached_property
    def usual(self) -> tuple[str, list[Labels]]:
        """The longest text of those that share windows, and all their choices; "" for none."""
        items = [one for one in self._task.asked.values() if not self.apart(one)]
        longest = max(items, key=lambda one: self._sizes[one.key] or 0, default=None)
        if longest is None:
            return "", []
        return self._task.text_of(longest), list({self.labels(one): None for one in items})

    @cached_property
    def _sizes(self) -> Mapping[str, int | None]:
        """Tokens of each item's text; None where its choices can't be used."""
        sizes: dict[str, int | None] = {}
        for item in self._task.asked.values():
            text = self._task.text_of(item)
            try:
                longest = max(map(len, self.labels(item).ids))
            except InputError:
                sizes[item.key] = None
            else:
                encoded = self.lm.tokenizer(text, add_special_tokens=False)
                sizes[item.key] = len(encoded["input_ids"]) + longest
        return sizes


@dataclass(slots=True)
class IclAnswerer:
    """Answers an `IclTask`; windows don't depend on the batch, so it changes no answer.

    Attributes:
        task: whose examples are answered.
        prefix: system prompt, or None.
        batch: examples that share an encoding.
    """

    task: IclTask
    prefix: str | None
    batch: int = 32
    _ready: dict[tuple[str, int], _Ready] = field(default_factory=dict, init=False, repr=False)
    _measured: _Measured | None = field(default=None, init=False, repr=False)

    def answer(self, lm: WindowedLM, arm: Arm, asked: Sequence[Asked]) -> list[Answered]:
        """Answer examples by one arm; the passages beside them count for nothing.

        Raises:
            InputError: choices that are the same tokens, or fewer demonstrations than asked for.
            LimitError: a text or a demonstration that doesn't fit the model's positions.
        """
        if self._measured is None or self._measured.lm is not lm:
            self._measured = _Measured(self.task, lm)
            self._ready.clear()
        groups: dict[tuple[int, str | None], list[Example]] = {}
        for example, _ in asked:
            item = self.task.asked[example.details["item"]]
            own = item.key if self._measured.apart(item) else None
            groups.setdefault((example.details["seed"], own), []).append(example)
        made: dict[str, Answered] = {}
        for (seed, own), examples in groups.items():
            if own is not None:
                item = self.task.asked[own]
                choices = [self._measured.labels(item)]
                ready = self._filled(lm, arm, seed, self.task.text_of(item), choices)
            else:
                if (arm.name, seed) not in self._ready:
                    filled = self._filled(lm, arm, seed, *self._measured.usual)
                    self._ready[arm.name, seed] = filled
                ready = self._ready[arm.name, seed]
            made |= self._judged(arm, ready, examples, self._measured)
        return [made[example.key] for example, _ in asked]

    def _filled(
        self, lm: WindowedLM, arm: Arm, seed: int, longest: str, choices: Sequence[Labels]
    ) -> _Ready:
        """As many demonstrations as the arm asks for and the model's positions allow.

        They allow all of them, unless the arm's method reads one window after the other: then the
        first ones.

        Args:
            lm: the model.
            arm: says how many, and how they are read.
            seed: of the draw.
            longest: of the texts that will be judged.
            choices: by which they will be.
        """
        task, method = self.task, arm.method
        if method is None:
            raise InputError(f"{arm.name} was read from a run's folder; it can't be asked.")
        demonstrations = task.shown(arm.top_k, seed)

        def shown(count: int) -> Shown:
            def filled(sizes: Sizes) -> Shown:
                return Shown.of(
                    lm.engine,
                    [longest, *task.options.calibrate_with],
                    demonstrations[:count],
                    choices,
                    form=task.template,
                    method=method,
                    prefix=self.prefix,
                    sizes=sizes,
                )

            *first, last = task.options.sizes(count)
            for sizes in first:
                # It asks for a number of windows, which may be too few.
                with suppress(LimitError):
                    return filled(sizes)
            return filled(last)

        def too_many(count: int) -> bool:
            return not shown(count).fits(longest, choices)

        kept = len(demonstrations)
        if too_many(kept):
            # Where not even the first one fits, the engine says so when it is asked.
            kept = max(1, bisect_left(range(kept), True, lo=1, key=too_many) - 1)
        made = shown(kept)
        windowed = made.method.windowed
        passages = tuple(
            ReadPassage.of(
                Passage(text, id=f"window {number}"), spans=((0, len(text)),) if windowed else ()
            )
            for number, text in enumerate(made.windows, start=1)
        )
        return _Ready(made, len(demonstrations) - kept, passages)

    def _judged(
        self, arm: Arm, ready: _Ready, examples: Sequence[Example], measured: _Measured
    ) -> dict[str, Answered]:
        task, items = self.task, [self.task.asked[one.details["item"]] for one in examples]
        begun = time.perf_counter()
        judged = ready.shown.judge(
            [task.text_of(item) for item in items],
            [measured.labels(item) for item in items],
            task.normalize,
            task.options.calibrate_with,
        )
        seconds = (time.perf_counter() - begun) / len(items)
        read, made = judged.read, {}
        for number, (item, found) in enumerate(zip(items, judged.labels, strict=True)):
            # The first of a batch pays for what the others find.
            first = number == 0
            record = Record(
                key=examples[number].key,
                arm=arm.name,
                answer=item.choices[list(found.scores).index(found.label)],
                finish_reason="chosen",
                passages=ready.passages,
                left_out=ready.left_out,
                prompt_tokens=read.context_tokens + read.query_tokens[number],
                cached_tokens=read.cached_tokens if first else read.context_tokens,
                windows_encoded=read.encoded_windows if first else 0,
                windows_reused=read.cached_windows + (0 if first else read.encoded_windows),
                encode_s=read.encode_s / len(items),
                ttft_s=seconds,
                total_s=seconds,
                scores=dict(zip(item.choices, found.scores.values(), strict=True)),
                notes=tuple(note.message for note in found.notes),
            )
            made[record.key] = Answered(record, ready.shown.windows)
        return made
