"""One run from a task and its arms to the figures, and reports of runs that are done."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from pydantic import BaseModel

from rag_windows.calibration import Profile
from rag_windows.cli import render
from rag_windows.cli.errors import EXIT_ERROR, tell
from rag_windows.cli.models import loaded_model
from rag_windows.cli.render import progress
from rag_windows.errors import DataError, InputError, MethodError, RagWindowsError
from rag_windows.evaluation import chatrag, icl, inscit, report
from rag_windows.evaluation import run as runs
from rag_windows.evaluation.files import read, write_whole
from rag_windows.evaluation.long import LongTask
from rag_windows.evaluation.metrics import check_packages
from rag_windows.evaluation.retrieval import Search
from rag_windows.evaluation.summary import Summary, as_json, dump, summarise
from rag_windows.evaluation.task import Task
from rag_windows.methods import linked, resolve
from rag_windows.methods.registry import names_in, parameters, with_parameters
from rag_windows.prompt.visible_text import encodable

if TYPE_CHECKING:
    from rag_windows.cli.evaluation.app import Asking

RUNS = Path("runs")
"""Where runs go if nobody says."""


class Source(BaseModel):
    """What a command was told about its data; kept in the run's folder, to report it again later.

    It is no part of the run's settings: a data file may lie elsewhere tomorrow.
    """

    kind: Literal["inscit", "chatrag", "icl", "long"]
    data: str | None
    limit: int | None
    options: dict[str, Any]
    command: str

    def task(self) -> Task:
        """Read the data; ``options`` are those of this kind's reader."""
        check_packages("matplotlib", "sacrebleu", "spacy", "tabulate")
        with progress("Reading the data"):
            if self.kind == "long":
                return LongTask.open(**self.options)
            if self.data is None:
                raise DataError("The run's data file is not known; name it with --data.")
            if self.kind == "icl":
                return icl.IclTask.open(self.data, texts=self.limit, **self.options)
            reader = inscit.InscitTask if self.kind == "inscit" else chatrag.ChatRagTask
            task = reader.read(self.data, **self.options)
        if self.limit is None or self.limit >= len(task.examples):
            return task
        settings = {**task.settings, "limit": self.limit}
        return replace(task, examples=task.examples[: self.limit], settings=settings)


def compared(
    methods: Sequence[str], depths: Sequence[int | None], asking: Asking
) -> tuple[runs.Arm, ...]:
    """Each method at each depth, with the numbers of the options for those that have them."""
    numbers = {"temperature": asking.rag_temperature, "scale": asking.rag_scale}
    numbers = {key: value for key, value in numbers.items() if value is not None}
    written = ",".join(methods)
    if "" in (names := names_in(written)):
        raise InputError(f"--methods {written!r} has an empty name; write sequential,ape.")
    chosen = [(name, resolve(name)) for name in names]
    if asking.profile is not None:
        found = Profile.load(asking.profile).method
        if numbers or found.name not in [method.name for _, method in chosen]:
            raise InputError(
                f"--profile holds numbers of {found.name}: name it among --methods, and leave "
                "--rag-temperature and --rag-scale out."
            )
        chosen = [
            (name, found if method.name == found.name and ":" not in name else method)
            for name, method in chosen
        ]
    for key in numbers:
        if not any(key in parameters(method) for _, method in chosen):
            raise MethodError(f"--rag-{key} is a parameter of none of --methods; leave it out.")
    made = []
    for name, method in chosen:
        free = {
            key: value
            for key, value in numbers.items()
            if f"{key}=" not in name and key in parameters(method)
        }
        made.append((name, linked(with_parameters(method, free), asking.link_tokens)))
    return runs.arms(made, depths)


