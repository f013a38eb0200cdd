"""A run: what it compares, the settings that its answers depend on, and its folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from filelock import FileLock
from pydantic import BaseModel, field_validator

from rag_windows.cache.fingerprint import tokenizer_fingerprint
from rag_windows.calibration import ModelFingerprint
from rag_windows.errors import DataError, InputError
from rag_windows.evaluation.files import (
    JsonLines,
    Place,
    parse,
    read,
    safe_name,
    shown,
    validated,
    write_whole,
)
from rag_windows.evaluation.machine import lock_folder, surroundings
from rag_windows.evaluation.record import STRICT, Record, Speed, digest_of, line_of, read_line
from rag_windows.evaluation.task import Task
from rag_windows.methods import Method, describe
from rag_windows.methods.registry import plain
from rag_windows.model import WindowedLM

BASE = "sequential"
"""The method that others are compared with, where it was run at the same depth."""

MANIFEST, RECORDS, PASSAGES, SOURCE = (
    *("manifest.json", "records.jsonl", "passages.jsonl", "source.json"),
)
SCORES, REPORTS, PREDICTIONS, INDEX = (
    *("scores.json", ("report.html", "report.md"), "predictions", "index"),
)
_SUFFIXES = (".json", ".txt")
_VECTORS = "dense.safetensors"


@dataclass(frozen=True, slots=True)
class Arm:
    """One column of a comparison.

    Attributes:
        label: the method as it was named by the user, such as "deep-thinking+ape".
        method: itself; None in a run that was read from its folder.
        top_k: how many passages it reads at most; None for all that an example brings.
    """

    label: str
    method: Method | None = None
    top_k: int | None = None

    @property
    def name(self) -> str:
        """Unique in a run, such as "ape@20"."""
        return self.label if self.top_k is None else f"{self.label}@{self.top_k}"


def arms(methods: Sequence[tuple[str, Method]], depths: Sequence[int | None]) -> tuple[Arm, ...]:
    """Each method at each depth, in this order.

    Raises:
        InputError: there is none, or one of them twice.
    """
    made = tuple(Arm(label, method, depth) for depth in depths for label, method in methods)
    if not made:
        raise InputError("Nothing to compare: name at least one method and one number of passages.")
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
    """How every question is asked, of every arm.

    Attributes:
        prefix: the instruction before the passages; None for none.
        max_new_tokens: length of an answer at most.
        seed: of a private generator for each answer. Answers are greedy, so it matters only to
            methods that draw.
    """

    prefix: str | None
    max_new_tokens: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}.")

    @classmethod
    def of(
        cls, task: Task, prefix: str | None = None, max_new_tokens: int | None = None, seed: int = 0
    ) -> RunOptions:
        """The task's own, but for what is given; a prefix of "" is none at all."""
        chosen = task.prefix if prefix is None else prefix
        tokens = task.max_new_tokens if max_new_tokens is None else max_new_tokens
        return cls(chosen or None, tokens, seed)


