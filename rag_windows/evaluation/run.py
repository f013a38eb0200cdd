"""A run: what it compares, its folder, and how it is asked so that it may stop at any time."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import quote

import pandas as pd
from pydantic import BaseModel

from rag_windows import Generation, Passage, PassageCache, WindowedLM
from rag_windows.cache.fingerprint import tokenizer_fingerprint
from rag_windows.calibration import ModelFingerprint
from rag_windows.errors import (
    DataError,
    InputError,
    LimitError,
    MissingExtraError,
    ModelError,
    RagWindowsError,
)
from rag_windows.evaluation.files import JsonLines, read, shown, write_whole
from rag_windows.evaluation.machine import lock_folder, surroundings
from rag_windows.evaluation.task import (
    STRICT,
    Example,
    Line,
    ReadPassage,
    Record,
    Speed,
    Task,
    digest_of,
    line_of,
)
from rag_windows.methods import Method, describe
from rag_windows.methods.registry import plain

BASE = "sequential"
"""The method that others are compared with, where it was run at the same depth."""

MANIFEST, RECORDS, PASSAGES = "manifest.json", "records.jsonl", "passages.jsonl"
SOURCE, SCORES, REPORTS = "source.json", "scores.json", ("report.html", "report.md")
PREDICTIONS, INDEX = "predictions", "index"


@dataclass(frozen=True, slots=True)
class Arm:
    """One column of a comparison: a method, as the user named it, with ``top_k`` passages at most.

    The method is None in a run that was read from its folder, ``top_k`` None for all passages that
    an example brings.
    """

    label: str
    method: Method | None = None
    top_k: int | None = None

    @property
    def name(self) -> str:
        """Unique in a run, such as "ape@20"."""
        return self.label if self.top_k is None else f"{self.label}@{self.top_k}"


def arms(methods: Sequence[tuple[str, Method]], depths: Sequence[int | None]) -> tuple[Arm, ...]:
    """Each method at each depth, in this order; none of them twice."""
    made = tuple(Arm(label, method, depth) for depth in depths for label, method in methods)
    names = [one.name for one in made]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{twice} stands twice among what is compared; name it once.")
    return made


def base_of(compared: Sequence[Arm], place: int) -> int:
    """Place of the arm that one is compared with: sequential at its depth, else the first arm."""
    depth = compared[place].top_k
    alike = (i for i, one in enumerate(compared) if one.label == BASE and one.top_k == depth)
    return next(alike, 0)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How every question is asked, of every arm; the seed matters to methods that draw."""

    prefix: str | None
    max_new_tokens: int
    seed: int = 0

    @classmethod
    def of(
        cls, task: Task, prefix: str | None = None, max_new_tokens: int | None = None, seed: int = 0
    ) -> RunOptions:
        """The task's own, but for what is given; a prefix of "" is none at all."""
        chosen = task.prefix if prefix is None else prefix
        return cls(chosen or None, max_new_tokens or task.max_new_tokens, seed)


