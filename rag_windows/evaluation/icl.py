"""In-context learning: texts to label, behind demonstrations in windows."""

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
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, BeforeValidator, StringConstraints

from rag_windows import Demonstration, WindowedLM
from rag_windows.errors import InputError, LimitError
from rag_windows.evaluation.files import Place, read, shown
from rag_windows.evaluation.run import Answered, Arm, Asked
from rag_windows.evaluation.task import (
    Example,
    ReadPassage,
    Record,
    Reference,
    Score,
    digest_of,
)
from rag_windows.icl import Template
from rag_windows.icl.classifier import Classifier, Labels, Normalize
from rag_windows.methods import Method
from rag_windows.request import in_order

USUAL = 8
"""So many windows are filled where nobody says how many, if each gets so many demonstrations."""


class Text(BaseModel):
    """A line of a task's file."""

    id: str | int | None = None
    split: Literal["train", "test"] | None = None
    text: Annotated[str, StringConstraints(pattern=r"\S")]
    label: Annotated[
        str,
        BeforeValidator(lambda one: str(one) if type(one) is int else one),
        StringConstraints(pattern=r"\S"),
    ]


def from_files(
    test: Path, demonstrations: Path | None, labels: Sequence[str] | None
) -> tuple[list[Text], dict[str, Text], tuple[str, ...], dict[str, Any]]:
    """What may be shown, what is asked by its key, the labels, and what a manifest keeps of it.

    One file, whose lines name their split, or two. Labels are by default those that are shown.
    """
    train: list[Text] = []
    asked: dict[str, Text] = {}
    stamp = {}
    for part, path in (("demonstrations", demonstrations), ("test", test)):
        if path is None:
            continue
        source, taken = read(path), set[str]()
        stamp[part] = source.stamp
        for number, (place, line) in enumerate(source.records(Text), start=1):
            key = str(number if line.id is None else line.id)
            if key in taken:
                raise place.error(f'the "id" {shown(key)} stands twice.')
            taken.add(key)
            if (line.split or part) == "test":
                asked[key] = line
            else:
                train.append(line)
    if not asked:
        raise Place(str(test)).error('no line has "split": "test", so there is nothing to ask.')
    known = list(labels or dict.fromkeys(one.label for one in train or asked.values()))
    strange = {one.label for one in (*train, *asked.values())} - set(known)
    if len(known) < 2 or strange:
        raise Place(str(test)).error(
            f"{shown(sorted(strange) or known[0])} stands beside the labels {known}; there must be "
            "two at least, and no others: name all of them with --label."
        )
    return train, asked, tuple(known), stamp


@dataclass(frozen=True)
class IclTask:
    """Texts to label, behind demonstrations in windows.

    An arm's `top_k` is its number of demonstrations; 0 shows none, which is the blind baseline of
    the model itself. Those of a deeper arm begin with those of a shallower one. Examples bring no
    passages: `IclAnswerer` knows the demonstrations.
    """

    name: str
    demonstrations: Sequence[Demonstration]
    texts: Mapping[str, Text]
    labels: tuple[str, ...]
    template: Template
    settings: Mapping[str, Any]

    prefix: None = None
    max_new_tokens: int = 1
    metrics: tuple[str, ...] = ("accuracy",)

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
        calibrate_with: Sequence[str] = (),
        texts: int | None = None,
        **earlier: object,
    ) -> Self:
        """A task of a file; the arguments are the command's options.

        ``texts`` is its --limit: so many are asked, drawn with the seed. ``earlier`` are options
        that older runs noted; where they changed what was asked, the settings are others, too.
        """
        demos = Path(demonstrations) if demonstrations else None
        train, asked, known, stamp = from_files(Path(task), demos, labels)
        if texts is not None and texts < len(asked):
            chosen = random.Random(seed).sample(range(len(asked)), texts)
            asked = {key: one for at, (key, one) in enumerate(asked.items()) if at in chosen}
        form = Template() if template is None else Template(template)
        counts = Counter(one.label for one in asked.values())
        settings = {
            "data": stamp,
            "labels": list(known),
            "template": asdict(form),
            "normalize": normalize or "sum",
            "seeds": [seed],
            "windows": windows,
            "calibrate_with": list(calibrate_with),
            "texts": texts,
            # In percent, of two readers that see no text: one guesses, one always says the same.
            "baselines": {
                "chance": round(100 / len(known), 2),
                "majority": round(100 * max(counts.values()) / len(asked), 2),
            },
            # No command changes these.
            "kind": "classification",
            "window_tokens": None,
            "demonstrations": 32,
            "balanced": True,
            "choices_as": "text",
        }
        return cls(Path(task).stem, drawn(train, seed), asked, known, form, settings)

    @cached_property
    def examples(self) -> tuple[Example, ...]:
        """One a text, in the order of the file."""
        return tuple(
            Example(
                key=key,
                messages=({"role": "user", "content": one.text},),
                references=(Reference(one.label),),
                group=key,
                kinds=(one.label,),
                passages=(),
            )
            for key, one in self.texts.items()
        )

    def scores(self, examples: Sequence[Example], records: Sequence[Record]) -> list[Score]:
        """Score one arm's records, one an example in the same order."""
        pairs = zip(examples, records, strict=True)
        right = [100.0 * (record.answer == one.references[0].text) for one, record in pairs]
        return [Score.mean("accuracy", right)]

    def shown(self, count: int | None) -> Sequence[Demonstration]:
        """So many demonstrations, in order."""
        if count is None or count > len(self.demonstrations):
            raise InputError(
                f"{count} demonstrations are asked for, and {self.name} has "
                f"{len(self.demonstrations)}: ask for fewer (--shots), mark lines with "
                '"split": "train", or give --demos FILE.'
            )
        return self.demonstrations[:count]


