"""Classification and multiple choice, learnt from demonstrations in windows."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from rag_windows.errors import InputError
from rag_windows.evaluation.example import Example, Reference
from rag_windows.evaluation.icl import hub, lines
from rag_windows.evaluation.icl.answerer import IclAnswerer
from rag_windows.evaluation.icl.item import MOST_LETTERS, Item, Items, letters, rendered
from rag_windows.evaluation.icl.named import NAMED, worded
from rag_windows.evaluation.icl.options import IclOptions
from rag_windows.evaluation.icl.sampling import drawn
from rag_windows.evaluation.icl.scoring import baselines, macro_f1
from rag_windows.evaluation.record import Record
from rag_windows.evaluation.scores.exact import accuracy
from rag_windows.evaluation.task import Score
from rag_windows.icl import Demonstration, Template
from rag_windows.icl.classifier import Normalize
from rag_windows.passage import Passage

_CHOICE = Template("{text}\nAnswer: {label}", separator="\n\n")


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
        self._orders: dict[int, list[Item]] = {}
        if items.kind == "multiple choice" and options.choices_as == "letters":
            long = next((one for one in items.test if len(one.choices) > MOST_LETTERS), None)
            if long is not None:
                raise InputError(
                    f"The question {long.key!r} has {len(long.choices)} choices, more than there "
                    "are letters; use choices_as='text'."
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
            task: one of `NAMED`, or a file; see `lines.load`.
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
            template = options.template or words.template
            if test is None and demonstrations is None:
                return cls(task, hub.load(task, words), template, options)
            if test is None:
                raise InputError(f"The texts of {task} to ask are missing: give --test FILE.")
            read = lines.load(test, demonstrations, name=task, worded=words)
            return cls(task, read, template, options)
        path = Path(task)
        if not path.suffix and not path.exists():
            raise InputError(
                f"--task {task!r} is neither a file nor one of {', '.join(sorted(NAMED))}."
            )
        if test is not None:
            raise InputError("--test goes with a named task; name the file by --task alone.")
        read = lines.load(path, demonstrations, labels=options.labels)
        default = _CHOICE if read.kind == "multiple choice" else Template()
        return cls(path.stem, read, options.template or default, options)

    @cached_property
    def examples(self) -> tuple[Example, ...]:
        """Each text once for each seed; all of one seed come first."""
        asked = self._asked()
        several = len(self.options.seeds) > 1
        made = []
        for seed in self.options.seeds:
            for item in asked:
                kinds: tuple[str, ...] = (
                    (item.label,) if self.items.kind == "classification" else ()
                )
                if several:
                    kinds += (f"demonstrations of seed {seed}",)
                made.append(
                    Example(
                        key=f"{item.key}/seed {seed}" if several else item.key,
                        messages=({"role": "user", "content": self.text_of(item)},),
                        references=(Reference(item.label),),
                        group=item.key,
                        kinds=tuple(kinds),
                        passages=(),
                        choices=item.choices,
                        details={"seed": seed, "item": item.key},
                    )
                )
        return tuple(made)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Digests of the data, the template, labels, options, and what blind readers get."""
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
            **self.options.settings,
            "baselines": self.baselines,
        }

    @property
    def baselines(self) -> dict[str, float]:
        """Accuracies to beat, in percent; see `scoring.baselines`."""
        return baselines(self.examples)

    @property
    def normalize(self) -> Normalize:
        """As asked for, or what suits the task."""
        by_text = self.items.kind == "multiple choice" and self.options.choices_as == "text"
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
        """What answers this task's examples.

        Args:
            prefix: system prompt; blank for none.
            batch: texts that share an encoding and a pass.
        """
        return IclAnswerer(self, prefix or None, batch)

    def check(self, depths: Sequence[int | None]) -> None:
        """Refuse numbers of demonstrations that the data can't serve.

        Raises:
            InputError: there are fewer, or an arm's number is negative.
        """
        for depth in depths:
            self.shown(depth, self.options.seeds[0])

    def shown(self, count: int | None, seed: int) -> list[Demonstration]:
        """The demonstrations of a seed, in order.

        Args:
            count: how many; None for the options' number.
            seed: one of the options' seeds.

        Raises:
            InputError: see `check`.
        """
        count = self.options.demonstrations if count is None else count
        there = len(self.items.demonstrations)
        if not 0 <= count <= there:
            hint = (
                'Mark lines with "split": "train", or give --demos FILE.'
                if not there
                else "Ask for fewer, or give more."
            )
            raise InputError(
                f"{count} demonstrations are asked for, and {self.name} has {there}. {hint}"
            )
        if seed not in self._orders:
            balanced = self.options.balanced and bool(self.items.labels)
            self._orders[seed] = drawn(self.items.demonstrations, seed, balanced=balanced)
        return [
            Demonstration(self.text_of(one), self.choices_of(one)[one.answer])
            for one in self._orders[seed][:count]
        ]

    def text_of(self, item: Item) -> str:
        """What stands for ``{text}`` in the template."""
        if self.items.kind == "classification":
            return item.text
        return rendered(item, self.options.choices_as)

    def choices_of(self, item: Item) -> tuple[str, ...]:
        """What the model chooses from, in the order of the item's choices."""
        by_letter = self.items.kind == "multiple choice" and self.options.choices_as == "letters"
        return letters(len(item.choices)) if by_letter else item.choices

    @cached_property
    def asked(self) -> Mapping[str, Item]:
        """The items that are asked, by their keys."""
        return {one.key: one for one in self._asked()}

    def _asked(self) -> list[Item]:
        test, most = self.items.test, self.options.texts
        if most is None or most >= len(test):
            return list(test)
        rng = random.Random(self.options.seeds[0])
        return [test[index] for index in sorted(rng.sample(range(len(test)), most))]