class Manifest(BaseModel):
    """What a run is: a file of its folder.

    ``settings`` are all that the answers depend on; ``made_with`` are versions and machines, an
    entry for each change of them; ``keys`` are those of all examples in order.
    """

    model_config = STRICT

    format: Literal["rag-windows evaluation run"] = "rag-windows evaluation run"
    version: Literal[1] = 1
    settings: dict[str, Any]
    made_with: tuple[dict[str, str], ...]
    keys: tuple[str, ...]

    @classmethod
    def of(
        cls,
        lm: WindowedLM,
        task: Task,
        compared: Sequence[Arm],
        retriever: Mapping[str, Any],
        options: RunOptions,
    ) -> Manifest:
        """Of a run that is about to begin; ``retriever`` tells how passages are ranked."""
        keys = [example.key for example in task.examples]
        model = ModelFingerprint.of(lm.model)
        settings = {
            "task": {**task.settings, "name": task.name},
            "examples": {
                "count": len(keys),
                "sha256": hashlib.sha256(json.dumps(keys).encode()).hexdigest(),
            },
            "model": {
                "name": model.name,
                "sha256": model.fingerprint,
                "tokenizer": tokenizer_fingerprint(lm.tokenizer).hex(),
                "dtype": str(lm.model.dtype).removeprefix("torch."),
                "header": plain(lm.header),
                "max_window_tokens": lm.max_window_tokens,
                "template": {key: plain(one) for key, one in sorted(lm.template_kwargs.items())},
            },
            "arms": {
                arm.name: {"method": arm.method and describe(arm.method), "top_k": arm.top_k}
                for arm in compared
            },
            "retriever": retriever,
            **asdict(options),
        }
        # Through JSON, so that it equals what will be read back.
        made = {"settings": settings, "made_with": [surroundings()], "keys": keys}
        return cls.model_validate_json(json.dumps(made))

    @property
    def task(self) -> str:
        """Name of the task."""
        return str(self.settings["task"]["name"])

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The arms, in order; perhaps of methods that are not known here."""
        return tuple(
            Arm(name.removesuffix(f"@{one['top_k']}"), top_k=one["top_k"])
            for name, one in self.settings.get("arms", {}).items()
        )


def differences(there: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two settings; of files their digests count, and not their names."""
    old, new = (pd.json_normalize(one).to_dict("records")[0] for one in (there, now))
    return [
        f"{name} is {shown(old.get(name))} there and {shown(new.get(name))} now"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name) and not name.endswith(".file")
    ]


class _Text(BaseModel):
    """A line of passages.jsonl: a digest and its text."""

    text: str
    passage: str


class RunFolder:
    """What a run has kept: records, timings, and texts of passages by the digests they name."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self.texts: dict[str, str] = {}
        self._kept: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
        self._lines, self._passages = JsonLines(path / RECORDS), JsonLines(path / PASSAGES)
        arms = [arm.name for arm in manifest.arms]
        for place, found in self._lines.read(Line):
            if found.arm not in arms:
                raise place.error(f'"arm" is {shown(found.arm)}, which the manifest does not name.')
            self._kept[found.kind, found.arm][found.key] = found
        for place, one in self._passages.read(_Text):
            if one.text != digest_of(one.passage):
                raise place.error("the passage was changed; begin anew in another folder.")
            self.texts[one.text] = one.passage

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Read a run, also one that is being written; nothing is changed."""
        return cls(Path(path), read(Path(path) / MANIFEST).json(Manifest))

    @classmethod
    @contextmanager
    def begin(cls, folder: Path, manifest: Manifest, fresh: bool = False) -> Iterator[RunFolder]:
        """Go on with a run, or begin it; locks the folder.

        With ``fresh``, what an earlier run left here is removed; other files stay.
        """
        with lock_folder(folder):
            known = (folder / MANIFEST).is_file()
            if not known and (folder / RECORDS).exists():
                raise DataError(f"{folder} holds {RECORDS} but no {MANIFEST}; name another --out.")
            if known and fresh:
                _remove_run(folder)
            elif known:
                earlier = read(folder / MANIFEST).json(Manifest)
                if different := differences(earlier.settings, manifest.settings):
                    raise InputError(
                        f"{folder} holds a run of other settings: {'; '.join(different)}. Give "
                        "--fresh to remove it and begin anew, or name another folder with --out."
                    )
                if earlier.made_with[-1] == manifest.made_with[0]:
                    manifest = earlier
                else:
                    manifest.made_with = (*earlier.made_with, *manifest.made_with)
            write_whole(folder / MANIFEST, manifest.model_dump_json(indent=1) + "\n")
            made = cls(folder, manifest)
            made._lines.repair()
            made._passages.repair()
            yield made

    def records(self, arm: str) -> Mapping[str, Record]:
        """An arm's, by the keys of their examples; of several the last one counts."""
        return self._kept["record", arm]

    def speeds(self, arm: str) -> Mapping[str, Speed]:
        """Likewise."""
        return self._kept["speed", arm]

    def predictions(self, arm: str, suffix: str = ".json") -> Path:
        """Where an arm's answers stand in the dataset's own format."""
        return self.path / PREDICTIONS / f"{quote(arm, safe='@+=')}{suffix}"

    def add(self, values: Sequence[Record | Speed], texts: Iterable[str] = ()) -> None:
        """Keep answers and timings, with the passages that they name; they are safe afterwards."""
        new = {name: text for text in texts if (name := digest_of(text)) not in self.texts}
        self._passages.append(*({"text": key, "passage": one} for key, one in new.items()))
        self.texts |= new
        self._lines.append(*map(line_of, values))
        for value in values:
            self._kept[value.kind, value.arm][value.key] = value