def drawn(texts: Sequence[Text], seed: int) -> list[Demonstration]:
    """All texts in the order in which they are shown: the first n make n demonstrations.

    They come in rounds of one text a label, in an order drawn anew for each round, until the
    labels run out one by one.
    """
    rng = random.Random(seed)
    by_label: dict[str, list[Text]] = {}
    for one in rng.sample(texts, len(texts)):
        by_label.setdefault(one.label, []).append(one)
    made: list[Demonstration] = []
    # Not in the order of the draw, so that every label leads as often as another.
    for row in zip_longest(*(by_label[label] for label in sorted(by_label))):
        found = [Demonstration(one.text, one.label) for one in row if one is not None]
        made += rng.sample(found, len(found))
    return made


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
        known, settings = classifier.labels(self.task.labels), self.task.settings
        texts = [example.question for example, _ in asked]
        demonstrations = self.task.shown(arm.top_k)
        windows, left_out = self._windows(classifier, demonstrations, texts, known)
        begun = time.perf_counter()
        found, reading = classifier.judge(
            windows, texts, known, settings["normalize"], settings["calibrate_with"]
        )
        seconds = (time.perf_counter() - begun) / len(asked)
        passages = tuple(
            ReadPassage(
                digest_of(text),
                f"window {number}",
                spans=((0, len(text)),) if classifier.method.windowed else (),
            )
            for number, text in enumerate(windows, start=1)
        )
        context, parts = reading.context, reading.parts
        context_tokens = len(parts.prefix_ids) + sum(len(one.ids) for one in parts.windows)
        made: list[Answered] = []
        for number, label in enumerate(found):
            # The first of a batch pays for what the others find.
            first = number == 0
            encoded = context.encoded_windows if first else 0
            record = Record(
                key=asked[number][0].key,
                arm=arm.name,
                answer=label.label,
                finish_reason="chosen",
                passages=passages,
                left_out=left_out,
                prompt_tokens=context_tokens + reading.query_tokens[number],
                cached_tokens=context.cached_tokens if first else context_tokens,
                windows_encoded=encoded,
                windows_reused=context.cached_windows + context.encoded_windows - encoded,
                encode_s=reading.encode_s / len(asked),
                ttft_s=seconds,
                total_s=seconds,
                scores=label.scores,
                notes=tuple(note.message for note in label.notes),
            )
            made.append((record, windows))
        return made

    def _windows(
        self,
        classifier: Classifier,
        demonstrations: Sequence[Demonstration],
        texts: Sequence[str],
        known: Labels,
    ) -> tuple[list[str], int]:
        """Windows of demonstrations, and how many of these are left out.

        Windows side by side always fit; one after the other, the first ones are read. Where not
        even one of them fits, the engine says so.
        """
        settings, longest = self.task.settings, max(texts, key=len)
        number = settings["windows"]

        def packed(count: int) -> list[str]:
            given = ([*texts, *settings["calibrate_with"]], demonstrations[:count], known)
            if number is not None:
                return classifier.pack(*given, max(1, min(number, count)))
            try:
                return classifier.pack(*given, max(1, min(USUAL, count // USUAL)))
            except LimitError:
                # So many windows are too few.
                return classifier.pack(*given)

        def too_many(count: int) -> bool:
            return not classifier.fits(packed(count), longest, known)

        kept = len(demonstrations)
        if in_order(classifier.method) and too_many(kept):
            kept = max(1, bisect_left(range(kept), True, lo=1, key=too_many) - 1)
        return packed(kept), len(demonstrations) - kept
