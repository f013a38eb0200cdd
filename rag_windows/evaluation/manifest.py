"""The settings that a run's answers depend on, kept beside them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rag_windows import WindowedLM
from rag_windows.cache.tokenizer_print import tokenizer_fingerprint
from rag_windows.calibration import ModelFingerprint
from rag_windows.evaluation.arm import Arm
from rag_windows.evaluation.data.fields import Place, entries, field, record_of, shown, strings
from rag_windows.evaluation.data.reading import read
from rag_windows.evaluation.data.strict_json import parse
from rag_windows.evaluation.data.writing import write_whole
from rag_windows.evaluation.machine import surroundings
from rag_windows.evaluation.options import RunOptions
from rag_windows.evaluation.shard import Shard
from rag_windows.evaluation.task import Task
from rag_windows.methods import describe
from rag_windows.methods.registry import plain

FORMAT = "rag-windows evaluation run"
VERSION = 1
_UNSET = object()


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a run is.

    Attributes:
        settings: what the answers depend on, as JSON: "task", "examples", "model", "arms",
            "retriever", "prefix", "max_new_tokens", "seed", "citations", "stop", "shard". A run
            goes on only with equal ones.
        keys: of all examples of the task in order, those of other shards too.
        made_with: versions and machines, one entry for each change of them in the run's course.
    """

    settings: Mapping[str, Any]
    keys: tuple[str, ...]
    made_with: tuple[Mapping[str, str], ...]

    @classmethod
    def of(
        cls,
        lm: WindowedLM,
        task: Task,
        arms: Sequence[Arm],
        retriever: Mapping[str, Any],
        options: RunOptions,
        shard: Shard | None = None,
    ) -> Manifest:
        """Of a run that is about to begin.

        Args:
            lm: the model.
            task: brings the examples.
            arms: what is compared.
            retriever: settings of what ranks the passages, as JSON.
            options: how is asked.
            shard: the part of the examples that is asked.
        """
        keys = tuple(example.key for example in task.examples)
        settings = {
            "task": {**task.settings, "name": task.name},
            "examples": {"count": len(keys), "sha256": _digest(json.dumps(keys).encode())},
            "model": _model(lm),
            "arms": {
                arm.name: {"method": describe(arm.method), "top_k": arm.top_k} for arm in arms
            },
            "retriever": retriever,
            "prefix": options.prefix,
            "max_new_tokens": options.max_new_tokens,
            "seed": options.seed,
            "citations": options.citations,
            "stop": list(options.stop),
            "shard": None if shard is None else str(shard),
        }
        # Through JSON, so that it equals what will be read back.
        plainly = parse(json.dumps(settings), Place("The run's settings"))
        return cls(plainly, keys, (surroundings(),))

    @property
    def task(self) -> str:
        """Name of the task."""
        return str(self.settings["task"]["name"])

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the arms, in order."""
        return tuple(self.settings["arms"])

    @property
    def shard(self) -> Shard | None:
        """The part of the examples that is asked; None for all."""
        text = self.settings["shard"]
        return None if text is None else Shard.parse(text)

    def differences(
        self,
        other: Manifest,
        leaving: Sequence[str] = (),
        here: str = "here",
        there: str = "there",
    ) -> list[str]:
        """Settings in which another manifest differs, "name is this here and that there" each.

        Args:
            other: to compare with.
            leaving: top-level settings that may differ.
            here: how this one is called.
            there: how the other one is.
        """
        own, others = (
            dict(_flat({k: v for k, v in one.settings.items() if k not in leaving}))
            for one in (self, other)
        )
        return [
            f"{name} is {_told(own.get(name, _UNSET))} {here} and "
            f"{_told(others.get(name, _UNSET))} {there}"
            for name in dict.fromkeys([*own, *others])
            if own.get(name, _UNSET) != others.get(name, _UNSET)
        ]

    def going_on(self, with_: Mapping[str, str]) -> Manifest:
        """The same run under these versions, on this machine."""
        if self.made_with and dict(with_) == dict(self.made_with[-1]):
            return self
        return replace(self, made_with=(*self.made_with, dict(with_)))

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "settings": self.settings,
            "made_with": list(self.made_with),
            "keys": list(self.keys),
        }

    def write(self, path: Path) -> None:
        """Write it as a file.

        Raises:
            DataError: it can't be written.
        """
        write_whole(path, json.dumps(self.as_dict(), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read what `write` wrote.

        Raises:
            DataError: it is something else, or of another version.
        """
        source = read(path)
        data, place = source.json(), source.place
        if field(data, "format", str, place) != FORMAT:
            raise place.error("this is no manifest of an evaluation; name a run's folder.")
        if (version := field(data, "version", int, place)) != VERSION:
            raise place.error(
                f"it has version {version} and this rag-windows reads version {VERSION}; use the "
                "rag-windows that wrote it."
            )
        settings = field(data, "settings", dict, place)
        field(field(settings, "task", dict, place), "name", str, place)
        field(settings, "arms", dict, place)
        if settings.get("shard") is not None:
            Shard.parse(field(settings, "shard", str, place))
        made = [record_of(one, where) for where, one in entries(data, "made_with", "entry", place)]
        return cls({"shard": None, **settings}, tuple(strings(data, "keys", place)), tuple(made))


def _model(lm: WindowedLM) -> dict[str, Any]:
    stamp = ModelFingerprint.of(lm.model)
    return {
        "name": stamp.name,
        "sha256": stamp.fingerprint,
        "tokenizer": tokenizer_fingerprint(lm.tokenizer).hex(),
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "header": plain(lm.header),
        "max_window_tokens": lm.max_window_tokens,
        "template": {name: plain(value) for name, value in sorted(lm.template_kwargs.items())},
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every single setting by its dotted name; an empty object stands for itself."""
    if isinstance(value, Mapping) and value:
        for key, entry in value.items():
            yield from _flat(entry, f"{name}.{key}" if name else key)
    else:
        yield name, value


def _told(value: Any) -> str:
    return "not set" if value is _UNSET else shown(value)
