"""One run from a task and its conditions to the figures, and reports of finished runs."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import typer
from pydantic import BaseModel

from rag_windows import cli
from rag_windows.calibration import Profile
from rag_windows.cli import (
    EXIT_ERROR,
    RayOptions,
    SearchOptions,
    fleet_options,
    loaded_model,
    progress,
    tell,
)
from rag_windows.errors import DataError, InputError, RagWindowsError
from rag_windows.methods import METHODS, names_in, resolve
from rag_windows_eval import chatrag, citing, icl, inscit, report
from rag_windows_eval import run as runs
from rag_windows_eval.files import read, write_whole
from rag_windows_eval.passages import PassagesTask
from rag_windows_eval.summary import as_json, summarise
from rag_windows_eval.task import AnswerRecord, Task, TaskExample

if TYPE_CHECKING:
    from rag_windows import WindowedLM
    from rag_windows_eval.cli.app import Asking


ALL = "all"
"""Stands for every method in --methods."""

_READERS: Mapping[str, tuple[Callable[..., Task], str | None]] = {
    "inscit": (inscit.InscitTask.read, None),
    "chatrag": (chatrag.ChatRagTask.read, None),
    "icl": (icl.IclTask.open, "texts"),
    "passages": (PassagesTask.read, "questions"),
    "citations": (citing.CitationsTask.read, "questions"),
}
"""By kind, what reads the data, and its own argument for --limit; None where examples are cut off.

A question of "passages" becomes several examples, and the texts of "icl" are drawn.
"""


class DataOptions(BaseModel):
    """Options of a command about its data; no settings of the run, since files may move."""

    kind: Literal["inscit", "chatrag", "icl", "passages", "citations"]
    data: str | None
    limit: int | None
    options: dict[str, Any]
    command: str

    def task(self) -> Task:
        """Read the data; ``options`` are those of this kind's reader."""
        reader, limiting = _READERS[self.kind]
        limit = {} if limiting is None else {limiting: self.limit}
        with progress("Reading the data"):
            task = reader(str(self.data), **limit, **self.options)
        if limiting is not None or self.limit is None or self.limit >= len(task.examples):
            return task
        settings = {**task.settings, "limit": self.limit}
        return replace(task, examples=task.examples[: self.limit], settings=settings)


