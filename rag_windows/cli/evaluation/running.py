"""One run from a task and its arms to the figures, and reports of runs that are done."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import typer
from pydantic import BaseModel

from rag_windows.calibration import Profile
from rag_windows.cli import render
from rag_windows.cli.options import RayOptions, SearchOptions, fleet_options, loaded_model
from rag_windows.cli.render import EXIT_ERROR, progress, tell
from rag_windows.errors import DataError, InputError, RagWindowsError
from rag_windows.evaluation import chatrag, icl, inscit, report
from rag_windows.evaluation import run as runs
from rag_windows.evaluation.files import read, write_whole
from rag_windows.evaluation.long import LongTask
from rag_windows.evaluation.summary import as_json, summarise
from rag_windows.evaluation.task import Task
from rag_windows.methods import resolve
from rag_windows.methods.registry import names_in

if TYPE_CHECKING:
    from rag_windows import WindowedLM
    from rag_windows.cli.evaluation.app import Asking


class Source(BaseModel):
    """What a command was told about its data; no setting of the run, as files may move."""

    kind: Literal["inscit", "chatrag", "icl", "long"]
    data: str | None
    limit: int | None
    options: dict[str, Any]
    command: str

    def task(self) -> Task:
        """Read the data; ``options`` are those of this kind's reader."""
        with progress("Reading the data"):
            if self.kind == "long":
                return LongTask.open(**self.options)
            if self.kind == "icl":
                return icl.IclTask.open(str(self.data), texts=self.limit, **self.options)
            reader = inscit.InscitTask if self.kind == "inscit" else chatrag.ChatRagTask
            task = reader.read(str(self.data), **self.options)
        if self.limit is None or self.limit >= len(task.examples):
            return task
        settings = {**task.settings, "limit": self.limit}
        return replace(task, examples=task.examples[: self.limit], settings=settings)


def compared(asking: Asking, depths: Sequence[int | None]) -> tuple[runs.Arm, ...]:
    """Each method at each depth, with the profile's numbers for those of its name without any."""
    names = names_in(asking.methods)
    chosen = [(name, resolve(name)) for name in names]
    if asking.profile is not None:
        found = Profile.load(asking.profile).method
        if found.name not in names:
            raise InputError(
                f"--profile holds numbers of the method {found.name}. Add this method to --methods."
            )
        chosen = [(name, found if name == found.name else method) for name, method in chosen]
    return runs.arms(chosen, depths)


@contextmanager
def _models(
    asking: Asking, over: RayOptions, answerer: runs.Answerer
) -> Iterator[tuple[runs.Described, runs.Asking]]:
    """What the model is, and what asks it: here, or in the processes of a cluster."""
    if not over.wanted:
        with loaded_model(asking) as lm:
            yield runs.Described.of(lm), runs.asking_one(lm, answerer)
        return
    made = fleet_options(SearchOptions(), asking, cache_memory=asking.cache_memory, **over.size)
    from rag_windows.fleet import data
    from rag_windows.fleet.cluster import cluster

    with cluster(over.ray, made.replicas, made.cpus_per_replica):
        models = data.Models(made)
        with progress(f"Loading {asking.name}"):
            first, *others = models.each(runs.Described.of)
        if different := [one for one in others if one.settings != first.settings]:
            told = "; ".join(runs.differences(first.settings, different[0].settings))
            raise InputError(
                f"The machines of the cluster have different models: {told}. Give all of them the "
                "same files."
            )
        yield first, functools.partial(models.map, functools.partial(_answered, answerer))


def _answered(
    answerer: runs.Answerer, lm: WindowedLM, block: runs.Block
) -> list[Sequence[runs.Answered]]:
    return list(runs.answers(lm, answerer, block))