class Manifest(BaseModel):
    """What a run is.

    Attributes:
        format: what the file is.
        version: of this form.
        settings: what the answers depend on: "task", "examples", "model", "arms", "retriever",
            "prefix", "max_new_tokens" and "seed". A run goes on only with equal ones.
        made_with: versions and machines, one entry for each change of them in the run's course.
        keys: of all examples of the task in order.
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
        stamp = ModelFingerprint.of(lm.model)
        settings = {
            "task": {**task.settings, "name": task.name},
            "examples": {
                "count": len(keys),
                "sha256": hashlib.sha256(json.dumps(keys).encode()).hexdigest(),
            },
            "model": {
                "name": stamp.name,
                "sha256": stamp.fingerprint,
                "tokenizer": tokenizer_fingerprint(lm.tokenizer).hex(),
                "dtype": str(lm.model.dtype).removeprefix("torch."),
                "header": plain(lm.header),
                "max_window_tokens": lm.max_window_tokens,
                "template": {
                    key: plain(value) for key, value in sorted(lm.template_kwargs.items())
                },
            },
            "arms": {
                arm.name: {
                    "method": None if arm.method is None else describe(arm.method),
                    "top_k": arm.top_k,
                }
                for arm in compared
            },
            "retriever": retriever,
            "prefix": options.prefix,
            "max_new_tokens": options.max_new_tokens,
            "seed": options.seed,
        }
        made = {"settings": settings, "made_with": [surroundings()], "keys": keys}
        place = Place("The run's settings")
        # Through JSON, so that it equals what will be read back.
        return validated(cls, parse(json.dumps(made), place), place)

    @field_validator("settings")
    @classmethod
    def _known(cls, value: dict[str, Any]) -> dict[str, Any]:
        task, compared = value.get("task"), value.get("arms")
        if not isinstance(task, dict) or not isinstance(task.get("name"), str):
            raise ValueError('"task" must be an object with a "name"')
        if not isinstance(compared, dict) or not all(
            isinstance(one, dict) and isinstance(one.get("top_k"), int | None)
            for one in compared.values()
        ):
            raise ValueError('"arms" must be an object with a "top_k" for each arm')
        return value

    @property
    def task(self) -> str:
        """Name of the task."""
        return str(self.settings["task"]["name"])

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The arms, in order; perhaps of methods that are not known here."""
        return tuple(
            Arm(name.removesuffix(f"@{one['top_k']}"), top_k=one["top_k"])
            for name, one in self.settings["arms"].items()
        )

    def differences(self, other: Manifest) -> list[str]:
        """Settings in which another manifest differs, "name is this there and that now" each."""
        own, others = (dict(_flat(one.settings)) for one in (self, other))
        return [
            f"{name} is {_told(own, name)} there and {_told(others, name)} now"
            for name in dict.fromkeys([*own, *others])
            if own.get(name) != others.get(name)
        ]

    def write(self, path: Path) -> None:
        """Write it as a file.

        Raises:
            DataError: it can't be written.
        """
        write_whole(path, json.dumps(self.model_dump(), indent=1) + "\n")


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every single setting by its dotted name; an empty object stands for itself."""
    if isinstance(value, Mapping) and value:
        for key, entry in value.items():
            yield from _flat(entry, f"{name}.{key}" if name else key)
    else:
        yield name, value


def _told(settings: Mapping[str, Any], name: str) -> str:
    return shown(settings[name]) if name in settings else "not set"


class RunFolder:
    """What a run has kept; made by `open` or `begin`.

    Attributes:
        path: of the folder.
        manifest: what the run is.
        notes: what the user should be told about what was found.
        texts: the passages, by the digests that records name.
    """

    def __init__(self, path: Path, manifest: Manifest, lock: FileLock | None = None) -> None:
        self.path = path
        self.manifest = manifest
        self.notes: tuple[str, ...] = ()
        self.texts: dict[str, str] = {}
        self._lock = lock
        self._records: dict[str, dict[str, Record]] = {arm.name: {} for arm in manifest.arms}
        self._speeds: dict[str, dict[str, Speed]] = {arm.name: {} for arm in manifest.arms}
        self._record_lines = JsonLines(path / RECORDS)
        self._passage_lines = JsonLines(path / PASSAGES)
        for place, line in self._record_lines:
            found = read_line(line, place)
            if found.arm not in self._records:
                raise place.error(f'"arm" is {found.arm!r}, which the manifest does not name.')
            self._remember(found)
        for place, line in self._passage_lines:
            text = validated(_Text, line, place)
            if text.text != digest_of(text.passage):
                raise place.error(
                    "the passage is not the one whose digest stands in 'text'; the file was "
                    "changed. Begin anew in another folder."
                )
            self.texts[text.text] = text.passage
        for lines in (self._record_lines, self._passage_lines):
            if lines.torn:
                self._tell(
                    f"{lines.path}: the last line has no end and was dropped ({lines.torn} bytes); "
                    "the run was stopped while it wrote."
                )

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Read a run, also one that is being written; nothing is changed.

        Raises:
            DataError: there is none, or a file holds something else; names file and line.
        """
        folder = Path(path)
        if not (folder / MANIFEST).is_file():
            raise DataError(f"{folder} holds no {MANIFEST}, so it is no run's folder.")
        return cls(folder, read(folder / MANIFEST).json(Manifest))

    @classmethod
    def begin(cls, path: str | Path, manifest: Manifest, fresh: bool = False) -> RunFolder:
        """Go on with a run, or begin it; the folder is locked until `close`.

        Args:
            path: of the folder, which is made if it is missing.
            manifest: what the run is.
            fresh: whether what an earlier run left here is removed; other files stay.

        Raises:
            InputError: another process writes it, or it holds a run of other settings; names each
                setting that differs.
            DataError: it can't be read or written, or holds such files and no manifest.
        """
        folder = Path(path)
        lock = lock_folder(folder)
        try:
            return cls._begun(folder, manifest, fresh, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _begun(cls, folder: Path, manifest: Manifest, fresh: bool, lock: FileLock) -> RunFolder:
        if not (folder / MANIFEST).is_file():
            ours = (RECORDS, PASSAGES, SOURCE, SCORES, *REPORTS, PREDICTIONS, INDEX)
            if stray := next((name for name in ours if (folder / name).exists()), None):
                raise DataError(
                    f"{folder} holds {stray} but no {MANIFEST}, so it is not known what run that "
                    "is of; name another folder with --out."
                )
            manifest.write(folder / MANIFEST)
            return cls(folder, manifest, lock)
        earlier = read(folder / MANIFEST).json(Manifest)
        if fresh:
            _remove_run(folder, earlier.arms)
            manifest.write(folder / MANIFEST)
            return cls(folder, manifest, lock)
        if different := earlier.differences(manifest):
            raise InputError(
                f"{folder} holds a run of other settings: {'; '.join(different)}. Give --fresh to "
                "remove it and begin anew, or name another folder with --out."
            )
        before, now = (earlier.made_with or ({},))[-1], surroundings()
        changed = [
            f"{name} {before.get(name, 'unknown')}, now {value}"
            for name, value in now.items()
            if before.get(name) != value
        ]
        if changed:
            earlier = earlier.model_copy(update={"made_with": (*earlier.made_with, now)})
            earlier.write(folder / MANIFEST)
        made = cls(folder, earlier, lock)
        for lines in (made._record_lines, made._passage_lines):
            lines.repair()
        if changed:
            made._tell(f"{folder}: earlier answers were made with {'; '.join(changed)}.")
        return made

    def records(self, arm: str) -> Mapping[str, Record]:
        """An arm's records by the keys of their examples; of several the last one counts."""
        return self._records[arm]

    def speeds(self, arm: str) -> Mapping[str, Speed]:
        """An arm's timings by the keys of their examples."""
        return self._speeds[arm]

    def predictions(self, arm: str, suffix: str = ".json") -> Path:
        """Where an arm's answers stand in the dataset's own format."""
        return _predictions(self.path, arm, suffix)

    def add(self, values: Iterable[Record | Speed], texts: Iterable[str] = ()) -> None:
        """Keep answers and timings, with the passages that they name; they are safe afterwards.

        Raises:
            DataError: they can't be written, or the folder was only opened to be read.
        """
        if self._lock is None:
            raise DataError(f"{self.path} is open for reading only.")
        kept = list(values)
        new = {name: text for text in texts if (name := digest_of(text)) not in self.texts}
        self._passage_lines.append(*({"text": key, "passage": one} for key, one in new.items()))
        self.texts |= new
        self._record_lines.append(*map(line_of, kept))
        for value in kept:
            self._remember(value)

    def close(self) -> None:
        """Let others write; again does nothing."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _remember(self, value: Record | Speed) -> None:
        if isinstance(value, Record):
            self._records[value.arm][value.key] = value
        else:
            self._speeds[value.arm][value.key] = value

    def _tell(self, note: str) -> None:
        self.notes = (*self.notes, note)


@dataclass(frozen=True, slots=True)
class _Text:
    """A line of passages.jsonl: a digest and its text."""

    __pydantic_config__ = STRICT

    text: str
    passage: str


def _predictions(folder: Path, arm: str, suffix: str) -> Path:
    return folder / PREDICTIONS / f"{safe_name(arm)}{suffix}"


def _remove_run(folder: Path, compared: Sequence[Arm]) -> None:
    """Remove what a run of these arms has written, and nothing else.

    Raises:
        DataError: a file can't be removed.
    """
    own = [folder / name for name in (SCORES, *REPORTS, RECORDS, PASSAGES, SOURCE)]
    own += [_predictions(folder, arm.name, suffix) for arm in compared for suffix in _SUFFIXES]
    predictions, index = folder / PREDICTIONS, folder / INDEX
    try:
        for path in own:
            path.unlink(missing_ok=True)
        if predictions.is_dir() and not any(predictions.iterdir()):
            predictions.rmdir()
        # A folder of this name that holds no index is somebody else's.
        if not index.is_symlink() and (index / _VECTORS).is_file():
            shutil.rmtree(index)
        # Last, so that a removal that was stopped can be done again.
        (folder / MANIFEST).unlink()
    except OSError as error:
        raise DataError(f"{error.filename} can't be removed: {error.strerror}.") from error