def compared(asking: Asking, depths: Sequence[int | None]) -> tuple[runs.Condition, ...]:
    """Each method at each depth; a method named without numbers takes those of the profile."""
    names = names_in(asking.methods)
    if names == [ALL]:
        names = [runs.BASE, *(name for name in METHODS if name != runs.BASE)]
    chosen = [(name, resolve(name)) for name in names]
    if asking.profile is not None:
        found = Profile.load(asking.profile).method
        if found.name not in names:
            raise InputError(
                f"--profile holds numbers of the method {found.name}. Add this method to --methods."
            )
        chosen = [(name, found if name == found.name else method) for name, method in chosen]
    return runs.conditions(chosen, depths)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A dataset, with everything except the model that its answers depend on."""

    source: DataOptions
    task: Task
    conditions: tuple[runs.Condition, ...]
    search: runs.Search
    generating: runs.Generating
    citing_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        asking: Asking,
        source: DataOptions,
        depths: Sequence[int | None],
        searching: Mapping[str, Any],
        citing_options: Mapping[str, Any] | None = None,
    ) -> Evaluation:
        """The evaluation of a command's options; reads the data."""
        asking.check()
        conditions, task, search = compared(asking, depths), source.task(), runs.Search(**searching)
        for note in task.notes():
            tell(f"Note: {note}")
        if isinstance(task, icl.IclTask):
            for condition in conditions:
                task.shown(condition.top_k)
        generating = runs.Generating.of(task, asking.system, asking.max_new_tokens, asking.seed)
        if isinstance(task, citing.CitationsTask):
            generating = replace(generating, citations="removal")
        return cls(source, task, conditions, search, generating, citing_options or {})

    @property
    def answerer(self) -> runs.Answerer:
        """The function that answers the task's questions."""
        if isinstance(self.task, icl.IclTask):
            return functools.partial(self.task.answer, self.generating.prefix)
        if isinstance(self.task, citing.CitationsTask):
            return citing.Citing(self.generating, **self.citing_options).answer
        return self.generating.answer

    def manifest(self, model: runs.Described) -> runs.Manifest:
        """The manifest of a run with this model."""
        settings, citing_options = self.search.settings, dict(self.citing_options)
        made = runs.Manifest.of(model, self.task, self.conditions, settings, self.generating)
        if citing_options:
            made.settings["citing"] = citing_options
        return made

    def ranking(self, folder: runs.RunFolder) -> runs.Ranking:
        """The function that ranks the passages of an example."""
        with progress("Embedding passages") as counted:
            return self.search.over(self.task, folder.path / runs.INDEX, counted)

    def answer(
        self,
        folder: runs.RunFolder,
        ask: Asks,
        ranking: runs.Ranking,
        examples: Sequence[TaskExample] | None = None,
    ) -> list[AnswerRecord]:
        """Ask what the folder lacks, of all examples or of those that are given, which are timed.

        Returns records without an answer.
        """
        write_whole(folder.path / runs.SOURCE, self.source.model_dump_json(indent=2) + "\n")
        task, answerer, what = self.task, self.answerer, "Answering"
        if examples is not None:
            task, what = replace(task, examples=examples), "Measuring"
            answerer = functools.partial(runs.timed, answerer)
        batch = icl.BATCH if isinstance(self.task, icl.IclTask) else 1
        with progress(what) as counted:
            run = runs.Run(task, self.conditions, ranking, folder, ask(answerer), batch)
            return run.answer(counted)

    def score(self, folder: runs.RunFolder) -> tuple[report.ReportedRun, dict[str, Any]]:
        """Score a folder's records, and write scores, predictions and report; also their paths."""
        path = folder.path
        with progress("Scoring"):
            summary = summarise(self.task, folder)
            write_whole(path / runs.SCORES, json.dumps(as_json(summary), indent=1) + "\n")
            predictions = {
                one.name: str(_predictions(folder, self.task, one.name)) for one in self.conditions
            }
            one = report.ReportedRun(self.task, folder, summary, self.source.command)
            reports = report.write_report([one], path)
        files = {
            "folder": str(path),
            "scores": str(path / runs.SCORES),
            "predictions": predictions,
            "report": [str(one) for one in reports],
        }
        return one, files


Asks = Callable[[runs.Answerer], runs.Asking]
"""Has one model or several answer with an answerer."""


@contextmanager
def models(asking: Asking, over: RayOptions) -> Iterator[tuple[runs.Described, Asks]]:
    """Describe the model and give the function that asks it, here or in a cluster's processes."""
    if asking.out is not None:  # reported before gigabytes are loaded
        with runs.locked(asking.out):
            pass
    if not over.wanted:
        with loaded_model(asking) as lm:
            yield runs.Described.of(lm), functools.partial(runs.asking_one, lm)
        return
    made = fleet_options(SearchOptions(), asking, cache_memory=asking.cache_memory, **over.size)
    from rag_windows_server.fleet import data
    from rag_windows_server.fleet.cluster import cluster

    with cluster(over.ray, made.replicas, made.cpus_per_replica):
        loaded = data.Models(made)
        with progress(f"Loading {asking.name}"):
            first, *others = loaded.each(runs.Described.of)
        if different := [one for one in others if one.settings != first.settings]:
            message = "; ".join(runs.differences(first.settings, different[0].settings))
            raise InputError(
                f"The machines of the cluster have different models: {message}. Give all of "
                "them the same files."
            )

        def ask(answerer: runs.Answerer) -> runs.Asking:
            return functools.partial(loaded.map, functools.partial(_answered, answerer))

        yield first, ask


def _answered(
    answerer: runs.Answerer, lm: WindowedLM, block: runs.Block
) -> list[Sequence[runs.Answered]]:
    return list(runs.answers(lm, answerer, block))


