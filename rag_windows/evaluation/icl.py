"""In-context learning: classification and multiple choice, demonstrations in windows.

Classification tasks of papers on many demonstrations are known by name, in the wordings of their
released code: "pcw" (https://arxiv.org/abs/2212.10947; it has no MR, which takes the form of SST-2
here) and "structured-prompting" (https://arxiv.org/abs/2212.06713). Both judge SST-2 and SST-5 by
the validation split.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby, zip_longest
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, Any, Literal, NamedTuple, Self, cast

import numpy as np
from pydantic import BaseModel, Field, StringConstraints, model_validator

from rag_windows import Demonstration, Passage, WindowedLM
from rag_windows.errors import InputError, LimitError, MissingExtraError, missing
from rag_windows.evaluation.files import Keys, Place, read, shown
from rag_windows.evaluation.metrics import accuracy
from rag_windows.evaluation.run import Answered, Arm, Asked
from rag_windows.evaluation.task import Array, Example, ReadPassage, Record, Reference, Score
from rag_windows.icl import Template
from rag_windows.icl.classifier import Shown, labels_for
from rag_windows.icl.demonstrations import Normalize, Sizes
from rag_windows.methods import Method

USUAL = 8
"""So many windows are filled where nobody says how many, if each gets so many demonstrations."""


class Named(NamedTuple):
    """A data set of the Hugging Face Hub; demonstrations are of its split "train"."""

    hub: str
    config: str | None
    text: str
    label: str
    asked: str
    classes: tuple[int | str, ...]


_TREC = ("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM")
_MR = "cornell-movie-review-data/rotten_tomatoes"
NAMED = {
    "sst2": Named("nyu-mll/glue", "sst2", "sentence", "label", "validation", (0, 1)),
    "sst5": Named("SetFit/sst5", None, "text", "label", "validation", (0, 1, 2, 3, 4)),
    # The original "trec" needs a loading script, which `datasets` no longer runs.
    "trec": Named("SetFit/TREC-QC", None, "text", "label_coarse_original", "test", _TREC),
    "mr": Named(_MR, None, "text", "label", "validation", (0, 1)),
    "agnews": Named("fancyzhx/ag_news", None, "text", "label", "test", (0, 1, 2, 3)),
}
# What stands before a text and before a label, and the words for the classes.
WORDINGS = {
    "pcw": {
        "sst2": ("Review", "Sentiment", "negative positive"),
        "sst5": ("Review", "Sentiment", "terrible bad okay good great"),
        "trec": ("Question", "Type", "abbreviation entity description human location numeric"),
        "mr": ("Review", "Sentiment", "negative positive"),
        "agnews": ("input", "type", "world sports business technology"),
    },
    "structured-prompting": {
        "sst2": ("Sentence", "Sentiment", "negative positive"),
        "sst5": ("Sentence", "Sentiment", "terrible negative neutral positive great"),
        "trec": ("Question", "Type", "Expression Entity Description Person Location Number"),
        "mr": ("Review", "Sentiment", "Negative Positive"),
        "agnews": ("Article", "Category", "World Sports Business Technology"),
    },
}


class Item(NamedTuple):
    """A text to label, or a question with its context, and what there is to choose from.

    ``answer`` is the index of the right choice; ``offered`` are the choices as the model sees them.
    """

    key: str
    text: str
    choices: tuple[str, ...]
    answer: int
    offered: tuple[str, ...]


_Filled = Annotated[str, StringConstraints(pattern=r"\S")]


class _Line(BaseModel):
    id: str | int | None = None
    split: Literal["train", "test"] | None = None


class _Text(_Line):
    text: _Filled
    label: _Filled | int


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


class Data(NamedTuple):
    """What may be shown and what is asked; labels, unless questions bring their own choices."""

    demonstrations: list[Item]
    test: list[Item]
    labels: tuple[str, ...]
    stamp: dict[str, Any]


_Lines = list[tuple[Place, str, Any]]
"""Lines of a file or of the Hub with their places and keys."""


def from_files(
    test: Path,
    demonstrations: Path | None = None,
    labels: Sequence[str] | None = None,
    classes: Sequence[int | str] = (),
    by_letter: bool = False,
) -> Data:
    """Read a task from one file, whose lines name their split, or from two.

    Lines are JSON: ``{"text", "label"}``, or ``{"question", "choices", "answer"}`` with an optional
    "context", where the answer is the right choice or its index from 0. Without ``labels`` those of
    the demonstrations count; ``classes`` are other names of the labels.
    """
    train: _Lines = []
    asked: _Lines = []
    stamp: dict[str, Any] = {}
    for part, default, path in (
        ("test", "test", test),
        ("demonstrations", "train", demonstrations),
    ):
        if path is None:
            continue
        source, keys = read(path), Keys()
        stamp[part] = source.stamp
        # All lines of a file are of one kind, that of the first.
        _, first = next(source.records(dict[str, Any]))
        kind = _Question if {"question", "choices"} & set(first) else _Text
        for place, line in source.records(kind):
            split = line.split or default
            if demonstrations is not None and split != default:
                raise place.error(f'its "split" is {split!r}; put it into the other file.')
            lines = train if split == "train" else asked
            lines.append((place, keys.take(line.id, place), line))
    if not asked:
        raise Place(str(test)).error('no line has "split": "test", so there is nothing to ask.')
    if isinstance(asked[0][2], _Text):
        return _labelled(train, asked, labels, classes, stamp)
    if labels is not None:
        raise InputError(f"{test} holds questions, which bring their own choices, not labels.")
    return Data(_questions(train, by_letter), _questions(asked, by_letter), (), stamp)


def _questions(lines: _Lines, by_letter: bool) -> list[Item]:
    made = []
    for place, key, one in lines:
        choices = offered = tuple(one.choices)
        context = [one.context] if (one.context or "").strip() else []
        text = [*context, f"Question: {one.question}"]
        if by_letter:
            offered = tuple(ascii_uppercase[: len(choices)])
            if len(offered) < len(choices):
                raise place.error("there are more choices than letters; use --choices text.")
            text += [f"{letter}. {one}" for letter, one in zip(offered, choices, strict=True)]
        made.append(Item(key, "\n".join(text), choices, one.answer, offered))
    return made


def from_hub(name: str, labels: Sequence[str]) -> Data:
    """Download a named task, or take it from the cache of `datasets`; blank texts are left out."""
    named, place, parts = NAMED[name], Place(NAMED[name].hub), []
    stamp: dict[str, Any] = {"hub": named.hub}
    local = f"give local files: --task {name} --demos FILE --test FILE"
    splits = {"demonstrations": "train", "test": named.asked}
    try:
        from datasets import load_dataset

        loaded = [load_dataset(named.hub, named.config, split=one) for one in splits.values()]
    except ImportError as error:
        what = missing(f"The task {name!r} of the Hugging Face Hub", "datasets", "eval-hub")
        raise MissingExtraError(f"{what}, or {local}.") from error
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise place.error(f"it can't be loaded ({reason}); without a network, {local}.") from error
    for (part, split), rows in zip(splits.items(), loaded, strict=True):
        digest, lines, blank = hashlib.sha256(), [], 0
        for number, row in enumerate(rows, start=1):
            text, label = row.get(named.text), row.get(named.label)
            digest.update(json.dumps([text, label]).encode())
            if isinstance(text, str) and not text.strip():
                blank += 1
                continue
            at = place.at(f"split {split}, row {number}")
            if not isinstance(text, str) or label not in named.classes:
                raise at.error(f"{shown(text)} with {shown(label)} is not what it was; {local}.")
            lines.append((at, f"{split}/{number}", _Text(text=text.strip(), label=label)))
        stamp[part] = {"split": split, "blank": blank, "sha256": digest.hexdigest()}
        parts.append(lines)
    return _labelled(parts[0], parts[1], labels, named.classes, stamp)


def _labelled(
    train: _Lines,
    asked: _Lines,
    labels: Sequence[str] | None,
    classes: Sequence[int | str],
    stamp: dict[str, Any],
) -> Data:
    names = dict(zip(classes, labels or (), strict=False))
    known = tuple(labels or dict.fromkeys(str(line.label) for _, _, line in train or asked))
    if len(known) < 2:
        raise asked[0][0].error(f"all lines have the label {shown(known[0])}; two are needed.")
    items: tuple[list[Item], list[Item]] = ([], [])
    for lines, made in zip((train, asked), items, strict=True):
        for place, key, line in lines:
            label = names.get(line.label, str(line.label))
            if label not in known:
                raise place.error(
                    f"{shown(label)} is none of the labels {list(known)}; correct it, or name all "
                    "labels with --label."
                )
            made.append(Item(key, line.text, known, known.index(label), known))
    return Data(*items, known, stamp)


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
        test: str | None = None,
        template: str | None = None,
        labels: Sequence[str] | None = None,
        wording: str = "pcw",
        normalize: Normalize | None = None,
        choices_as: str = "text",
        seeds: Sequence[int] = (0,),
        windows: int | None = None,
        window_tokens: int | None = None,
        calibrate_with: Sequence[str] = (),
        texts: int | None = None,
    ) -> Self:
        """A task by its name, from the Hub or from local files, or by its file.

        The arguments are the command's options; ``texts`` is its --limit: so many are asked, drawn
        with the first seed.
        """
        demos, asked = (None if one is None else Path(one) for one in (demonstrations, test))
        if task in NAMED:
            if labels is not None:
                raise InputError(f"{task} has labels of its own; leave --label out.")
            if asked is None and demos is not None:
                raise InputError(f"The texts of {task} to ask are missing: give --test FILE.")
            text, label, words = WORDINGS[wording][task]
            between, separator = ("\n", "\n==\n") if wording == "pcw" else (" ", "\n")
            form = Template(f"{text}: {{text}}{between}{label}: {{label}}", "", separator)
            if asked is None:
                data = from_hub(task, words.split())
            else:
                data = from_files(asked, demos, words.split(), NAMED[task].classes)
        else:
            path = Path(task)
            if asked is not None:
                raise InputError("--test goes with a named task; name the file by --task alone.")
            if not path.suffix and not path.exists():
                known = ", ".join(sorted(NAMED))
                raise InputError(f"--task {task!r} is neither a file nor one of {known}.")
            data = from_files(path, demos, labels, by_letter=choices_as == "letters")
            form = Template() if data.labels else Template("{text}\nAnswer: {label}", "", "\n\n")
            task = path.stem
        if texts is not None and texts < len(data.test):
            chosen = random.Random(seeds[0]).sample(range(len(data.test)), texts)
            data = data._replace(test=[data.test[index] for index in sorted(chosen)])
        Sizes(windows, window_tokens)
        by_text = not data.labels and choices_as == "text"
        form = form if template is None else Template(template)
        settings = {
            "data": data.stamp,
            "kind": "classification" if data.labels else "multiple choice",
            "labels": list(data.labels),
            "template": asdict(form),
            "normalize": normalize or ("mean" if by_text else "sum"),
            # No command changes these two.
            "demonstrations": 32,
            "balanced": True,
            "seeds": list(seeds),
            "windows": windows,
            "window_tokens": window_tokens,
            "calibrate_with": list(calibrate_with),
            "choices_as": choices_as,
            "texts": texts,
            "baselines": baselines(data.test),
        }
        return cls(task, data, form, settings)

    @cached_property
    def examples(self) -> tuple[Example, ...]:
        """Each text once for each seed; all of one seed come first."""
        seeds, kinds = self.settings["seeds"], bool(self.data.labels)
        several = len(seeds) > 1
        return tuple(
            Example(
                key=f"{item.key}/seed {seed}" if several else item.key,
                messages=({"role": "user", "content": item.text},),
                references=(Reference(item.choices[item.answer]),),
                group=item.key,
                kinds=(item.choices[item.answer],) * kinds
                + (f"demonstrations of seed {seed}",) * several,
                passages=(),
                choices=item.choices,
                details={"seed": seed, "item": item},
            )
            for seed in seeds
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

    def shown(self, count: int | None, seed: int) -> list[Demonstration]:
        """So many demonstrations of a seed, in order."""
        there = self.data.demonstrations
        if count is None or count > len(there):
            raise InputError(
                f"{count} demonstrations are asked for, and {self.name} has {len(there)}: ask for "
                'fewer (--shots), mark lines with "split": "train", or give --demos FILE.'
            )
        order = drawn(there, seed, balanced=bool(self.data.labels))[:count]
        return [Demonstration(one.text, one.offered[one.answer]) for one in order]


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
    order = rng.sample(items, len(items))
    if not balanced:
        return order
    by_label: dict[str, list[Item]] = {}
    for item in order:
        by_label.setdefault(item.choices[item.answer], []).append(item)
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


def _seed_of(example: Example) -> int:
    return int(example.details["seed"])


@dataclass(frozen=True, slots=True)
class IclAnswerer:
    """Answers an `IclTask`, so many examples in an encoding, behind a system prompt or None."""

    task: IclTask
    prefix: str | None
    batch: int = 32

    def answer(self, lm: WindowedLM, arm: Arm, asked: Sequence[Asked]) -> list[Answered]:
        """Answer examples by one arm; the passages beside them count for nothing."""
        # Examples are in the order of their seeds.
        by_seed = groupby((one for one, _ in asked), key=_seed_of)
        return [one for seed, own in by_seed for one in self._judged(lm, arm, seed, list(own))]

    def _judged(
        self, lm: WindowedLM, arm: Arm, seed: int, examples: Sequence[Example]
    ) -> list[Answered]:
        task, settings = self.task, self.task.settings
        items: list[Item] = [one.details["item"] for one in examples]
        texts, neutral = [item.text for item in items], settings["calibrate_with"]
        kinds = {item.offered: None for item in items}
        labels = {offered: labels_for(lm.engine, task.template, offered) for offered in kinds}
        choices = [labels[item.offered] for item in items]
        demonstrations = task.shown(arm.top_k, seed)
        number, tokens = settings["windows"], settings["window_tokens"]

        def size(text: str) -> int:
            return len(lm.tokenizer(text, add_special_tokens=False)["input_ids"])

        longest = max(texts, key=size)

        def windows(count: int, sizes: Sizes) -> Shown:
            return Shown.of(
                lm.engine,
                [longest, *neutral],
                demonstrations[:count],
                choices,
                form=task.template,
                method=cast(Method, arm.method),
                prefix=self.prefix,
                sizes=sizes,
            )

        def filled(count: int) -> Shown:
            if number is not None or tokens is not None:
                return windows(count, Sizes(number and max(1, min(number, count)), tokens))
            # So many windows may be too few.
            with suppress(LimitError):
                return windows(count, Sizes(windows=max(1, min(USUAL, count // USUAL))))
            return windows(count, Sizes())

        def too_many(count: int) -> bool:
            return not filled(count).fits(longest, choices)

        kept = len(demonstrations)
        if too_many(kept):
            # Windows side by side always fit; one after the other, the first ones are read. Where
            # not even one of them fits, the engine says so.
            kept = max(1, bisect_left(range(kept), True, lo=1, key=too_many) - 1)
        read_in = filled(kept)
        begun = time.perf_counter()
        labelled, read = read_in.judge(texts, choices, settings["normalize"], neutral)
        seconds = (time.perf_counter() - begun) / len(items)
        passages = tuple(
            ReadPassage.of(
                Passage(text, f"window {number}"),
                spans=((0, len(text)),) if read_in.method.windowed else (),
            )
            for number, text in enumerate(read_in.windows, start=1)
        )
        made = []
        for number, (item, found) in enumerate(zip(items, labelled, strict=True)):
            # The first of a batch pays for what the others find.
            first = number == 0
            record = Record(
                key=examples[number].key,
                arm=arm.name,
                answer=item.choices[list(found.scores).index(found.label)],
                finish_reason="chosen",
                passages=passages,
                left_out=len(demonstrations) - kept,
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
            made.append(Answered(record, read_in.windows))
        return made
