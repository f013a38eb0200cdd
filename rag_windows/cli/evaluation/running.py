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
from pathlib import Path
from typing import Any

import typer

from rag_windows.calibration import Profile
from rag_windows.cli import render
from rag_windows.cli.errors import EXIT_ERROR, tell
from rag_windows.cli.evaluation.source import Source, beside
from rag_windows.cli.models import ModelOptions, loaded_model
from rag_windows.cli.render import progress
from rag_windows.errors import InputError, MethodError, RagWindowsError
from rag_windows.evaluation.asking import measure_speed, run
from rag_windows.evaluation.files import write_whole
from rag_windows.evaluation.icl import IclTask
from rag_windows.evaluation.inscit import INSCIT_PACKAGES
from rag_windows.evaluation.metrics import check_packages
from rag_windows.evaluation.record import Record
from rag_windows.evaluation.report import ReportedRun, write_report
from rag_windows.evaluation.report.tables import terminal
from rag_windows.evaluation.retrieval import Ranker
from rag_windows.evaluation.run import INDEX, SCORES, Arm, Manifest, RunFolder, RunOptions, arms
from rag_windows.evaluation.summary import Summary, summarise
from rag_windows.methods import linked, resolve
from rag_windows.methods.registry import known_parameters, names_in, with_known
from rag_windows.prompt.visible_text import encodable, visible

RUNS = Path("runs")
"""Where runs go if nobody says."""


def compared(
    methods: Sequence[str],
    depths: Sequence[int | None],
    *,
    numbers: Mapping[str, float | None],
    link_tokens: Any = None,
    profile: str | None = None,
) -> tuple[Arm, ...]:
    """Each method at each depth.

    Args:
        methods: names with commas between them, perhaps with parameters; see `resolve`.
        depths: numbers of passages; (None,) for all that an example brings.
        numbers: APE's "temperature" and "scale" for each method whose name sets none; or None.
        link_tokens: for each method with windows, or None.
        profile: path of a calibration, whose method's numbers replace the defaults; or None.

    Raises:
        MethodError: an unknown name, or a number outside a method's domain.
        InputError: nothing, or something twice; or a number that none of the methods has.
        ProfileError: the profile can't be read.
    """
    given = {key: value for key, value in numbers.items() if value is not None}
    names = names_in(",".join(methods))
    if "" in names:
        raise InputError(
            f"--methods {','.join(methods)!r} has an empty name; write names with commas between "
            "them, such as sequential,ape."
        )
    found = {name: resolve(name) for name in names}
    if len(found) < len(names):
        arms([(name, found[name]) for name in names], depths)
    if profile is not None:
        if given:
            raise InputError(
                "--profile brings its method's numbers: leave --rag-temperature and --rag-scale "
                "out."
            )
        method = Profile.load(profile).method
        if method.name not in [one.name for one in found.values()]:
            raise InputError(
                f"--profile holds numbers of {method.name}, which is not among --methods; add it."
            )
        for name, one in found.items():
            if one.name == method.name and ":" not in name:
                found[name] = method
    for key in given:
        if not any(key in known_parameters(method) for method in found.values()):
            raise MethodError(f"--rag-{key} is a parameter of none of --methods; leave it out.")
    chosen = []
    for name, method in found.items():
        free = {key: value for key, value in given.items() if f"{key}=" not in name}
        chosen.append((name, linked(with_known(method, free), link_tokens)))
    return arms(chosen, depths)