def evaluate(
    asking: Asking,
    kind: Any,
    data: str | None,
    chosen: dict[str, Any],
    *,
    model: str,
    methods: Sequence[str],
    depths: Sequence[int | None],
    speed: int = 0,
    retriever: Any = "given",
    embedder: str | None = None,
) -> None:
    """Read the data, answer what is not answered yet, score, and show.

    ``chosen`` are the options of the data's kind. Errors in data or arguments come before any work;
    where the model fails, finished answers are kept.
    """
    arms = compared(methods, depths, asking)
    source = Source(kind=kind, data=data, limit=asking.limit, options=chosen, command=_command())
    task = source.task()
    _make_folder(asking.out or RUNS)
    if isinstance(task, icl.IclTask):
        for arm in arms:
            task.shown(arm.top_k)
    if missing := getattr(task, "unfound", 0):
        tell(f"Note: {missing} evidence passages are not in the corpus, so nothing finds them.")
    prefix = None if asking.system is None else encodable(asking.system)
    options = runs.RunOptions.of(task, prefix, asking.max_new_tokens, asking.seed)
    depth = None if kind in ("icl", "long") else max(one or 0 for one in depths)
    search = Search(retriever, depth, embedder)
    answerer: runs.Answerer = runs.Generating(options)
    if isinstance(task, icl.IclTask):
        answerer = icl.IclAnswerer(task, options.prefix)
    # The methods' numbers are the arms'.
    loaded = replace(asking, model=model, rag_temperature=None, rag_scale=None)
    with loaded_model(loaded) as lm:
        manifest = runs.Manifest.of(lm, task, arms, search.settings, options)
        path = asking.out or _default_folder(manifest, model)
        with _going_on(path), runs.RunFolder.begin(path, manifest, asking.fresh) as folder:
            write_whole(path / runs.SOURCE, source.model_dump_json(indent=2) + "\n")
            with progress("Embedding passages") as counted:
                ranking = search.over(task, path / runs.INDEX, counted)
            asked = (lm, task, arms, ranking, folder)
            with progress("Answering") as counted:
                failed = runs.run(*asked, answerer=answerer, progress=counted)
            if speed:
                with progress("Timing the first token") as counted:
                    runs.measure_speed(*asked, speed, options=options, progress=counted)
            with progress("Scoring"):
                summary = summarise(task, folder)
                write_whole(path / runs.SCORES, dump(summary))
                predictions = {arm.name: _predictions(folder, task, arm.name) for arm in arms}
                one = report.ReportedRun(task, folder, summary, source.command)
                reports = report.write_report([one], path)
    files: dict[str, Any] = {
        "folder": str(path),
        "scores": str(path / runs.SCORES),
        "predictions": {arm: str(one) for arm, one in predictions.items()},
        "report": [str(one) for one in reports],
    }
    if asking.json:
        render.write_json({**as_json(summary), "files": files})
    else:
        _show(summary, task, folder)
        render.show(f"Scores: {files['scores']}", "dim")
        render.show(f"Predictions: {', '.join(files['predictions'].values())}", "dim")
        render.show(f"Report: {', '.join(files['report'])}", "dim")
    if count := len(failed):
        first = failed[0]
        told = (
            "1 answer is missing and counts"
            if count == 1
            else f"{count} answers are missing and count"
        )
        tell(
            f"Error: {told} as empty, the first {first.key!r} of {first.arm}: {first.error} The "
            "same command asks again."
        )
        raise typer.Exit(EXIT_ERROR)


def report_again(folders: Sequence[Path], out: Path, data: str | None, *, json_only: bool) -> None:
    """Score runs again and write one report of them; the data may lie elsewhere now."""
    reported, told = [], []
    for path in folders:
        folder, source = runs.RunFolder.open(path), read(path / runs.SOURCE).json(Source)
        source.data = data or source.data
        task, settings = source.task(), folder.manifest.settings["task"]
        now = json.loads(json.dumps({"name": task.name, **task.settings}))
        keys = tuple(one.key for one in task.examples)
        if keys != folder.manifest.keys or _nameless(settings) != _nameless(now):
            raise DataError(
                f"{source.data} holds other data than the run of {folder.manifest.task} read; name "
                "the data file of that run with --data."
            )
        with progress("Scoring"):
            summary = summarise(task, folder)
        reported.append(report.ReportedRun(task, folder, summary, source.command))
        files: dict[str, Any] = {"scores": None, "predictions": {}, "report": []}
        told.append({**as_json(summary), "files": {"folder": str(path), **files}})
    with progress("Scoring"):
        paths = [str(one) for one in report.write_report(reported, out)]
    if json_only:
        render.write_json({"runs": told, "report": paths})
        return
    for one in reported:
        _show(one.summary, one.task, one.folder)
    render.show(f"Report: {', '.join(paths)}", "dim")


def _nameless(value: Any) -> Any:
    """Settings without the names of files, of which the digests tell enough."""
    if not isinstance(value, Mapping):
        return value
    return {
        key: _nameless(one) for key, one in value.items() if key != "file" or "sha256" not in value
    }


def _show(summary: Summary, task: Task, folder: runs.RunFolder) -> None:
    """The summary, and what a task tells beside: baselines, or figures of each cell of a sweep."""
    render.show(f"{report.terminal(summary)}\n")
    if isinstance(task, icl.IclTask):
        told = ", ".join(
            f"{name} {value:.1f}" for name, value in task.settings["baselines"].items()
        )
        render.show(f"Accuracy without reading, in percent: {told}.\n")


def _predictions(folder: runs.RunFolder, task: Task, arm: str) -> Path:
    """Write an arm's answers: INSCIT's own format; else a line each, empty where there is none."""
    records = folder.records(arm)
    if isinstance(task, inscit.InscitTask):
        path = folder.predictions(arm)
        inscit.write_predictions(path, task.examples, records, task.evidence)
        return path
    path = folder.predictions(arm, ".txt")
    found = [records.get(one.key) for one in task.examples]
    chatrag.write_answers(path, ["" if one is None else one.answer for one in found])
    return path


def _make_folder(path: Path) -> None:
    """Before the model is loaded, so that what can't be written fails early."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out '{path}' can't be made: {error.strerror}; name another."
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise InputError(f"--out '{path}' can't be written; name another folder.")


def _default_folder(manifest: runs.Manifest, model: str) -> Path:
    """Named by task and model, and by all settings: the same command finds it again."""
    text = json.dumps(manifest.settings, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{manifest.task}-{Path(model).name}").strip("-.")
    return RUNS / f"{words[:80]}-{digest}"


@contextmanager
def _going_on(path: Path) -> Iterator[None]:
    """Where a run stops before its end, tell that its answers are kept, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        tell(f"Stopped. Finished answers are kept in {path}; go on with: {_command()}")
        raise typer.Abort from None
    except RagWindowsError:
        tell(f"Finished answers are kept in {path}.")
        raise


def _command() -> str:
    return shlex.join(["rag-windows", *(word for word in sys.argv[1:] if word != "--fresh")])