def evaluate(
    asking: Asking,
    over: RayOptions,
    kind: Any,
    data: str | None,
    arms_read: Sequence[int | None],
    searching: dict[str, Any],
    **chosen: Any,
) -> None:
    """Answer what is not answered yet, score and show; ``chosen`` are those of the data."""
    arms = compared(asking, arms_read)
    source = Source(kind=kind, data=data, limit=asking.limit, options=chosen, command=_command())
    task, search = source.task(), runs.Search(**searching)
    if missing := getattr(task, "unfound", 0):
        tell(
            f"Note: {missing} evidence passages are not in the corpus, so no retriever "
            "can find them."
        )
    generating = runs.Generating.of(task, asking.system, asking.max_new_tokens, asking.seed)
    answerer, batch = generating.answer, 1
    if isinstance(task, icl.IclTask):
        for arm in arms:
            task.shown(arm.top_k)
        answerer, batch = functools.partial(task.answer, generating.prefix), icl.BATCH
    if asking.out is not None:  # told before gigabytes are loaded
        with runs.locked(asking.out):
            pass
    with _models(asking, over, answerer) as (model, ask):
        manifest = runs.Manifest.of(model, task, arms, search.settings, generating)
        path = asking.out or _default_folder(manifest, asking.name)
        with runs.RunFolder.begin(path, manifest, asking.fresh) as folder, _going_on(path):
            write_whole(path / runs.SOURCE, source.model_dump_json(indent=2) + "\n")
            with progress("Embedding passages") as counted:
                ranking = search.over(task, path / runs.INDEX, counted)
            with progress("Answering") as counted:
                run = runs.Run(task, arms, ranking, folder, ask, batch)
                failed = run.answer(counted)
            with progress("Scoring"):
                summary = summarise(task, folder)
                write_whole(path / runs.SCORES, json.dumps(as_json(summary), indent=1) + "\n")
                predictions = [_predictions(folder, task, arm.name) for arm in arms]
                one = report.ReportedRun(task, folder, summary, source.command)
                reports = report.write_report([one], path)
    files: dict[str, Any] = {
        "folder": str(path),
        "scores": str(path / runs.SCORES),
        "predictions": {arm.name: str(one) for arm, one in zip(arms, predictions, strict=True)},
        "report": [str(one) for one in reports],
    }
    if asking.json:
        render.write_json({**as_json(summary), "files": files})
    else:
        render.show(f"{report.terminal(summary)}\n")
        render.show(f"Scores, predictions and report: {path}", "dim")
    if failed:
        first = failed[0]
        tell(
            f"Error: Missing answers, which count as empty: {len(failed)}, the first "
            f"{first.key!r} with {first.arm}: {first.error} Run the same command again to ask for "
            "what is missing."
        )
        raise typer.Exit(EXIT_ERROR)


def report_again(folders: Sequence[Path], out: Path, data: str | None, *, json_alone: bool) -> None:
    """Score runs again and write one report of them; the data may lie elsewhere now."""
    reported = []
    for path in folders:
        folder, source = runs.RunFolder.open(path), read(path / runs.SOURCE).json(Source)
        source.data = data or source.data
        task, manifest = source.task(), folder.manifest
        now = json.loads(json.dumps({"name": task.name, **task.settings}))
        keys = tuple(one.key for one in task.examples)
        if keys != manifest.keys or runs.differences(manifest.settings["task"], now):
            raise DataError(
                f"The run in {path} used other data than {source.data or 'these'}. Name its data "
                "file with --data."
            )
        summary = summarise(task, folder)
        reported.append(report.ReportedRun(task, folder, summary, source.command))
    with progress("Scoring"):
        paths = [str(one) for one in report.write_report(reported, out)]
    if json_alone:
        nothing: dict[str, Any] = {"scores": None, "predictions": {}, "report": []}
        pairs = zip(reported, folders, strict=True)
        told = [
            {**as_json(one.summary), "files": {"folder": str(path), **nothing}}
            for one, path in pairs
        ]
        render.write_json({"runs": told, "report": paths})
        return
    for one in reported:
        render.show(f"{report.terminal(one.summary)}\n")
    render.show(f"Report: {', '.join(paths)}", "dim")


def _predictions(folder: runs.RunFolder, task: Task, arm: str) -> Path:
    """Write an arm's answers: INSCIT's own format, else a line each."""
    path = folder.path / runs.PREDICTIONS / quote(arm, safe="@+=")
    records = folder.records[arm]
    if isinstance(task, inscit.InscitTask):
        path = path.with_name(f"{path.name}.json")
        inscit.write_predictions(path, task.examples, records, task.settings["evidence"])
    else:
        path = path.with_name(f"{path.name}.txt")
        chatrag.write_answers(path, [records[one.key].answer for one in task.examples])
    return path


def _default_folder(manifest: runs.Manifest, model: str) -> Path:
    """Named by task and model, and by all settings: the same command finds it again."""
    text = json.dumps(manifest.settings, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    named = f"{manifest.settings['task']['name']}-{Path(model).name}"
    words = re.sub(r"[^A-Za-z0-9.]+", "-", named).strip("-.")
    return Path("runs") / f"{words[:80]}-{digest}"


@contextmanager
def _going_on(path: Path) -> Iterator[None]:
    """Where a run stops before its end, tell that its answers are kept, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        tell(f"Stopped. Finished answers are kept in {path}. Continue with: {_command()}")
        raise typer.Abort from None
    except RagWindowsError:
        tell(f"Finished answers are kept in {path}.")
        raise


def _command() -> str:
    return shlex.join(["rag-windows", *(word for word in sys.argv[1:] if word != "--fresh")])