def evaluate(
    source: Source,
    chosen: tuple[Arm, ...],
    search: Mapping[str, Any],
    model: ModelOptions,
    *,
    out: Path | None,
    system: str | None,
    max_new_tokens: int | None,
    seed: int,
    speed: int,
    fresh: bool,
    as_json: bool,
) -> None:
    """Read the data, answer what is not answered yet, score, and show.

    Args:
        source: the data.
        chosen: what is compared.
        search: how passages are found; arguments of `Ranker`.
        model: what reads them.
        out: the run's folder, or None for one named by the settings.
        system: instruction instead of the task's, or None.
        max_new_tokens: instead of the task's, or None.
        seed: of all that is drawn.
        speed: questions on which the first token is timed.
        fresh: whether to throw away what the folder holds.
        as_json: whether the summary is printed as JSON.

    Raises:
        RagWindowsError: in the data or the arguments before any work; from the model at any time,
            finished answers being kept.
        typer.Exit: with code 2 if questions stayed without an answer.
    """
    check_packages(*(INSCIT_PACKAGES if source.kind == "inscit" else ()), "matplotlib")
    with progress("Reading the data"):
        task = source.task()
    _check_target(out)
    if isinstance(task, IclTask):
        for arm in chosen:
            task.shown(arm.top_k, task.seeds[0])
    if missing := getattr(task, "unfound", 0):
        tell(
            f"Note: {missing} evidence passages are not in the corpus: no retriever can find them."
        )
    prefix = None if system is None else encodable(system)
    options = RunOptions.of(task, prefix, max_new_tokens, seed)
    ranker = Ranker(task, **search)
    with loaded_model(model) as lm:
        manifest = Manifest.of(lm, task, chosen, ranker.settings, options)
        path = out or _default_folder(manifest, str(model.model))
        with _going_on(path), RunFolder.begin(path, manifest, fresh) as folder:
            source = source.model_copy(update={"command": _command()})
            source.save(path)
            _tell_notes(folder.notes)
            with progress("Embedding passages") as on_embedded:
                ranker.prepare(on_embedded, path / INDEX)
            answerer = source.answerer(task, options)
            with progress("Answering") as told:
                outcome = run(lm, task, chosen, ranker, folder, answerer=answerer, progress=told)
            if speed:
                with progress("Timing the first token") as told:
                    timed = (lm, task, chosen, ranker, folder, speed)
                    _tell_notes(measure_speed(*timed, options=options, progress=told))
            with progress("Scoring"):
                summary = summarise(task, folder)
                scores = path / SCORES
                write_whole(scores, summary.dump())
                predictions = {
                    arm.name: source.write_predictions(folder, task, arm.name)
                    for arm in chosen
                    if folder.records(arm.name)
                }
                one = ReportedRun(task, folder, summary, source.command)
                report = write_report([one], path)
    files: dict[str, Any] = {
        "folder": str(path),
        "scores": str(scores),
        "predictions": {arm: str(one) for arm, one in predictions.items()},
        "report": [str(one) for one in report],
    }
    if as_json:
        render.write_json({**summary.as_json(), "files": files})
    else:
        _show(summary, beside(task, folder))
        _show_paths("Scores", [files["scores"]])
        _show_paths("Predictions", files["predictions"].values())
        _show_paths("Report", files["report"])
    _tell_failed(outcome.failed)


def report(folders: Sequence[Path], out: Path | None, data: Path | None, *, as_json: bool) -> None:
    """Score runs again and write one report of them.

    Args:
        folders: of the runs.
        out: where the report goes; None for the first run's folder.
        data: the data file, where it does not lie any more where the runs read it.
        as_json: whether the summaries are printed as JSON.

    Raises:
        DataError: a folder or its data can't be read.
    """
    runs, told, shown = [], [], []
    for path in folders:
        source, folder = Source.load(path, data), RunFolder.open(path)
        check_packages(*(INSCIT_PACKAGES if source.kind == "inscit" else ()), "matplotlib")
        _tell_notes(folder.notes)
        task = source.task()
        source.check(task, folder.manifest)
        with progress("Scoring"):
            summary = summarise(task, folder)
            runs.append(ReportedRun(task, folder, summary, source.command))
        written: dict[str, Any] = {"folder": str(path), "scores": None}
        files = {**written, "predictions": {}, "report": []}
        told.append({**summary.as_json(), "files": files})
        shown.append((summary, list(beside(task, folder))))
    with progress("Scoring"):
        paths = [str(one) for one in write_report(runs, folders[0] if out is None else out)]
    if as_json:
        render.write_json({"runs": told, "report": paths})
        return
    for summary, more in shown:
        _show(summary, more)
    _show_paths("Report", paths)


def _show(summary: Summary, more: Sequence[str] | Iterator[str]) -> None:
    out = render.console()
    for text in (terminal(summary), *more):
        out.print(visible(text), soft_wrap=True)
        out.print()


def _show_paths(name: str, paths: Any) -> None:
    told = visible(", ".join(paths))
    render.console().print(f"{name}: {told}", style="dim", soft_wrap=True)


def _tell_notes(notes: Sequence[str]) -> None:
    for note in notes:
        tell(f"Note: {note}")


def _check_target(out: Path | None) -> None:
    """Make the folder before the model is loaded, so that what can't be written fails early."""
    path = RUNS if out is None else out
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out {str(path)!r} can't be made: {error.strerror}; name another folder."
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise InputError(f"--out {str(path)!r} can't be written; name another folder.")


def _default_folder(manifest: Manifest, model: str) -> Path:
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
        if path.is_dir():
            tell(f"Finished answers are kept in {path}.")
        raise


def _command() -> str:
    """What the user typed, but for what would throw the answers away."""
    return shlex.join(["rag-windows", *(word for word in sys.argv[1:] if word != "--fresh")])


def _tell_failed(failed: Sequence[Record]) -> None:
    """Tell which questions have no answer, and end with code 2 if there are any."""
    if not failed:
        return
    first, many = failed[0], len(failed) > 1
    missing = (
        f"{len(failed)} answers are missing and count" if many else "1 answer is missing and counts"
    )
    tell(
        f"Error: {missing} as empty, the first {first.key!r} of {first.arm}: {first.error} "
        "The same command asks again."
    )
    raise typer.Exit(EXIT_ERROR)
