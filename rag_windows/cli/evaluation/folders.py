"""Runs that are done: their shards joined, their figures made again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_windows.cli import render
from rag_windows.cli.errors import tell
from rag_windows.cli.evaluation.finishing import Finished, finish, told_beside
from rag_windows.cli.evaluation.showing import as_object, show
from rag_windows.cli.evaluation.source import Source, check_packages
from rag_windows.cli.progress import Progress
from rag_windows.errors import DataError
from rag_windows.prompt.visible_text import visible

if TYPE_CHECKING:
    from rag_windows.evaluation.manifest import Manifest
    from rag_windows.evaluation.task import Task


def merge(
    out: Path, folders: Sequence[Path], data: Path | None, *, allow_missing: bool, as_json: bool
) -> None:
    """Join shards into one folder, score it and show the figures.

    Raises:
        InputError, DataError: shards that do not belong together, or a file that can't be read;
            the shards' folders stay as they are.
    """
    from rag_windows.evaluation.folder import RunFolder
    from rag_windows.evaluation.folder_files import MANIFEST
    from rag_windows.evaluation.manifest import Manifest
    from rag_windows.evaluation.merging import merge as join

    source = Source.load(folders[0]).moved(data)
    check_packages(source.kind)
    task = source.task()
    check_same(task, Manifest.read(folders[0] / MANIFEST), source)
    notes = join(out, folders, allow_missing=allow_missing)
    source.save(out)
    folder = RunFolder.open(out)
    for note in (*notes, *folder.notes):
        tell(f"Note: {note}")
    with Progress().waiting("Scoring"):
        finished = finish(task, source, folder)
    show(finished, as_json=as_json)


def report(folders: Sequence[Path], out: Path | None, data: Path | None, *, as_json: bool) -> None:
    """Score runs again and write one report of them.

    Raises:
        DataError: a folder or its data can't be read.
    """
    from rag_windows.evaluation.folder import RunFolder
    from rag_windows.evaluation.report import reported, write_report
    from rag_windows.evaluation.summary_making import summarise

    read = []
    for path in folders:
        source = Source.load(path).moved(data)
        check_packages(source.kind)
        folder = RunFolder.open(path)
        for note in folder.notes:
            tell(f"Note: {note}")
        task = source.task()
        check_same(task, folder.manifest, source)
        read.append((task, source, folder))
    with Progress().waiting("Scoring"):
        finished = [
            Finished(summarise(task, folder), folder.path, beside=tuple(told_beside(task, folder)))
            for task, _, folder in read
        ]
        runs = [
            reported(task, folder, done.summary, command=source.command)
            for (task, source, folder), done in zip(read, finished, strict=True)
        ]
        paths = write_report(runs, folders[0] if out is None else out)
    if as_json:
        runs_told = [as_object(one) for one in finished]
        render.write_json({"runs": runs_told, "report": [str(path) for path in paths]})
        return
    for one in finished:
        show(one, as_json=False)
    told = ", ".join(map(str, paths))
    render.console().print(f"Report: {visible(told)}", style="dim", soft_wrap=True)


def check_same(task: Task, manifest: Manifest, source: Source) -> None:
    """Refuse data that are not those which the run read, whatever the file's name is now.

    Raises:
        DataError: they differ.
    """
    keys = tuple(one.key for one in task.examples)
    kept = _nameless(manifest.settings["task"])
    now = _nameless(json.loads(json.dumps({"name": task.name, **task.settings})))
    if keys != manifest.keys or kept != now:
        raise DataError(
            f"{source.data} holds other data than the run of {manifest.task} read; name the data "
            "file of that run with --data."
        )


def _nameless(value: Any) -> Any:
    """Settings without the names of files, of which the digests tell enough."""
    if not isinstance(value, Mapping):
        return value
    named = {"file"} if "sha256" in value else set()
    return {key: _nameless(one) for key, one in value.items() if key not in named}