def evaluate(
    asking: Asking,
    over: RayOptions,
    kind: Any,
    data: str,
    top_k: Sequence[int | None],
    searching: dict[str, Any],
    *,
    citing_options: Mapping[str, Any] | None = None,
    **chosen: Any,
) -> None:
    """Answer what is missing, score and show.

    ``chosen`` are options of the data, and ``citing_options`` those of `citing.Citing`.
    """
    source = DataOptions(
        kind=kind, data=data, limit=asking.limit, options=chosen, command=command()
    )
    one = Evaluation.of(asking, source, top_k, searching, citing_options)
    with models(asking, over) as (model, ask):
        manifest = one.manifest(model)
        path = asking.out or default_folder(one.task.name, asking.name, [manifest])
        with runs.RunFolder.begin(path, manifest, asking.fresh) as folder, going_on(path):
            failed = one.answer(folder, ask, one.ranking(folder))
            done, files = one.score(folder)
    if asking.json:
        cli.write_json({**as_json(done.summary), "files": files})
    else:
        cli.show(f"{report.terminal(done.summary)}\n")
        cli.show(f"Scores, predictions and report: {path}", "dim")
    tell_failed(failed)


def tell_failed(failed: Sequence[AnswerRecord]) -> None:
    """End with an error if there are questions without an answer."""
    if failed:
        first = failed[0]
        tell(
            f"Error: Missing answers, which count as empty: {len(failed)}, the first "
            f"{first.key!r} with {first.arm}: {first.error} Run the same command again to ask for "
            "what is missing."
        )
        raise typer.Exit(EXIT_ERROR)


def reported(path: Path, data: str | None = None) -> report.ReportedRun:
    """Score a run again; ``data`` names its data file if that was moved."""
    folder, source = runs.RunFolder.open(path), read(path / runs.SOURCE).json(DataOptions)
    source.data = data or source.data
    try:
        task, manifest = source.task(), folder.manifest
    except TypeError as error:
        raise DataError(
            f"The run in {path} has options of another version of rag-windows ({error}). Run its "
            "command again, with --fresh."
        ) from error
    now = json.loads(json.dumps({"name": task.name, **task.settings}))
    keys = tuple(one.key for one in task.examples)
    if keys != manifest.keys or runs.differences(manifest.settings["task"], now):
        raise DataError(
            f"The run in {path} used other data than {source.data or 'these'}. Name its data "
            "file with --data."
        )
    return report.ReportedRun(task, folder, summarise(task, folder), source.command)


def _predictions(folder: runs.RunFolder, task: Task, condition: str) -> Path:
    """Write a condition's answers: INSCIT's own format, else a line each."""
    path = folder.path / runs.PREDICTIONS / quote(condition, safe="@+=")
    records = folder.records[condition]
    if isinstance(task, inscit.InscitTask):
        path = path.with_name(f"{path.name}.json")
        inscit.write_predictions(path, task.examples, records, task.settings["evidence"])
    else:
        path = path.with_name(f"{path.name}.txt")
        chatrag.write_answers(path, [records[one.key].answer for one in task.examples])
    return path


def default_folder(task: str, model: str, manifests: Sequence[runs.Manifest]) -> Path:
    """Named by task and model, and by all settings: the same command finds it again."""
    text = "".join(json.dumps(one.settings, sort_keys=True) for one in manifests)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{task}-{Path(model).name}").strip("-.")
    return Path("runs") / f"{words[:80]}-{digest}"


@contextmanager
def going_on(path: Path) -> Iterator[None]:
    """Where a run stops early, report that its answers are stored, and how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        tell(f"Stopped. Finished answers are kept in {path}. Continue with: {command()}")
        raise typer.Abort from None
    except RagWindowsError:
        tell(f"Finished answers are kept in {path}.")
        raise


def command() -> str:
    """The command line without --fresh, which would begin again."""
    return shlex.join(["rag-windows", *(word for word in sys.argv[1:] if word != "--fresh")])