def _remove_run(folder: Path) -> None:
    """Remove what a run has written, and nothing else."""
    shutil.rmtree(folder / PREDICTIONS, ignore_errors=True)
    shutil.rmtree(folder / INDEX, ignore_errors=True)
    # The manifest last, so that a removal that was stopped can be done again.
    for name in (RECORDS, PASSAGES, SOURCE, SCORES, *REPORTS, MANIFEST):
        (folder / name).unlink(missing_ok=True)


Asked = tuple[Example, Sequence[Passage]]
"""An example with its passages, best first, not more than the arm reads."""

Ranking = Callable[[Example], Sequence[Passage]]
Progress = Callable[[int, int], None]
"""Told how much is done, and of how much."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer's record, with the texts of the passages that it names."""

    record: Record
    texts: tuple[str, ...] = ()


class Answerer(Protocol):
    """How the examples of a task are answered."""

    @property
    def batch(self) -> int:
        """Examples that one call takes at most."""

    def answer(self, lm: WindowedLM, arm: Arm, asked: Sequence[Asked]) -> list[Answered]:
        """Answer some examples; an error of one alone is kept as its record."""


@dataclass(frozen=True, slots=True)
class Generating:
    """Writes answers freely, with the likeliest token each time."""

    options: RunOptions
    citations: bool = True

    batch = 1

    def answer(self, lm: WindowedLM, arm: Arm, asked: Sequence[Asked]) -> list[Answered]:
        """Answer each example by itself."""
        return [self._one(lm, arm, *one) for one in asked]

    def generate(
        self, lm: WindowedLM, arm: Arm, example: Example, passages: Sequence[Passage]
    ) -> Generation:
        """The answer over all of these passages."""
        return lm.generate(
            list(example.messages),
            passages,
            prefix=self.options.prefix,
            method=arm.method,
            max_new_tokens=self.options.max_new_tokens,
            citations=self.citations,
            seed=self.options.seed,
            do_sample=False,
            num_beams=1,
        )

    def _fitting(
        self, lm: WindowedLM, arm: Arm, example: Example, passages: Sequence[Passage]
    ) -> tuple[Generation, Sequence[Passage]]:
        """An answer over as many passages from the top as fit, and those passages.

        Methods that read passages side by side read all of them: to leave out those at the end
        would not help. A request that does not fit is refused before any work.
        """
        try:
            return self.generate(lm, arm, example, passages), passages
        except LimitError:
            shorter, method = passages[:-1], arm.method
            in_order = method and (not method.windowed or method.alignment == "in order")
            if not in_order or not any(one.text.strip() for one in shorter):
                raise
        return self._fitting(lm, arm, example, shorter)

    def _one(
        self, lm: WindowedLM, arm: Arm, example: Example, passages: Sequence[Passage]
    ) -> Answered:
        generation, read = self._fitting(lm, arm, example, passages)
        spans: list[list[tuple[int, int]]] = [[] for _ in read]
        for window in generation.windows:
            spans[window.passage].append((window.start, window.end))
        # Where attention was not measured, citations are there all the same, and empty.
        measured = generation.citations if generation.prefix_mass is not None else None
        masses = {one.passage: one.mass for one in measured or ()}
        usage, timings = generation.usage, generation.timings
        record = Record(
            key=example.key,
            arm=arm.name,
            answer=generation.text,
            finish_reason=generation.finish_reason,
            passages=tuple(
                ReadPassage.of(passage, masses.get(place), tuple(spans[place]))
                for place, passage in enumerate(read)
            ),
            left_out=len(passages) - len(read),
            prefix_mass=generation.prefix_mass,
            query_mass=generation.query_mass,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            windows_encoded=usage.windows - usage.cached_windows,
            windows_reused=usage.cached_windows,
            encode_s=timings.encode_s,
            ttft_s=timings.ttft_s,
            total_s=timings.total_s,
            notes=tuple(note.message for note in generation.notes),
        )
        return Answered(record, tuple(passage.text for passage in read))


