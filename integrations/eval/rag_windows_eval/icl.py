"""In-context learning: texts to label, behind demonstrations in windows."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, StringConstraints

from rag_windows import Demonstration, WindowedLM
from rag_windows.errors import DataError, InputError, LimitError
from rag_windows.icl import Classification, Template
from rag_windows_eval.files import Name, read, shown
from rag_windows_eval.run import Answered, Asked, Condition, as_far_as_fits
from rag_windows_eval.task import (
    AnswerRecord,
    MetricScore,
    ReadPassage,
    Reference,
    Task,
    TaskExample,
    digest_of,
)

BATCH = 32
"""Number of texts that are answered with one encoding."""

USUAL = 8
"""Default number of windows at most, and of demonstrations that each of them gets at least."""


class Text(BaseModel):
    """A line of a task's file."""

    id: Name | None = None
    split: Literal["train", "test"] | None = None
    text: Annotated[str, StringConstraints(pattern=r"\S")]
    label: Annotated[Name, StringConstraints(pattern=r"\S")]


def from_files(
    test: Path, demonstrations: Path | None
) -> tuple[list[Demonstration], list[TaskExample], list[str], dict[str, Any]]:
    """Demonstrations, examples, labels, and the names and digests of the files for a manifest.

    One file, whose lines name their split, or two. Labels are the demonstrations'.
    """
    train, asked, stamp = list[Demonstration](), list[TaskExample](), {}
    for part, path in (("demonstrations", demonstrations), ("test", test)):
        if path is None:
            continue
        source, taken = read(path), set[str]()
        stamp[part] = source.stamp
        for number, (place, line) in enumerate(source.records(Text), start=1):
            key = str(number) if line.id is None else line.id
            if key in taken:
                raise DataError(f'{place}: the "id" {shown(key)} appears twice. Change one.')
            taken.add(key)
            if (line.split or part) == "test":
                messages = ({"role": "user", "content": line.text},)
                asked.append(
                    TaskExample(key, messages, (Reference(line.label),), key, (line.label,))
                )
            else:
                train.append(Demonstration(line.text, line.label))
    if not asked:
        raise DataError(
            f'{test}: no line has "split": "test", so there is nothing to ask. Mark the '
            "lines to ask with it."
        )
    given, right = [one.label for one in train], [one.references[0].text for one in asked]
    known = list(dict.fromkeys(given or right))
    strange = {*given, *right} - set(known)
    if len(known) < 2 or strange:
        raise DataError(
            f"{test}: {shown(sorted(strange) or known[0])} stands beside the labels {known}; there "
            "must be two at least, and a demonstration of each."
        )
    return train, asked, known, stamp


