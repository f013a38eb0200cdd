"""One run from a task and its arms to the figures."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rag_windows.cli.errors import EXIT_ERROR, tell
from rag_windows.cli.evaluation.finishing import finish
from rag_windows.cli.evaluation.showing import show
from rag_windows.cli.evaluation.source import Source, check_packages
from rag_windows.cli.models import ModelOptions, closing_cache, load_model
from rag_windows.cli.progress import Progress
from rag_windows.errors import InputError, RagWindowsError
from rag_windows.prompt.visible_text import encodable

if TYPE_CHECKING:
    from rag_windows.evaluation.arm import Arm
    from rag_windows.evaluation.manifest import Manifest
    from rag_windows.evaluation.options import RunOptions
    from rag_windows.evaluation.record import Record
    from rag_windows.evaluation.retrieval import Kind
    from rag_windows.evaluation.shard import Shard
    from rag_windows.evaluation.task import Task

RUNS = Path("runs")
"""Where runs go if nobody says."""


@dataclass(frozen=True, slots=True)
class Search:
    """How passages are found; see `Ranker`."""

    retriever: Kind
    depth: int | None
    embedder: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A run, as given on the command line.

    Attributes:
        source: the data.
        arms: what is compared.
        search: how passages are found.
        model: what reads them.
        out: the run's folder, or None for one named by the settings.
        shard: such as "1/2", or None for all questions.
        system: instruction instead of the task's, or None.
        max_new_tokens: instead of the task's, or None.
        seed: of all that is drawn.
        speed: questions on which the first token is timed.
        fresh: whether to throw away what the folder holds.
        as_json: whether the summary is printed as JSON.
    """

    source: Source
    arms: tuple[Arm, ...]
    search: Search
    model: ModelOptions
    out: Path | None = None
    shard: str | None = None
    system: str | None = None
    max_new_tokens: int | None = None
    seed: int = 0
    speed: int = 0
    fresh: bool = False
    as_json: bool = False


def evaluate(plan: Plan) -> None:
    """Read the data, answer what is not answered yet, score, and show.

    Raises:
        RagWindowsError: in the data or the arguments before any work; from the model at any time,
            finished answers being kept.
        typer.Exit: with code 2 if questions stayed without an answer.
    """
    from rag_windows.evaluation.options import RunOptions
    from rag_windows.evaluation.shard import Shard

    shard = None if plan.shard is None else Shard.parse(plan.shard)
    check_packages(plan.source.kind)
    progress = Progress()
    with progress.waiting("Reading the data"):
        task = plan.source.task()
    check_target(plan.out)
    for note in plan.source.notes(task, plan.arms):
        tell(f"Note: {note}")
    system = None if plan.system is None else encodable(plan.system)
    options = RunOptions.of(task, system, plan.max_new_tokens, plan.seed)
    _answer(plan, task, options, shard, progress)


def _answer(
    plan: Plan, task: Task, options: RunOptions, shard: Shard | None, progress: Progress
) -> None:
    from rag_windows.evaluation.folder import RunFolder
    from rag_windows.evaluation.manifest import Manifest
    from rag_windows.evaluation.retrieval import Ranker
    from rag_windows.evaluation.runner import run
    from rag_windows.evaluation.speed import measure_speed

    search = plan.search
    ranker = Ranker(task, search.retriever, search.depth, embedder=search.embedder)
    lm = load_model(plan.model, progress)
    manifest = Manifest.of(lm, task, plan.arms, ranker.settings, options, shard)
    path = plan.out or default_folder(manifest, plan.model.name)
    with closing_cache(lm), going_on(path), RunFolder.begin(path, manifest, plan.fresh) as folder:
        source = dataclasses.replace(plan.source, command=command())
        source.save(path)
        for note in folder.notes:
            tell(f"Note: {note}")
        with progress.counting("Embedding passages") as on_embedded:
            ranker.prepare(on_embedded, path / "index")
        with progress.counting("Answering") as told:
            outcome = run(
                lm,
                task,
                plan.arms,
                ranker,
                folder,
                options=options,
                answerer=source.answerer(task, options),
                progress=lambda done, whole, _: told(done, whole),
            )
        if plan.speed:
            with progress.counting("Timing the first token") as told:
                untimed = measure_speed(
                    lm,
                    task,
                    plan.arms,
                    ranker,
                    folder,
                    plan.speed,
                    options=options,
                    progress=lambda done, whole, _: told(done, whole),
                )
            for note in untimed:
                tell(f"Note: {note}")
        with progress.waiting("Scoring"):
            finished = finish(task, source, folder)
    show(finished, as_json=plan.as_json)
    tell_failed(outcome.failed)


def check_target(out: Path | None) -> None:
    """Make the folder before the model is loaded, so that what can't be written fails early.

    Raises:
        InputError: it can't be made, or nothing can be written there.
    """
    path = RUNS if out is None else out
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out {str(path)!r} can't be made: {error.strerror}; name another folder."
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise InputError(f"--out {str(path)!r} can't be written; name another folder.")


def default_folder(manifest: Manifest, model: str) -> Path:
    """Named by task and model, and by all settings: the same command finds it again."""
    text = json.dumps(manifest.as_dict()["settings"], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{manifest.task}-{Path(model).name}").strip("-.")
    return RUNS / f"{words[:80]}-{digest}"


@contextmanager
def going_on(path: Path) -> Iterator[None]:
    """Where a run stops before its end, tell that its answers are kept, and how to go on.

    Args:
        path: of the run's folder.
    """
    try:
        yield
    except KeyboardInterrupt:
        tell(f"Stopped. Finished answers are kept in {path}; go on with: {command()}")
        raise typer.Abort from None
    except RagWindowsError:
        if path.is_dir():
            tell(f"Finished answers are kept in {path}.")
        raise


def command() -> str:
    """What the user typed, but for what would throw the answers away."""
    return shlex.join(["rag-windows", *(word for word in sys.argv[1:] if word != "--fresh")])


def tell_failed(failed: Sequence[Record]) -> None:
    """Tell which questions have no answer.

    Raises:
        typer.Exit: with code 2 if there are any.
    """
    if not failed:
        return
    first = failed[0]
    missing = (
        "1 answer is missing and counts"
        if len(failed) == 1
        else (f"{len(failed)} answers are missing and count")
    )
    tell(
        f"Error: {missing} as empty, the first {first.key!r} of {first.arm}: {first.error} "
        "The same command asks again."
    )
    raise typer.Exit(EXIT_ERROR)