def run(
    lm: WindowedLM,
    task: Task,
    arms: Sequence[Arm],
    ranking: Ranking,
    folder: RunFolder,
    *,
    answerer: Answerer,
    progress: Progress,
) -> list[Record]:
    """Answer what the folder lacks, and keep each answer as it comes; returns what has none.

    All arms answer an example before the next one is asked, so an arm finds in the model's cache
    what those before it encoded. An error of one question is kept as its record, and asked again by
    the next run. What concerns the whole run is raised, and all that was answered stays: a model or
    a package that can't be used, a full disk, memory that does not suffice, an interruption.
    """
    ranked = functools.cache(lambda place: ranking(task.examples[place]))

    def lacks(arm: Arm, place: int) -> bool:
        record = folder.records(arm.name).get(task.examples[place].key)
        return record is None or record.error is not None

    def ask(arm: Arm, places: Sequence[int]) -> None:
        try:
            asked = [(task.examples[place], ranked(place)[: arm.top_k]) for place in places]
            answers = answerer.answer(lm, arm, asked)
        except (ModelError, MissingExtraError):
            raise
        except RagWindowsError as error:
            if len(places) > 1:
                for place in places:
                    ask(arm, [place])
                return
            key = task.examples[places[0]].key
            answers = [Answered(Record(key, arm.name, "", error=str(error)))]
        texts = [text for answer in answers for text in answer.texts]
        folder.add([answer.record for answer in answers], texts)

    total = len(task.examples) * len(arms)
    every = range(len(task.examples))
    done = sum(not lacks(arm, place) for place in every for arm in arms)
    progress(done, total)
    for start in every[:: answerer.batch]:
        for arm in arms:
            block = every[start : start + answerer.batch]
            if lacking := [place for place in block if lacks(arm, place)]:
                ask(arm, lacking)
                done += len(lacking)
                progress(done, total)
        ranked.cache_clear()
    records = [folder.records(arm.name)[one.key] for arm in arms for one in task.examples]
    return [one for one in records if one.error is not None]


def measure_speed(
    lm: WindowedLM,
    task: Task,
    arms: Sequence[Arm],
    ranking: Ranking,
    folder: RunFolder,
    count: int,
    *,
    options: RunOptions,
    progress: Progress,
) -> None:
    """Time the first token of so many answered examples, evenly spaced, with every arm.

    One warm call comes before three rounds of a cold and a warm one, in turns the one first or the
    other, so that a machine that slows down is no advantage for either. The model's own cache is
    neither read nor filled, and what an earlier run measured stays.
    """
    asking = Generating(replace(options, max_new_tokens=1), citations=False)
    answered = [
        one
        for one in task.examples
        if all(folder.records(arm.name)[one.key].error is None for arm in arms)
    ]
    count = min(count, len(answered))
    for number in range(count):
        progress(number, count)
        example = answered[number * (len(answered) - 1) // max(1, count - 1)]
        with PassageCache(memory="4GiB") as cache:
            cold, warm = lm.with_cache(None), lm.with_cache(cache)
            for arm in arms:
                if example.key in folder.speeds(arm.name):
                    continue
                read = len(folder.records(arm.name)[example.key].passages)
                passages = ranking(example)[:read]
                bare = asking.generate(cold, arm, example, ())
                first = asking.generate(warm, arm, example, passages)
                seconds: dict[WindowedLM, list[float]] = {cold: [], warm: []}
                for one in (cold, warm, warm, cold, cold, warm):
                    found = asking.generate(one, arm, example, passages)
                    seconds[one].append(found.timings.ttft_s)
                tokens = first.usage.prompt_tokens - bare.usage.prompt_tokens
                timed = tuple(map(tuple, seconds.values()))
                folder.add([Speed(example.key, arm.name, tokens, *timed)])