@dataclass(frozen=True, kw_only=True)
class IclTask(Task):
    """Texts to label, behind demonstrations in windows.

    A condition's `top_k` is its number of demonstrations; 0 shows none, which is the blind baseline
    of the model itself. More demonstrations begin with the fewer ones of another condition.
    Examples bring no passages: the task has the demonstrations.
    """

    demonstrations: Sequence[Demonstration]
    template: Template
    max_new_tokens: int = 1

    @classmethod
    def open(
        cls,
        task: str,
        *,
        demonstrations: str | None = None,
        seed: int = 0,
        windows: int | None = None,
        calibrate_with: Sequence[str] = (),
        texts: int | None = None,
    ) -> Self:
        """Open a file of a task; the arguments are the command's options.

        ``texts`` is its --limit: so many are asked, drawn with the seed.
        """
        demos = Path(demonstrations) if demonstrations else None
        train, asked, known, stamp = from_files(Path(task), demos)
        if texts is not None and texts < len(asked):
            chosen = random.Random(seed).sample(range(len(asked)), texts)
            asked = [asked[place] for place in sorted(chosen)]
        form = Template()
        counts = Counter(one.references[0].text for one in asked)
        settings = {
            "data": stamp,
            "labels": known,
            "template": asdict(form),
            "seeds": [seed],
            "windows": windows,
            "calibrate_with": list(calibrate_with),
            "texts": texts,
            # In percent, of two readers that see no text: one guesses, one always says the same.
            "baselines": {
                "chance": round(100 / len(known), 2),
                "majority": round(100 * max(counts.values()) / len(asked), 2),
            },
        }
        return cls(
            name=Path(task).stem,
            examples=asked,
            settings=settings,
            demonstrations=drawn(train, seed),
            template=form,
        )

    def scores(
        self, examples: Sequence[TaskExample], records: Sequence[AnswerRecord]
    ) -> list[MetricScore]:
        """Whether labels are right."""
        pairs = zip(examples, records, strict=True)
        right = [100.0 * (record.answer == one.references[0].text) for one, record in pairs]
        return [MetricScore.mean("accuracy", right)]

    def shown(self, count: int | None) -> Sequence[Demonstration]:
        """The first ``count`` demonstrations."""
        if count is None or count > len(self.demonstrations):
            raise InputError(
                f"{count} demonstrations are asked for, and {self.name} has "
                f"{len(self.demonstrations)}: ask for fewer (--shots), mark lines with "
                '"split": "train", or give --demos FILE.'
            )
        return self.demonstrations[:count]

    def answer(
        self, prefix: str | None, lm: WindowedLM, condition: Condition, asked: Sequence[Asked]
    ) -> list[Answered]:
        """Answer examples by one condition; their passages are ignored."""
        texts = [example.question for example, _ in asked]
        settings, demonstrations = self.settings, self.shown(condition.top_k)

        def label(some: Sequence[Demonstration], windows: int | None) -> list[Classification]:
            return lm.classify(
                texts,
                some,
                settings["labels"],
                template=self.template,
                method=condition.method,
                prefix=prefix,
                calibrate_with=settings["calibrate_with"],
                windows=windows,
            )

        def ask(some: Sequence[Demonstration]) -> list[Classification]:
            windows = settings["windows"] or min(USUAL, len(some) // USUAL)
            try:
                return label(some, max(1, min(windows, len(some))))
            except LimitError:
                if settings["windows"]:
                    raise
                # As few windows as hold them.
                return label(some, None)

        begun, before = time.perf_counter(), _misses(lm)
        found, read = as_far_as_fits(condition, demonstrations, ask)
        seconds = (time.perf_counter() - begun) / len(asked)
        # The prefix counts as one in the cache.
        encoded = min(_misses(lm) - before, found[0].windows)
        named = [self.template.separator.join(map(self.template.show, read))] if read else []
        made: list[Answered] = []
        for (example, _), one in zip(asked, found, strict=True):
            record = AnswerRecord(
                key=example.key,
                arm=condition.name,
                answer=one.label,
                finish_reason="chosen",
                passages=tuple(ReadPassage(digest_of(text), "demonstrations") for text in named),
                left_out=len(demonstrations) - len(read),
                # The first text of a batch counts the encoded windows, the others find them cached.
                windows_encoded=encoded,
                windows_reused=one.windows - encoded,
                ttft_s=seconds,
                total_s=seconds,
                scores=one.scores,
                notes=tuple(note.message for note in one.notes),
            )
            made.append((record, named))
            encoded = 0
        return made


def _misses(lm: WindowedLM) -> int:
    """How many windows the model has encoded so far."""
    return 0 if lm.cache is None else lm.cache.stats().misses


def drawn(texts: Sequence[Demonstration], seed: int) -> list[Demonstration]:
    """All texts in the order in which they are shown.

    They come in rounds of one text a label, in an order drawn anew for each round, until the
    labels run out one by one.
    """
    rng = random.Random(seed)
    by_label: dict[str, list[Demonstration]] = {}
    for one in rng.sample(texts, len(texts)):
        by_label.setdefault(one.label, []).append(one)
    made: list[Demonstration] = []
    # Not in the order of the draw, so that every label leads as often as another.
    for row in zip_longest(*(by_label[label] for label in sorted(by_label))):
        found = [one for one in row if one is not None]
        made += rng.sample(found, len(found))
    return made
