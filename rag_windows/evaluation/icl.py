"""In-context learning: texts to label, behind demonstrations in windows."""

from __future__ import annotations

import random
import time
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
from rag_windows.evaluation.task import Example, ReadPassage, Record, Reference, Score, digest_of
from rag_windows.icl import Classification, Template
from rag_windows.icl.classifier import Normalize
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
        shown = self.task.shown(arm.top_k)
        begun, before = time.perf_counter(), _misses(lm)
        found, kept = self._labelled(lm, arm, [example.question for example, _ in asked], shown)
        seconds = (time.perf_counter() - begun) / len(asked)
        # The prefix counts as one in the cache.
        encoded = min(_misses(lm) - before, found[0].windows)
        form = self.task.template
        text = form.separator.join(form.show(one) for one in shown[:kept])
        texts = [text] if kept else []
        made: list[Answered] = []
        for (example, _), label in zip(asked, found, strict=True):
            record = Record(
                key=example.key,
                arm=arm.name,
                answer=label.label,
                finish_reason="chosen",
                passages=tuple(ReadPassage(digest_of(one), "demonstrations") for one in texts),
                left_out=len(shown) - kept,
                # The first of a batch pays for what the others find.
                windows_encoded=encoded,
                windows_reused=label.windows - encoded,
                ttft_s=seconds,
                total_s=seconds,
                scores=label.scores,
                notes=tuple(note.message for note in label.notes),
            )
            made.append((record, texts))
            encoded = 0
        return made

    def _labelled(
        self, lm: WindowedLM, arm: Arm, texts: list[str], shown: Sequence[Demonstration]
    ) -> tuple[list[Classification], int]:
        """Labels of texts, and how many of the demonstrations were read.

        Those that are read one after the other are read as far as they fit, to a twentieth.
        """
        settings, kept = self.task.settings, len(shown)
        windows = settings["windows"] or max(1, min(USUAL, kept // USUAL))
        while True:
            try:
                found = lm.classify(
                    texts,
                    shown[:kept],
                    self.task.labels,
                    template=self.task.template,
                    method=arm.method,
                    prefix=self.prefix,
                    normalize=settings["normalize"],
                    calibrate_with=settings["calibrate_with"],
                    windows=windows and max(1, min(windows, kept)),
                )
            except LimitError:
                if windows and not settings["windows"]:
                    # So many windows may be too few.
                    windows = None
                elif in_order(cast(Method, arm.method)) and kept > 1:
                    kept -= max(1, kept // 20)
                else:
                    raise
            else:
                return found, kept


def _misses(lm: WindowedLM) -> int:
    """How many windows the model has encoded so far."""
    return 0 if lm.cache is None else lm.cache.stats().misses
