"""One run out of its shards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rag_windows.errors import DataError, InputError
from rag_windows.evaluation.data.fields import several
from rag_windows.evaluation.data.reading import read
from rag_windows.evaluation.data.writing import write_whole
from rag_windows.evaluation.folder import RunFolder
from rag_windows.evaluation.folder_files import SOURCE
from rag_windows.evaluation.manifest import Manifest
from rag_windows.evaluation.record import Record, Speed

_BLOCK = 256
"""Records that are written at once."""


def merge(out: Path, folders: Sequence[Path], *, allow_missing: bool = False) -> tuple[str, ...]:
    """Put the shards of a run together, in the order of the task's examples.

    Merged again into the same folder, more shards fill in what it lacks.

    Args:
        out: of the merged run; made if it is missing.
        folders: of the shards, in any order.
        allow_missing: whether a shard may be missing or unfinished; a run with the same settings
            and without ``--shard`` then asks what is left.

    Returns:
        What the user should be told, such as what is missing.

    Raises:
        InputError: the folders are of different runs, or no shards, or some are missing.
        DataError: a folder can't be read, or two of them answer a question differently.
    """
    runs = _opened(out, folders)
    whole = _whole_of([run.manifest for run in runs])
    told = [note for run in runs for note in run.notes]
    missing = _missing(runs, whole)
    if missing and not allow_missing:
        raise InputError(
            f"{' '.join(missing)} Finish them and merge again, or give --allow-missing to merge "
            "what is there."
        )
    with RunFolder.begin(out, whole) as merged:
        sources = [merged, *runs]
        for arm in whole.arms:
            _check_records(sources, arm)
        lacking = [
            (source, value)
            for key in whole.keys
            for arm in whole.arms
            for source, value in _lacking(merged, runs, arm, key)
        ]
        for start in range(0, len(lacking), _BLOCK):
            block = lacking[start : start + _BLOCK]
            texts = [
                source.text(passage.text)
                for source, value in block
                if isinstance(value, Record)
                for passage in value.passages
            ]
            merged.add([value for _, value in block], texts)
        told += merged.notes
        failed = sum(
            record.error is not None
            for arm in whole.arms
            for record in merged.records(arm).values()
        )
    source = runs[0].path / SOURCE
    if source.is_file():
        write_whole(out / SOURCE, read(source).text)
    if failed:
        told.append(f"{failed} questions have an error instead of an answer.")
    return (*told, *missing)


def _opened(out: Path, folders: Sequence[Path]) -> list[RunFolder]:
    places = [os.path.realpath(folder) for folder in folders]
    if not folders:
        raise InputError("Nothing to merge: name the folders of the shards.")
    if os.path.realpath(out) in places:
        raise InputError(f"{out} can't be merged into itself; name another folder with --out.")
    if len(set(places)) < len(places):
        raise InputError("A folder is named twice; name each shard once.")
    return [RunFolder.open(folder) for folder in folders]


def _whole_of(manifests: Sequence[Manifest]) -> Manifest:
    """The manifest of the run that these are shards of."""
    first = manifests[0]
    for one in manifests:
        names = f"in {first.shard}", f"in {one.shard}"
        if different := first.differences(one, ["shard"], *names):
            raise InputError(
                f"These shards are of runs with different settings: {'; '.join(different)}. Run "
                "one of them again."
            )
        if one.shard is None or first.shard is None or one.shard.count != first.shard.count:
            raise InputError(
                f"Shards of one run are needed, and these are {first.shard or 'a whole run'} and "
                f"{one.shard or 'a whole run'}."
            )
    made = [with_ for one in manifests for with_ in one.made_with]
    different_ones = [one for number, one in enumerate(made) if one not in made[:number]]
    settings = {**first.settings, "shard": None}
    return replace(first, settings=settings, made_with=tuple(different_ones))


def _missing(runs: Sequence[RunFolder], whole: Manifest) -> list[str]:
    """What is not there: shards, and answers of those that are, in sentences."""
    shards = [run.manifest.shard for run in runs]
    count = next(shard.count for shard in shards if shard is not None)
    there = {shard.number for shard in shards if shard is not None}
    lacking = [f"{number}/{count}" for number in range(1, count + 1) if number not in there]
    if lacking:
        return [f"Missing: shard{'s' * (len(lacking) > 1)} {several(lacking)}."]
    told = []
    for arm in whole.arms:
        answered = {key for run in runs for key in run.records(arm)}
        if unanswered := [key for key in whole.keys if key not in answered]:
            told.append(f"{arm} lacks {len(unanswered)} answers, such as to {unanswered[0]!r}.")
    return told


def _check_records(sources: Sequence[RunFolder], arm: str) -> None:
    """Refuse answers that contradict each other."""
    known: dict[str, tuple[RunFolder, Record]] = {}
    for source in sources:
        for key, record in source.records(arm).items():
            if record.error is not None:
                continue
            other, earlier = known.setdefault(key, (source, record))
            if earlier.answer != record.answer:
                raise DataError(
                    f"{other.path} and {source.path} answer {key!r} differently with {arm}; leave "
                    "one of them out."
                )


def _lacking(
    merged: RunFolder, runs: Sequence[RunFolder], arm: str, key: str
) -> list[tuple[RunFolder, Record | Speed]]:
    """What the merged run has not of an example, each with the run that has it."""
    found: list[tuple[RunFolder, Record | Speed]] = []
    here = merged.records(arm).get(key)
    if here is None or here.error is not None:
        there = [(run, run.records(arm)[key]) for run in runs if key in run.records(arm)]
        # An answer rather than an error.
        there.sort(key=lambda pair: pair[1].error is not None)
        found += there[:1] if here is None or any(one.error is None for _, one in there) else []
    if key not in merged.speeds(arm):
        found += [(run, run.speeds(arm)[key]) for run in runs if key in run.speeds(arm)][:1]
    return found
